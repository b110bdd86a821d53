"""Rare synchronisation: replicas train alone, with equal parameters every H steps.

Gradients are reduced inside a replica alone. Every H steps each unit u of the parameters
is synchronised between the R replicas:

    delta_r = outer - theta_r                              (the outer gradient of replica r)
    delta   = 1/R * sum over r of D(C(delta_r + e_r))      (by any codec, with error feedback)
    outer   <- outer - rate * d,  d = delta with momentum, as in torch.optim.SGD
    theta_r <- alpha * theta_r + (1 - alpha) * outer

Local SGD (Stich 2019) is rate 1 without momentum, DiLoCo (Douillard et al. 2023) AdamW inside and
Nesterov's momentum outside. Fragments that are synchronised at different steps, a delay of the
result and alpha are those of Streaming DiLoCo (Douillard et al. 2025).

Laws:
- `outer` is the same on all replicas, bit for bit; so are the parameters right after that
  with one fragment, no delay and alpha 0;
- between two synchronisations nothing is sent between replicas; all bytes are in the ledger;
- with `every` 1, rate 1, no momentum, no codec and SGD inside, training is data parallel, up to
  rounding; with one replica and rate 1 it is training alone, up to rounding.
"""

from collections import Counter
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from shardlab.comm.exchanges import Exchanges, is_underway, is_whole
from shardlab.comm.object_collectives import gather_values, naming_lost_rank
from shardlab.comm.outer_parameters import OUTER, REPLICAS
from shardlab.core.errors import UserError, warn_script
from shardlab.models.names import parameter_names, plain
from shardlab.strategy.sync import Sync

BETWEEN_EXCHANGES = "sync."
"""begins the names of what only the same ranks can continue with"""
_STEP, _EQUAL_AT, _WEIGHTS = f"{OUTER}step", "sync.equal_at", "sync.weights"
_SCHEDULE, _SETTINGS = "sync.schedule", ("fragments", "every", "delay", "warmup_steps")
"""entry of a state, and the settings in it, which say when a fragment is synchronised"""


