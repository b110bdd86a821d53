"""Rare synchronisation: replicas train alone, and exchange parameters every H steps.

Gradients are reduced inside a replica alone. Every H optimizer steps each unit u of the parameters
is exchanged between the R replicas:

    delta_r = outer - theta_r                              (the outer gradient of replica r)
    delta   = 1/R * sum over r of D(C(delta_r + e_r))      (by any codec, with error feedback)
    outer   <- outer - rate * d,  d = delta with momentum, as in torch.optim.SGD
    theta_r <- alpha * theta_r + (1 - alpha) * outer

Local SGD (Stich 2019) is rate 1 without momentum, DiLoCo (Douillard et al. 2023) AdamW inside and
Nesterov's momentum outside. Fragments that are exchanged at different steps, a delay of the result
and alpha are those of Streaming DiLoCo (Douillard et al. 2025).

Laws:
- `outer` is the same on all replicas, bit for bit; so are the parameters right after an exchange
  with one fragment, no delay and alpha 0;
- between exchanges nothing is sent between replicas, and the exchanged bytes are in the ledger;
- with `every` 1, rate 1, no momentum, no codec and SGD inside, training is data parallel, up to
  rounding; with one replica and rate 1 it is training without exchanges, up to rounding.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from shardlab.codecs.base import Block, Unit
from shardlab.comm.background import Background, Running
from shardlab.comm.collective import Collective
from shardlab.comm.feedback import ErrorFeedback
from shardlab.comm.object_collectives import naming_lost_rank
from shardlab.comm.outer_parameters import OuterUnit, digest, outer_units
from shardlab.comm.weight_changes import WeightChanges
from shardlab.config.sync import Sync
from shardlab.core.errors import UserError
from shardlab.models.names import parameter_names, plain

BETWEEN_EXCHANGES = "sync."
"""begins the names of what only the same ranks can continue with"""
_STEP, _COUNT, _REPLICAS = "outer.step", "sync.residuals", "sync.replicas"
_RESIDUAL, _MESSAGES, _BUFFERS = "sync.residual.", "sync.messages.", "sync.buffers"
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
    buffers: Tensor | None
    """all float buffers of the model"""
    running: Running | None = None


class RareSync:
    """Exchanges of one model between its replicas.

    Args:
        model: whose parameters are those of `fully_shard` or of one that DistributedDataParallel
            wraps, with their values at the start.
        settings: how often and how.
        collective: between the replicas, of the outer gradients.
        exact: likewise, uncompressed, of float buffers; None: they stay as they are.
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
        self.settings = settings
        self.step = 0
        """optimizer steps so far"""
        self._model = model
        self._collective, self._exact, self._feedback = collective, exact, feedback
        self._units = outer_units(model, settings.state == "host")
        device = self._units[0].device
        count = settings.fragments
        if count > len(self._units):
            raise UserError(
                f"attach: {count} fragments of a model of {len(self._units)} units: lower fragments"
            )
        # strided, so that fragments have parts of all depths
        self._fragments = [self._units[index::count] for index in range(count)]
        self._exchanges: dict[int, _Exchange] = {}
        """on the way, by fragment"""
        self._background = None
        if settings.delay:
            self._background = Background("outer", device)
        self.is_counted = False
        """whether optimizers say when a step has ended"""
        self._is_detached = False
        # replicas with other settings would wait for messages that never come
        collective.compare(f"exchanges of {settings!r}", device)
        self._are_compared = False
        # weights may be loaded after attach
        self._takes_parameters = True
        """before the next step, for the outer ones"""
        self._first = model.register_forward_pre_hook(self._begin, prepend=True)
        self._changes = WeightChanges(model, self._units)

    def __deepcopy__(self, _: object) -> "RareSync":
        # hooks of a copy of the model, such as an average, stay those of what is exchanged
        return self

    def training_began(self) -> None:
        """Note that an optimizer has stepped, also where others are to step before that counts."""
        self._takes_parameters = False

    def step_ended(self) -> None:
        """Count an optimizer step, and exchange what is due after it.

        Raises:
            PayloadError: on all replicas: they differ in their steps, or in the parameters they
                began with.
            UserError: other parameters are trained than at the start, or weights were loaded.
            RuntimeError: a rank has ended or does not answer; names it.
        """
        if self._is_detached:
            return
        if not self._is_warming_up:  # else the end of the warm-up takes them
            self._changes.check_loaded(self.step)
        self._changes.step_ended()
        self._takes_parameters = False
        self.step += 1
        if self.step == self.settings.warmup_steps:
            self._restart()
        with naming_lost_rank(self.step):
            for index in range(len(self._fragments)):
                if self._is_due(index):
                    self._start(index)
                # what was on the way may have been finished early
                if index in self._exchanges and self._is_due(index, self.settings.delay):
                    self._finish(index)

    def synchronize(self) -> None:
        """Average the replicas, on all ranks; the parameters are then the outer ones.

        Without momentum, which would multiply what a few steps have moved.

        Raises:
            as `step_ended`.
        """
        if self.step < self.settings.warmup_steps:
            return
        self._changes.check_loaded(self.step)
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # an evaluation may have left what it has gathered
        with naming_lost_rank(self.step):
            for index in [*self._exchanges]:
                self._finish(index)
            # a replica that has nothing to send would leave the others waiting
            self._compare(self._facts())
            for index in range(len(self._fragments)):
                if not self._is_due(index):  # else it was exchanged after this very step
                    self._start(index)
                    self._finish(index, averages=True)
        with torch.no_grad():
            for unit in self._units:
                unit.mix(0.0)

    def wait(self) -> None:
        """Wait until all that is on the way has arrived; the parameters stay as they are."""
        for exchange in self._exchanges.values():
            _wait(exchange)

    def exchanged_state_dict(self) -> dict[str, Tensor]:
        """Return the outer parameters by name, those that are not trained, and the buffers."""
        state = {plain(name): tensor for name, tensor in self._model.state_dict().items()}
        aliases = parameter_names(self._model)
        for parameter, tensor in self.exchanged_parameters().items():
            state |= dict.fromkeys(aliases[id(parameter)], tensor)
        return state

    def exchanged_parameters(self) -> dict[nn.Parameter, Tensor]:
        """Return the outer parameter of each that is trained."""
        if self._is_warming_up:
            self._restart()  # all replicas have the same
        return {k: v for unit in self._units for k, v in unit.outer_parameters().items()}

    def state_dict(self) -> dict[str, Tensor]:
        """Return step, outer parameters, momentum, and what is on the way between replicas."""
        self.wait()
        residuals = {} if self._feedback is None else self._feedback.state_dict()
        state = {_STEP: torch.tensor(self.step), _COUNT: torch.tensor(len(residuals))}
        state[_REPLICAS] = torch.tensor(self._collective.world_size)
        state |= {_RESIDUAL + name: tensor for name, tensor in residuals.items()}
        messages = self._collective.state_dict()
        state |= {_MESSAGES + name: tensor for name, tensor in messages.items()}
        for unit in self._units:
            state[f"sync.outer.{unit.name}"] = unit.outer
            state[f"sync.momentum.{unit.name}"] = unit.momentum
        for exchange in self._exchanges.values():
            for unit, mean in zip(exchange.units, exchange.means, strict=True):
                state[f"sync.delayed.{unit.name}"] = mean
            if exchange.buffers is not None:
                state[_BUFFERS] = exchange.buffers
        return state

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue from `state_dict()`, or from `merge_states`: then the parameters that the model
        has now, which all replicas agreed on, are the outer ones. Other states change nothing.

        Raises:
            UserError: it is of another model or another number of shards, or lacks residuals, or it
                holds some, but there is no error feedback.
        """
        if _STEP not in state:
            return
        replicas = self._collective.world_size
        if (saved := int(state.get(_REPLICAS, replicas))) != replicas:
            raise UserError(
                f"the state is of {saved} replicas, here are {replicas}: save the model of "
                "handle.exchanged_state_dict(), and load it and shardlab.merge_states of all ranks"
            )
        self._forget()
        self._changes.reset()
        self.step = int(state[_STEP])
        self._takes_parameters = self.step == 0 or _COUNT not in state
        if _COUNT not in state:
            self._restart()
            return
        residuals = below(_RESIDUAL, state)
        if len(residuals) != int(state[_COUNT]):
            raise UserError(
                f"the state holds {len(residuals)} of {int(state[_COUNT])} residuals of exchanges: "
                "take the names from the checkpoint's metadata (docs/how-to/your-own-model.md)"
            )
        if self._feedback is not None:
            self._feedback.load_state_dict(residuals)
        elif residuals:
            raise UserError("the state holds residuals of exchanges: attach with error_feedback")
        self._collective.load_state_dict(below(_MESSAGES, state))
        for unit in self._units:
            for kind, tensor in (("outer", unit.outer), ("momentum", unit.momentum)):
                tensor.copy_(_saved(state, f"sync.{kind}.{unit.name}", tensor))
        for index, units in enumerate(self._fragments):
            names = [f"sync.delayed.{unit.name}" for unit in units]
            if names[0] in state:
                pairs = zip(names, units, strict=True)
                means = [
                    _saved(state, name, unit.outer).to(unit.device, copy=True)
                    for name, unit in pairs
                ]
                buffers = state.get(_BUFFERS) if index == 0 else None
                self._exchanges[index] = _Exchange("", units, means, buffers)

    def detach(self) -> None:
        """Wait for what is on the way, and forget it; nothing is exchanged any more."""
        self._is_detached = True
        self._first.remove()
        self._changes.remove()
        self._forget()

    def _forget(self) -> None:
        """Wait for what is on the way, and drop it."""
        for exchange in self._exchanges.values():
            if exchange.running is not None:
                exchange.running.settle()
        self._exchanges.clear()

    def _is_due(self, index: int, delay: int = 0) -> bool:
        """Return whether an exchange of a fragment began so many steps ago."""
        every = self.settings.every
        # staggered: fragment p of P is due p/P of a round later
        steps = self.step - self.settings.warmup_steps - index * every // len(self._fragments)
        return steps > delay and (steps - delay) % every == 0

    @property
    def _is_warming_up(self) -> bool:
        """Return whether replicas have not trained alone yet, and so are equal."""
        return self.step < max(1, self.settings.warmup_steps)

    def _begin(self, *_: object) -> None:
        """Take the parameters as they are in each forward pass before the first step, and before
        that after a merged state: weights may have been loaded since the last one."""
        if not self._takes_parameters:
            return
        self._changes.check_trained()
        self._changes.check_present()
        self._restart()

    @torch.no_grad()
    def _restart(self) -> None:
        for unit in self._units:
            unit.restart()
        self._are_compared = False

    @torch.no_grad()
    def _start(self, index: int) -> None:
        """Begin the exchange of a fragment; with a delay, while training goes on."""
        units = self._fragments[index]
        self._changes.check_trained()
        buffers = self._flat_buffers() if index == 0 else None
        exchange = self._exchanges[index] = _Exchange(self._facts(), units, [], buffers)
        self._are_compared = True
        if self._background is not None:
            exchange.means = [unit.gradient() for unit in units]
            exchange.running = self._background.start(self._reduce, exchange)

    @torch.no_grad()
    def _finish(self, index: int, averages: bool = False) -> None:
        """Update a fragment by the mean outer gradients.

        Args:
            averages: without the outer optimizer.
        """
        exchange = self._exchanges.pop(index)
        if exchange.means:
            _wait(exchange)
            means = iter(exchange.means)
        else:
            means = self._means(exchange)
        for unit, mean in zip(exchange.units, means, strict=True):
            if averages:
                unit.average(mean)
            else:
                unit.update(mean, self.settings)
            unit.mix(self.settings.alpha)
        if exchange.buffers is not None:
            self._set_buffers(exchange.buffers)

    @torch.no_grad()
    def _reduce(self, exchange: _Exchange) -> None:
        exchange.means = [*self._means(exchange)]

    def _means(self, exchange: _Exchange) -> Iterator[Tensor]:
        """Yield the mean outer gradient of each unit, one after another for the sake of memory."""
        self._compare(exchange.facts)
        if exchange.buffers is not None and self._exact is not None:
            part = Unit("buffers", (Block("buffers", exchange.buffers.numel(), 1),))
            self._exact.all_reduce(exchange.buffers, 1 / self._exact.world_size, part)
        vectors = exchange.means or (unit.gradient() for unit in exchange.units)
        for unit, vector in zip(exchange.units, vectors, strict=True):
            self._collective.all_reduce(vector, 1 / self._collective.world_size, unit.message)
            if self._feedback is not None:
                self._feedback.step_ended()
            yield vector

    def _facts(self) -> str:
        """Return what must be equal on all replicas, the parameters at the first exchange."""
        if self._are_compared:
            return f"step {self.step}"
        return f"step {self.step}, first parameters {digest(unit.outer for unit in self._units)}"

    def _compare(self, facts: str) -> None:
        self._collective.compare(facts, self._units[0].device, fix=_FIX)

    def _float_buffers(self) -> list[Tensor]:
        return [b for b in self._model.buffers() if b.is_floating_point() and b.numel()]

    def _flat_buffers(self) -> Tensor | None:
        buffers = self._float_buffers() if self._exact is not None else []
        return torch.cat([b.float().flatten() for b in buffers]) if buffers else None

    def _set_buffers(self, flat: Tensor) -> None:
        buffers = self._float_buffers()
        for buffer, mean in zip(buffers, flat.split([b.numel() for b in buffers]), strict=True):
            buffer.copy_(mean.view_as(buffer))


def _wait(exchange: _Exchange) -> None:
    if exchange.running is not None:
        exchange.running.wait()


def below(prefix: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the entries whose names begin so, by the rest of their names."""
    return {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}


def _saved(state: dict[str, Tensor], name: str, like: Tensor) -> Tensor:
    tensor = state.get(name)
    if tensor is None or tensor.shape != like.shape:
        raise UserError(
            f"the state holds no {name} of {like.numel()} elements: it is of another model, or of "
            "another number of shards"
        )
    return tensor
