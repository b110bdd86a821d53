"""Parameters as all replicas know them, and the optimizer that moves them."""

import hashlib
from collections.abc import Iterable, Sequence
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardlab.codecs.base import Block, Unit
from shardlab.core.errors import UserError
from shardlab.models.names import by_layer
from shardlab.strategy.sync import Sync

_DTYPES = torch.float32, torch.bfloat16, torch.float16
_SENT = "@outer"
"""suffix of units of outer gradients"""
OUTER = "outer."
"""begins the names of a state that all replicas share"""
REPLICAS = "sync.replicas"
"""number of replicas of a state"""
_MOMENTUM, _IDENTITY = f"{OUTER}momentum.", f"{OUTER}identity."


class OuterUnit:
    """Parameters that are synchronised in one message, and what the outer optimizer knows of them.

    Args:
        parameters: by name; of a sharded one, this rank's part.
        on_host: keep the state of the outer optimizer in host memory.
    """

    def __init__(self, name: str, parameters: dict[str, nn.Parameter], on_host: bool) -> None:
        self.name = name
        self.parameters = parameters
        self._sizes = [_local(parameter).numel() for parameter in parameters.values()]
        self.message = Unit(name + _SENT, (Block(name, sum(self._sizes), 1),))
        outer = self.flat()
        self.device = outer.device
        """of the parameters and outer gradients"""
        if on_host and self.device.type != "cpu":
            outer = outer.cpu().pin_memory()
        self.outer = outer
        """float32 [elements]"""
        self.momentum = torch.zeros_like(outer, pin_memory=outer.is_pinned())

    def gradient(self) -> Tensor:
        """Return the outer gradient of this replica, float32 [elements]."""
        return self.outer.to(self.device) - self.flat()

    def restart(self) -> None:
        """Take the parameters as they are for the outer ones."""
        self.outer.copy_(self.flat())

    def average(self, mean: Tensor) -> None:
        """Apply the mean outer gradient without the outer optimizer."""
        self.outer.sub_(mean.to(self.outer.device))

    def update(self, mean: Tensor, settings: Sync) -> None:
        """Apply the mean outer gradient, which is changed."""
        momentum, mean = settings.outer_momentum(), mean.to(self.outer.device)
        self.momentum.mul_(momentum).add_(mean)
        step = self.momentum
        if settings.optimizer == "nesterov":
            step = mean.add_(self.momentum, alpha=momentum)
        self.outer.sub_(step, alpha=settings.learning_rate)

    def mix(self, alpha: float) -> None:
        """Set the parameters to alpha of their own and the rest of the outer ones."""
        for parameter, part in zip(self.parameters.values(), self._parts(), strict=True):
            local = _local(parameter)
            if alpha:
                part = part.to(local.device).lerp(local.float(), alpha)
            local.copy_(part)

    def outer_parameters(self) -> dict[nn.Parameter, Tensor]:
        """Return the outer parameter of each, sharded as it is."""
        tensors = {}
        for parameter, part in zip(self.parameters.values(), self._parts(), strict=True):
            tensor = part.to(self.device, parameter.dtype, copy=True)
            if isinstance(parameter, DTensor):
                tensor = DTensor.from_local(
                    tensor,
                    parameter.device_mesh,
                    parameter.placements,
                    run_check=False,
                    shape=parameter.shape,
                    stride=parameter.stride(),
                )
            tensors[parameter] = tensor
        return tensors

    def state_dict(self) -> dict[str, Tensor]:
        """Return outer parameters, momentum, and a digest of what they belong to."""
        return {
            f"sync.outer.{self.name}": self.outer,
            _MOMENTUM + self.name: self.momentum,
            _IDENTITY + self.name: torch.tensor(self._identity),
        }

    def is_of(self, state: dict[str, Tensor]) -> bool:
        """Return whether a state belongs to these parameters, by names, shapes and shards."""
        saved = state.get(_IDENTITY + self.name)
        return saved is not None and int(saved) == self._identity

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue from `state_dict()` of the same parameters."""
        self.outer.copy_(state[f"sync.outer.{self.name}"])
        self.load_momentum(state)

    def load_momentum(self, state: dict[str, Tensor]) -> None:
        """Take the momentum of the same parameters alone, else zeros."""
        self.momentum.zero_()
        if self.is_of(state):
            self.momentum.copy_(state[_MOMENTUM + self.name])

    @cached_property
    def _identity(self) -> int:
        text = [(n, p.shape, _local(p).shape, _shard(p)) for n, p in self.parameters.items()]
        return int(hashlib.blake2b(repr(text).encode(), digest_size=7).hexdigest(), 16)

    def flat(self) -> Tensor:
        """Return a copy of the parameters, float32 [elements]."""
        return torch.cat([_local(p).float().flatten() for p in self.parameters.values()])

    def _parts(self) -> list[Tensor]:
        shapes = [_local(parameter).shape for parameter in self.parameters.values()]
        parts = self.outer.split(self._sizes)
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def outer_units(model: nn.Module, on_host: bool) -> list[OuterUnit]:
    """Return the trained parameters by layer."""
    layers = by_layer(model)
    for name, parameter in (named for part in layers.values() for named in part.items()):
        if parameter.dtype not in _DTYPES:
            raise UserError(
                f"attach: {name} of {parameter.dtype}: sync is for float32, bf16 and fp16"
            )
        if parameter.is_meta:
            raise UserError(
                f"attach: {name} has no values on the meta device: with sync attach after "
                "to_empty() and the initialisation"
            )
    return [OuterUnit(name, parameters, on_host) for name, parameters in layers.items()]


def running_statistics(model: nn.Module) -> list[Tensor]:
    """Return the running means and variances of normalisation layers, by torch's names of them."""
    names = "running_mean", "running_var"
    return [b for name, b in model.named_buffers() if name.rpartition(".")[2] in names]


def outer_state(states: Sequence[dict[str, Tensor]], rank: int) -> dict[str, Tensor]:
    """Return what all replicas share, from the states of all old ranks, for a new rank.

    The ranks of a replica follow one another, and are as many as before.
    """
    shards = len(states) // int(states[0].get(REPLICAS, len(states)))
    return {k: v for k, v in states[rank % shards].items() if k.startswith(OUTER)}


def digest(vectors: Iterable[Tensor]) -> str:
    """Return what tells these float32 vectors from others."""
    result = hashlib.blake2b(digest_size=8)
    for vector in vectors:
        result.update(vector.cpu().numpy().data)
    return result.hexdigest()


def _shard(parameter: Tensor) -> list[int]:
    """Return the numbers of this rank's shard, by dimension of the mesh that shards."""
    if not isinstance(parameter, DTensor):
        return []
    coordinate = tuple[int, ...](parameter.device_mesh.get_coordinate() or ())
    placed = zip(coordinate, parameter.placements, strict=True)
    return [index for index, placement in placed if placement.is_shard()]


def _local(parameter: Tensor) -> Tensor:
    tensor = parameter.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
