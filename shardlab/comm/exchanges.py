"""Synchronisation of replicas by outer gradients, fragment by fragment."""

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from shardlab.codecs.base import Block, Unit
from shardlab.comm.background import Background, Running
from shardlab.comm.collective import Collective
from shardlab.comm.feedback import ErrorFeedback
from shardlab.comm.outer_parameters import OuterUnit, digest, outer_units, running_statistics
from shardlab.core.errors import UserError
from shardlab.models.names import plain
from shardlab.strategy.sync import Sync

_COUNT = "sync.residuals"
_RESIDUAL, _MESSAGES, _BUFFERS = "sync.residual.", "sync.messages.", "sync.buffers"
_DELAYED = "sync.delayed."
_FIX = (
    "begin with the same weights on all ranks, or load handle.state_dict() with those of a "
    "checkpoint, and count equally many steps: drop_last=True where data do not divide, "
    "handle.step() in place of optimizer= where GradScaler leaves steps out"
)


@dataclass(eq=False)
class _Exchange:
    """Messages of one fragment, between their beginning and the update."""

    facts: str
    """what must be equal on all replicas"""
    units: Sequence[OuterUnit]
    means: list[Tensor]
    """outer gradients of this replica, then the means; empty: made one after another"""
    statistics: Tensor | None
    """running statistics of the model, float64"""
    running: Running | None = None
    moments: Tensor | None = None
    """float32 [4], once the means are known: the product of this replica's outer gradient and the
    sum of the others', the squares of both, and that of the mean"""