class RareSync:
    """Replicas of one model that train alone, and when they are synchronised.

    Args:
        model: of `exchanges`.
        settings: how often.
    """

    def __init__(self, model: nn.Module, settings: Sync, exchanges: Exchanges) -> None:
        self.settings = settings
        self.step = 0
        """optimizer steps so far"""
        self.is_counted = False
        """whether optimizers say when a step has ended"""
        self._model, self._exchanges = model, exchanges
        self._replicas = exchanges.collective.world_size
        self._has_begun, self._first_step = False, 0
        """whether the outer parameters are those before the first update, and the step of that"""
        self._equal_at = [0] * settings.fragments
        """last step after which replicas had the same parameters of a fragment"""
        self._is_detached = False
        self._saved_weights: Tensor | None = None
        """digest of the weights that the first update after a loaded state must find"""
        self._updates = Counter[int]()
        """updates since the last step, by the `id` of their optimizer"""

    def trained(self) -> Iterator[nn.Parameter]:
        """Yield the synchronised parameters."""
        for unit in self._exchanges.units:
            yield from unit.parameters.values()

    def update_begins(self, optimizer: Optimizer) -> None:
        """Take the parameters before the first update by any optimizer for the outer ones.

        Until then weights may be loaded.

        Raises:
            UserError: they are not those of the loaded state.
        """
        self._check_weights(is_unmoved=True)
        if not self._has_begun:
            if self.step == 0 and (steps := _steps_of(optimizer)) and dist.get_rank() == 0:
                warn_script(
                    f"sync: the optimizer has made {steps} steps, and the handle begins at step 0: "
                    "where a run with sync is resumed, load its handle.state_dict() of each "
                    "rank by handle.load_state_dict"
                )
            self._exchanges.restart()
            self._has_begun = True
        self._updates[id(optimizer)] += 1
        first_due = self.settings.every + 1
        if self._updates[id(optimizer)] == first_due and dist.get_rank() == 0:
            warn_script(
                f"sync: an optimizer has made {first_due} updates, and no step was counted: unless "
                "one iteration has so many, call handle.step() at the end of each, or give attach "
                "all that step as optimizer=..."
            )

    def end_step(self) -> None:
        """Count a step, and synchronise what is due after it.

        Raises:
            PayloadError: on all replicas: they differ in their steps, or in the parameters they
                began with.
            UserError: parameters are trained that are not synchronised, or as `update_begins`.
            RuntimeError: a rank has ended or does not answer; names it.
        """
        if self._is_detached:
            return
        # a replica that left its first update out is awaited by those that made theirs
        self._check_weights(is_unmoved=False)
        self._updates.clear()
        self.step += 1
        if self.step == self.settings.warmup_steps:
            self._exchanges.restart()
            self._has_begun = True
        with naming_lost_rank(self.step):
            for index in range(self.settings.fragments):
                if self._is_due(index):
                    # without an optimizer of torch, with the parameters at attach
                    self._has_begun = True
                    self._exchanges.start(index, self.step)
                # what was on the way may have been applied early
                if index in self._exchanges.underway and self._is_due(index, self.settings.delay):
                    self._exchanges.apply(index)
                    if self.settings.alpha == 0:
                        self._equal_at[index] = self.step

    def synchronize(self) -> None:
        """Average the replicas, on all ranks; the parameters are then the outer ones.

        Without momentum, which would multiply what a few steps have moved.

        Raises:
            as `end_step` and `update_begins`.
        """
        if self.step < self.settings.warmup_steps:
            return
        self._check_weights(is_unmoved=True)
        if self._is_untrained:
            self._exchanges.restart()
        with naming_lost_rank(self.step):
            for index in [*self._exchanges.underway]:
                self._exchanges.apply(index)
            # a replica that has nothing to send would leave the others waiting
            self._exchanges.compare(self.step)
            for index in range(self.settings.fragments):
                if not self._is_due(index):  # else it was synchronised after this very step
                    self._exchanges.start(index, self.step)
                    self._exchanges.apply(index, averages=True)
        self._exchanges.set_parameters()
        self._equal_at = [self.step] * self.settings.fragments

    def trains_alone(self) -> bool:
        """Return whether gradients are no longer reduced between replicas: the warm-up is over."""
        return self.step >= self.settings.warmup_steps

    def wait(self) -> None:
        """Wait until all that is on the way has arrived; the parameters stay as they are."""
        self._exchanges.wait()

    def apart(self) -> str:
        """Return a phrase on replicas that have trained alone; none where they are equal."""
        steps = self._steps_apart()
        if not steps or self._is_detached:
            return ""
        some = f"{steps} step{'s' * (steps > 1)}"
        return f"replicas have trained {some} since they were last equal: handle.synchronize()"

    def metrics(self) -> dict[str, float]:
        """Return counts of steps and rounds as numbers by name, and what the last round showed."""
        return {
            "sync/step": self.step,
            "sync/round": self.settings.exchanges(self.step),
            "sync/steps_apart": self._steps_apart(),
            **self._exchanges.metrics(),
        }

    def exchanged_state_dict(self) -> dict[str, Tensor]:
        """Return the outer parameters by name, those that are not trained, and copies of the
        buffers of this rank."""
        state = {plain(name): tensor for name, tensor in self._model.state_dict().items()}
        for name, buffer in self._model.named_buffers(remove_duplicate=False):
            if plain(name) in state:
                state[plain(name)] = buffer.clone()
        aliases = parameter_names(self._model)
        for parameter, tensor in self.exchanged_parameters().items():
            state |= dict.fromkeys(aliases[id(parameter)], tensor)
        return state

    def exchanged_parameters(self) -> dict[nn.Parameter, Tensor]:
        """Return the outer parameter of each that is trained."""
        if self._is_untrained or self.step < self.settings.warmup_steps:
            self._exchanges.restart()  # all replicas have the same
        return {k: v for unit in self._exchanges.units for k, v in unit.outer_parameters().items()}

    def state_dict(self) -> dict[str, Tensor]:
        """Return step, outer parameters, momentum, what is on the way between replicas, and what
        all that belongs to: digests of names and shapes, and of this replica's weights."""
        if self._is_untrained:
            self._exchanges.restart()
        saved = self._saved_weights
        return {
            **self._exchanges.state_dict(),
            _STEP: torch.tensor(self.step),
            REPLICAS: torch.tensor(self._replicas),
            _EQUAL_AT: torch.tensor(self._equal_at),
            _SCHEDULE: torch.tensor([getattr(self.settings, name) for name in _SETTINGS]),
            # of a state that was loaded, whose weights may be still to come
            _WEIGHTS: self._exchanges.digest() if saved is None else saved,
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue from `state_dict()` with the weights that this replica had then, which may be
        loaded later, or from `merge_states`, with the weights that all replicas have before the
        next update. Other states change nothing.

        Raises:
            UserError: it is of other parameters, another number of shards, or settings by which
                something in it would not go on, or lacks residuals, or it holds some, but there is
                no error feedback.
        """
        if _STEP not in state:
            return
        if (saved := int(state.get(REPLICAS, self._replicas))) != self._replicas:
            raise UserError(
                f"the state is of {saved} replicas, here are {self._replicas}: save the model of "
                "handle.exchanged_state_dict(), and load it and shardlab.merge_states of all ranks"
            )
        if is_whole(state):
            self._exchanges.check_state(state)
            self._check_schedule(state)
            self._exchanges.load_state_dict(state)
        else:
            self._exchanges.forget()
            self._exchanges.restart()
            self._load_momentum(state)
        self.step = self._first_step = int(state[_STEP])
        self._has_begun, self._equal_at = False, [self.step] * self.settings.fragments
        self._saved_weights = None
        if is_whole(state) and self.step > 0:
            self._has_begun, self._equal_at = True, state[_EQUAL_AT].tolist()
            # the end of the warm-up takes the weights as they are then
            if self.step >= self.settings.warmup_steps:
                self._saved_weights = state[_WEIGHTS].cpu()

    def detach(self) -> None:
        """Wait for what is on the way, and forget it; nothing is sent any more."""
        if (apart := self.apart()) and dist.get_rank() == 0:
            warn_script(f"sync: {apart} before detach() averages them")
        self._is_detached = True
        self._exchanges.forget()

    def _load_momentum(self, state: dict[str, Tensor]) -> None:
        """Take the merged momentum of units that are as they were; begin that of others at 0."""
        units = self._exchanges.units
        lost = [unit.name for unit in units if not unit.is_of(state)]
        for unit in units:
            unit.load_momentum(state)
        if lost and self.settings.outer_momentum() and dist.get_rank() == 0:
            warn_script(
                f"sync: the merged state is of other parameters or shards in {', '.join(lost)}, "
                "whose outer momentum begins at 0"
            )

    def _check_schedule(self, state: dict[str, Tensor]) -> None:
        """Raise `UserError` for settings by which something in a state would not go on."""
        step, settings = int(state[_STEP]), self.settings
        saved = dict(zip(_SETTINGS, state[_SCHEDULE].tolist(), strict=True))
        must_agree = {"fragments"}
        if is_underway(state):
            must_agree |= {*_SETTINGS}
        # replicas are equal in the warm-up alone, and the outer parameters are theirs after it
        if step < max(saved["warmup_steps"], settings.warmup_steps):
            must_agree.add("warmup_steps")
        for name, value in saved.items():
            if name in must_agree and value != (present := getattr(settings, name)):
                raise UserError(
                    f"the state of step {step} is of {name} {value}, not {present}, and cannot go "
                    f"on so: attach with sync={{{name!r}: {value}, ...}}"
                )

    def _check_weights(self, is_unmoved: bool) -> None:
        """Refuse, on all replicas at once, other weights than a loaded state was saved with.

        Args:
            is_unmoved: whether no optimizer has updated them since. Where no replica knows that,
                another optimizer than torch's may have, and nothing is refused.
        """
        if (saved := self._saved_weights) is None:
            return
        differ = not torch.equal(self._exchanges.digest(), saved)
        replicas = gather_values((is_unmoved, differ), self._exchanges.collective.group)
        some_unmoved, some_differ = map(any, zip(*replicas, strict=True))
        if some_unmoved and some_differ:
            raise UserError(
                f"sync: the weights are not those of step {self.step}, with which the handle's "
                "state was saved: load each rank's into the wrapped model "
                "(DistributedDataParallel sends those of rank 0 to all); for "
                "handle.exchanged_state_dict() as the model, load shardlab.merge_states of all "
                "ranks"
            )
        self._saved_weights = None

    def _steps_apart(self) -> int:
        """Return the steps since all replicas had the same parameters."""
        if self._replicas == 1:
            return 0
        return self.step - max(min(self._equal_at), min(self.step, self.settings.warmup_steps))

    @property
    def _is_untrained(self) -> bool:
        """Return whether no step has begun, so that the outer parameters are the model's."""
        return not self._has_begun and self.step == self._first_step

    def _is_due(self, index: int, delay: int = 0) -> bool:
        """Return whether synchronisation of a fragment began so many steps ago."""
        every = self.settings.every
        # staggered: fragment p of P is due p/P of a round later
        steps = self.step - self.settings.warmup_steps - index * every // self.settings.fragments
        return steps > delay and (steps - delay) % every == 0


def _steps_of(optimizer: Optimizer) -> int:
    """Return the steps that the state of an optimizer says it has made."""
    counts = (state.get("step", 0) for state in optimizer.state.values() if isinstance(state, dict))
    return int(next(counts, 0))
