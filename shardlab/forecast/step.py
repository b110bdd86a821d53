"""Tasks of one step of a strategy: what its engine computes and communicates, and when.

Sources: `shardlab.engines` and, for what torch decides, torch 2.13
(distributed/fsdp/_fully_shard/_fsdp_state.py and _fsdp_param_group.py; fsdp/_runtime_utils.py;
nn/parallel/distributed.py). The step of a unit costs its share of the parameters: a layer of a
transformer computes 2 operations per parameter and token in forward and 4 in backward (Kaplan et
al. 2020, section 2.1). What belongs to no unit, the root, holds the head: it computes last in
forward and first in backward.
"""

from collections.abc import Sequence

from shardlab.config.strategy import CanonicalStrategy
from shardlab.forecast.coding import NORM
from shardlab.forecast.costs import Costs
from shardlab.forecast.schedule import Task, simulate
from shardlab.forecast.sliding import Slide
from shardlab.forecast.work import COMPUTE, Step, Work

_GATHER, _REDUCE = "gather", "reduce"
_REDUCTIONS = 2
"""reductions that may run at a time where they share a pool of vectors
(`shardlab.engines.manual_schedule`)"""
_STEPS = 3
"""number of steps after which those of `slide` repeat"""


def obstacle(strategy: CanonicalStrategy) -> str | None:
    """Return the setting of a canonical strategy that the model does not cover, or None."""
    given = strategy.gradients
    one_block = strategy.wrap == "block" and strategy.wrap_size is None
    if strategy.offload:
        return "offload"
    if strategy.activations != "device":
        return f"activations {strategy.activations}"
    if strategy.compile:
        return "compile"
    if any(each.module is not None for each in strategy.overrides):
        return "overrides of embedding or head"
    if any(each.param_dtype is not None for each in strategy.overrides):
        return "overrides of param_dtype"
    if strategy.overrides and not one_block:
        return "overrides of layers that are not units"
    if strategy.replicas and strategy.reduce_every_micro_batch:
        return "replicas with reduce_every_micro_batch"
    copies = strategy.replicas or strategy.sharding == "no_shard"
    if given.codec.needs_matrices and (copies or given.between_nodes is not None):
        return f"codec {given.codec.name} between copies of the model"
    return None


def step_tasks(work: Work, costs: Costs) -> list[Task]:
    """Return the tasks of one step in the order in which the ranks start them."""
    return _step(work, costs).tasks()


def step_seconds(work: Work, costs: Costs) -> float:
    """Return the seconds of one step in steady state, since steps of `slide` overlap."""
    step = _step(work, costs)
    streamed = work.strategy.traits.residency == "streamed"
    spans = simulate(step.tasks(_STEPS if streamed else 1), costs.rank)
    before, end = [0.0, *(spans[name].end for name in step.ends)][-2:]
    return end - before


def _step(work: Work, costs: Costs) -> Step:
    assert obstacle(work.strategy) is None, "callers check obstacle() first"
    return _STEP_OF[work.strategy.traits.residency](work, costs)


class _Ddp(Step):
    """Add the buckets of DDP, reduced concurrently with backward; a codec runs on the training
    thread."""

    def add_step(self) -> None:
        work, micro = self.work, self.work.accumulation
        native = work.gradients.inside.native
        reduced = []
        for number in range(micro):
            self.compute("forward", self._forward)
            for bucket, elements in enumerate(work.units):
                self.compute(f"backward {bucket}", self.backward_s(bucket))
                if number < micro - 1:
                    continue
                phases = self.costs.sum_whole(elements, work.reduced(bucket))
                lane = _REDUCE if native else COMPUTE
                reduced.append(self.launch(f"reduce {bucket}", lane, phases))
        self.compute("update", work.compute.rest, [name for name in reduced if name])