class Exchanges:
    """Exchanges of one model between its replicas.

    Args:
        model: whose parameters are those of `fully_shard` or of one that DistributedDataParallel
            wraps, with their values at the start.
        settings: how.
        collective: between the replicas, of the outer gradients.
        exact: likewise, uncompressed, of running statistics; None: they stay as they are.
        feedback: of `collective`.

    Raises:
        UserError: there are more fragments than units.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: Sync,
        collective: Collective,
        exact: Collective | None,
        feedback: ErrorFeedback | None,
    ) -> None:
        self.collective = collective
        self.units = outer_units(model, settings.state == "host")
        self._model, self._settings = model, settings
        self._exact, self._feedback = exact, feedback
        device, count = self.units[0].device, settings.fragments
        if count > len(self.units):
            raise UserError(
                f"attach: {count} fragments of a model of {len(self.units)} units: lower fragments"
            )
        # strided, so that fragments have parts of all depths
        self._fragments = [self.units[index::count] for index in range(count)]
        self.underway: dict[int, _Exchange] = {}
        """exchanges that have begun, by fragment"""
        self._background = Background("outer", device) if settings.delay else None
        # replicas with other settings would wait for messages that never come
        collective.compare(f"sync of {settings!r}", device)
        self._are_compared = False
        self._moments: dict[int, Tensor] = {}
        """of the last exchange of each fragment"""

    @torch.no_grad()
    def restart(self) -> None:
        """Take the parameters as they are for the outer ones."""
        for unit in self.units:
            unit.restart()
        self._are_compared = False

    def compare(self, step: int) -> None:
        """Compare what must be equal on all replicas.

        Raises:
            PayloadError: on all replicas: it is not.
        """
        self._compare(self._facts(step))

    @torch.no_grad()
    def start(self, index: int, step: int) -> None:
        """Begin the exchange of a fragment; with a delay, while training goes on.

        Raises:
            UserError: a parameter is trained that is not synchronised.
        """
        units = self._fragments[index]
        self._check_trained()
        statistics = self._statistics() if index == 0 else None
        exchange = self.underway[index] = _Exchange(self._facts(step), units, [], statistics)
        self._are_compared = True
        if self._background is not None:
            exchange.means = [unit.gradient() for unit in units]
            exchange.running = self._background.start(self._reduce, exchange)

    @torch.no_grad()
    def apply(self, index: int, averages: bool = False) -> None:
        """Update a fragment by the mean outer gradients.

        Args:
            averages: without the outer optimizer.
        """
        exchange = self.underway.pop(index)
        if exchange.means:
            _wait(exchange)
            means = iter(exchange.means)
        else:
            means = self._means(exchange)
        self._reshard()
        for unit, mean in zip(exchange.units, means, strict=True):
            if averages:
                unit.average(mean)
            else:
                unit.update(mean, self._settings)
            unit.mix(self._settings.alpha)
        if exchange.moments is not None:
            self._moments[index] = exchange.moments
        if exchange.statistics is not None:
            buffers = running_statistics(self._model)
            parts = exchange.statistics.split([b.numel() for b in buffers])
            for buffer, part in zip(buffers, parts, strict=True):
                buffer.copy_(part.view_as(buffer))

    @torch.no_grad()
    def set_parameters(self) -> None:
        """Set the parameters to the outer ones."""
        self._reshard()
        for unit in self.units:
            unit.mix(0.0)

    def digest(self) -> Tensor:
        """Return what tells the present weights from others, uint8 [8]."""
        weights = digest(unit.flat() for unit in self.units)
        return torch.tensor(list(bytes.fromhex(weights)), dtype=torch.uint8)

    def metrics(self) -> dict[str, float]:
        """Return the norm of the mean outer gradient at the last synchronisation, and the cosine
        of what this replica and the others sent, where it is known; the host waits for the device.
        """
        if not self._moments:
            return {}
        sums = torch.stack([*self._moments.values()]).sum(0).tolist()
        product, square, remote_square, mean_square = sums
        metrics = {"sync/outer_grad_norm": math.sqrt(mean_square)}
        if square and remote_square:
            metrics["sync/replica_cosine"] = product / math.sqrt(square * remote_square)
        return metrics

    def wait(self) -> None:
        """Wait until all that is on the way has arrived; the parameters stay as they are."""
        for exchange in self.underway.values():
            _wait(exchange)

    def forget(self) -> None:
        """Wait for what is on the way, and drop it."""
        if self._background is not None:
            with suppress(Exception):  # of an exchange that is dropped
                self._background.wait()
        self.underway.clear()

    def state_dict(self) -> dict[str, Tensor]:
        """Return outer parameters, momentum, residuals, and what is on the way."""
        self.wait()
        residuals = {} if self._feedback is None else self._feedback.state_dict()
        state = {_COUNT: torch.tensor(len(residuals))}
        state |= {_RESIDUAL + name: tensor for name, tensor in residuals.items()}
        messages = self.collective.state_dict()
        state |= {_MESSAGES + name: tensor for name, tensor in messages.items()}
        for unit in self.units:
            state |= unit.state_dict()
        for exchange in self.underway.values():
            for unit, mean in zip(exchange.units, exchange.means, strict=True):
                state[_DELAYED + unit.name] = mean
            if exchange.statistics is not None:
                state[_BUFFERS] = exchange.statistics
        return state

    def check_state(self, state: dict[str, Tensor]) -> None:
        """Raise `UserError` for a state of other parameters, or one that lacks residuals."""
        for unit in self.units:
            if not unit.is_of(state):
                raise UserError(
                    f"the state is of other parameters than are trained in {unit.name!r}, or of "
                    "other shards: freeze and shard as when it was saved, or begin a new stage "
                    "without handle.load_state_dict"
                )
        check_residuals(state, _RESIDUAL, _COUNT, self._feedback is not None)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue from a state that `check_state` has accepted."""
        self.forget()
        if self._feedback is not None:
            self._feedback.load_state_dict(below(_RESIDUAL, state))
        self.collective.load_state_dict(below(_MESSAGES, state))
        for unit in self.units:
            unit.load_state_dict(state)
        for index, units in enumerate(self._fragments):
            names = [_DELAYED + unit.name for unit in units]
            if names[0] in state:
                pairs = zip(names, units, strict=True)
                means = [state[name].to(unit.device, copy=True) for name, unit in pairs]
                statistics = state.get(_BUFFERS) if index == 0 else None
                self.underway[index] = _Exchange("", units, means, statistics)

    def _reshard(self) -> None:
        """Free what an evaluation has left gathered, and would hide new parameters."""
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _check_trained(self) -> None:
        self._reshard()  # what is gathered stands in the place of the parameters
        exchanged = {id(p) for unit in self.units for p in unit.parameters.values()}
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad and id(parameter) not in exchanged:
                raise UserError(
                    f"sync: {plain(name)} was added, unfrozen or replaced (load_state_dict with "
                    "assign=True) after attach: do so before it, or detach() and attach again"
                )

    @torch.no_grad()
    def _reduce(self, exchange: _Exchange) -> None:
        exchange.means = [*self._means(exchange)]

    def _means(self, exchange: _Exchange) -> Iterator[Tensor]:
        """Yield the mean outer gradient of each unit, one after another for the sake of memory."""
        self._compare(exchange.facts)
        if exchange.statistics is not None and self._exact is not None:
            part = Unit("buffers", (Block("buffers", exchange.statistics.numel(), 1),))
            self._exact.all_reduce(exchange.statistics, 1 / self._exact.world_size, part)
        vectors = exchange.means or (unit.gradient() for unit in exchange.units)
        exchange.moments = moments = torch.zeros(4, device=exchange.units[0].device)

        def watch(added: Tensor, total: Tensor) -> None:
            remote = total - added
            moments[:3] += torch.stack([added.dot(remote), added.dot(added), remote.dot(remote)])

        self.collective.watch = watch
        for unit, vector in zip(exchange.units, vectors, strict=True):
            self.collective.all_reduce(vector, 1 / self.collective.world_size, unit.message)
            moments[3] += vector.dot(vector)
            if self._feedback is not None:
                self._feedback.end_step()
            yield vector

    def _statistics(self) -> Tensor | None:
        buffers = running_statistics(self._model) if self._exact is not None else []
        # wide enough that the mean of equal numbers is that number
        return torch.cat([b.double().flatten() for b in buffers]) if buffers else None

    def _facts(self, step: int) -> str:
        """Return what must be equal on all replicas, the parameters at the first exchange."""
        if self._are_compared:
            return f"step {step}"
        return f"step {step}, first parameters {digest(unit.outer for unit in self.units)}"

    def _compare(self, facts: str) -> None:
        self.collective.compare(facts, self.units[0].device, fix=_FIX)


