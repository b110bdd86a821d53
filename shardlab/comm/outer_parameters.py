"""Parameters as all replicas know them, and the optimizer that moves them at exchanges."""

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardlab.codecs.base import Block, Unit
from shardlab.config.sync import Sync
from shardlab.core.errors import UserError
from shardlab.models.names import by_layer

_DTYPES = torch.float32, torch.bfloat16, torch.float16
_OUTER = "@outer"
"""suffix of units whose outer gradients are exchanged"""


class OuterUnit:
    """Parameters that are exchanged in one message, and what the outer optimizer knows of them.

    Args:
        parameters: by name; of a sharded one, this rank's part.
        on_host: keep the state of the outer optimizer in host memory.
    """

    def __init__(self, name: str, parameters: dict[str, nn.Parameter], on_host: bool) -> None:
        self.name = name
        self.parameters = parameters
        self._sizes = [_local(parameter).numel() for parameter in parameters.values()]
        self.message = Unit(name + _OUTER, (Block(name, sum(self._sizes), 1),))
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

    def flat(self) -> Tensor:
        """Return a copy of the parameters, float32 [elements]."""
        return torch.cat([_local(p).float().flatten() for p in self.parameters.values()])

    def _parts(self) -> list[Tensor]:
        shapes = [_local(parameter).shape for parameter in self.parameters.values()]
        parts = self.outer.split(self._sizes)
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def outer_units(model: nn.Module, on_host: bool) -> list[OuterUnit]:
    """Return the trained parameters by layer."""
    found = by_layer(model)
    for name, parameter in (each for part in found.values() for each in part.items()):
        if parameter.dtype not in _DTYPES:
            raise UserError(f"attach: {name} of {parameter.dtype}: exchanges are in float32")
    return [OuterUnit(name, parameters, on_host) for name, parameters in found.items()]


def digest(vectors: Iterable[Tensor]) -> str:
    """Return what tells these float32 vectors from others."""
    found = hashlib.blake2b(digest_size=8)
    for vector in vectors:
        found.update(vector.cpu().numpy().data)
    return found.hexdigest()


def _local(parameter: Tensor) -> Tensor:
    tensor = parameter.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