class _Sharded(Step):
    """Add fsdp1, fsdp2 or manual: units are gathered for use, their gradients reduce-scattered
    among the ranks of a copy of the model, then averaged over the copies."""

    def __init__(self, work: Work, costs: Costs) -> None:
        super().__init__(work, costs)
        strategy, traits = work.strategy, work.strategy.traits
        self._ahead, backward = strategy.depths()
        self._ahead_backward = max(backward, traits.implicit_prefetch_backward)
        copies = strategy.copies(costs.world_size)
        self._shards = costs.among(max(costs.world_size // copies, 1))
        self._replicas = costs.among(copies, apart=self._shards.world_size)
        # without shards such an engine has nothing to gather, and does not ask for it
        self._in_place = traits.no_shard_in_place and strategy.sharding == "no_shard"
        # torch's streams are no-ops on a CPU: every call is synchronous
        self._asynchronous = traits.overlap == "threads"
        self._at_once = False
        if traits.overlap == "async_unshard":
            asked = any(strategy.depths())
            self._asynchronous = asked if strategy.async_unshard is None else strategy.async_unshard
            # FSDP2 averages over copies, or converts, on the training thread
            self._at_once = copies > 1 or strategy.reduce_dtype != "fp32"
        self._last_stays = traits.last_unit_stays
        self._pooled = traits.gradient_buffers == "pool"
        self._last = len(work.units) - 1
        self._reducing: list[str] = []
        self._reshard = dict.fromkeys(range(1, len(work.units)), strategy.reshard_after_forward)
        for each in strategy.overrides:
            if each.reshard_after_forward is not None:
                for layer in each.layers or ():
                    self._reshard[layer + 1] = each.reshard_after_forward

    def add_step(self) -> None:
        for left in reversed(range(self.work.accumulation)):
            self._pass_forward()
            self._pass_backward(left == 0 or self.work.strategy.reduce_every_micro_batch)
        self._update()

    def _pass_forward(self) -> None:
        units = range(1, self._last + 1)
        self._start(0, self._shards)
        self._start_all(units[: self._ahead], forward=True)
        self.use("forward", 0, 0.0)
        for unit in units:
            self._start(unit, self._shards)
            self._start_all(units[unit : unit + self._ahead], forward=True)
            self.use("forward", unit, self._forward * self._share[unit])
            # gathered parameters that backward starts with stay
            if self._reshard[unit] and not (self._last_stays and unit == self._last):
                self.gathered.discard(unit)
        self.use("forward", 0, self._forward * self._share[0])

    def _pass_backward(self, reduced: bool) -> None:
        self.use("backward", 0, self.backward_s(0))
        for unit in range(self._last, 0, -1):
            self._start(unit, self._holders(unit))
            ahead = range(unit - 1, max(unit - 1 - self._ahead_backward, 0), -1)
            self._start_all(ahead, forward=False)
            self.use("backward", unit, self.backward_s(unit))
            self.gathered.discard(unit)
            if reduced:
                self._reduce(unit)
        self.gathered.discard(0)
        if reduced:
            self._reduce(0)

    def _holders(self, unit: int) -> Costs:
        """Return the costs among the ranks that hold a unit between forward and backward."""
        kept = self._reshard[unit]
        return self._shards.among(kept) if type(kept) is int else self._shards

    def _start_all(self, units: Sequence[int], forward: bool) -> None:
        if self._asynchronous:
            for unit in units:
                self._start(unit, self._shards if forward else self._holders(unit))

    def _start(self, unit: int, holders: Costs) -> None:
        if unit in self.gathered or self._in_place:
            return
        self.gathered.add(unit)
        phases = holders.gather(self.work.units[unit], self.work.weights)
        lane = _GATHER if self._asynchronous else COMPUTE
        name = self.launch(f"gather {unit}", lane, phases)
        if name:
            self.arriving[unit] = name

    def _reduce(self, unit: int) -> None:
        elements, levels = self.work.units[unit], self.work.reduced(unit)
        phases = self._shards.sum_scatter(elements, levels)
        average = levels.replicas
        if self._pooled:  # shards of gradients are float32
            average = average._replace(element_bytes=4)
        phases += self._replicas.all_reduce(elements / self._shards.world_size, average)
        beside = self._asynchronous and not self._at_once
        if self._pooled and len(self._reducing) >= _REDUCTIONS:
            self.compute("settle", 0.0, [self._reducing[-_REDUCTIONS]])
        name = self.launch(f"reduce {unit}", _REDUCE if beside else COMPUTE, phases)
        if name:
            self._reducing.append(name)

    def _update(self) -> None:
        self.compute("drain", 0.0, self._reducing)
        self.launch("norm", COMPUTE, self.costs.all_reduce(1, NORM))
        # the optimizer updates one shard of the parameters
        self.compute("update", self.work.compute.rest / self._shards.world_size)


_STEP_OF: dict[str, type[Step]] = {"replicated": _Ddp, "sharded": _Sharded, "streamed": Slide}
"""by where the states of the engine are"""