def check_residuals(
    state: dict[str, Tensor], prefix: str, count: str, has_feedback: bool, or_else: str = ""
) -> dict[str, Tensor]:
    """Return the residuals of a state, by their names behind `prefix`.

    Args:
        count: name of their number in the state.
        has_feedback: whether there is error feedback.
        or_else: what else helps where there is none.

    Raises:
        UserError: some are missing, or there is no error feedback.
    """
    residuals = below(prefix, state)
    expected = int(state.get(count, len(residuals)))
    if len(residuals) != expected:
        raise UserError(
            f"the state holds {len(residuals)} of {expected} residuals: a new handle names none "
            "before its first step, so take the names from the checkpoint's metadata "
            "(docs/how-to/your-own-model.md)"
        )
    if residuals and not has_feedback:
        raise UserError(
            f"the state holds residuals: attach with error_feedback in {prefix.partition('.')[0]}"
            f"{or_else}"
        )
    return residuals


def is_whole(state: dict[str, Tensor]) -> bool:
    """Return whether a state is of one replica, and not merged of several."""
    return _COUNT in state


def is_underway(state: dict[str, Tensor]) -> bool:
    """Return whether a state holds what is on the way between replicas."""
    return any(name.startswith(_DELAYED) for name in state)


def below(prefix: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the entries whose names begin so, by the rest of their names."""
    return {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}


def _wait(exchange: _Exchange) -> None:
    if exchange.running is not None:
        exchange.running.wait()
