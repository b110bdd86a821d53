"""Predicted seconds of one step: what an engine computes and communicates, on a timeline.

All ranks do the same in the same order, so one stands for all. A lane is a thread or a stream,
which does one thing after another; each engine below is walked through once, and every lane's clock
advances. Two approximations keep this to a walk: transfers pass the link one after another, in the
order in which they are launched, and lanes that compute at once share the cores of the rank only
over the step as a whole, which takes at least as long as its CPU time.

Sources: `shardlab.engines` and, for what torch decides, torch 2.13
(distributed/fsdp/_fully_shard/_fsdp_state.py and _fsdp_param_group.py; fsdp/_runtime_utils.py;
nn/parallel/distributed.py). A unit's computation is its share of the parameters: a layer of a
transformer computes 2 operations per parameter and token in forward and 4 in backward (Kaplan et
al. 2020, section 2.1). What belongs to no unit, the root, holds the head: it computes last in
forward and first in backward.
"""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from shardlab.config.strategy import CanonicalStrategy
from shardlab.forecast.coding import NORM, Coding, Levels
from shardlab.forecast.costs import Costs, Phase, Phases, Rank

COMPUTE, GATHER, REDUCE = "compute", "gather", "reduce"
"""lanes; `compute` is the training thread"""
_REDUCTIONS = 2
"""reductions in flight where they share a pool of vectors (`shardlab.engines`)"""


class Compute(NamedTuple):
    """Compute seconds of a rank that trains the whole model without communication."""

    forward: float
    """of all micro-batches, as `backward`"""
    backward: float
    rest: float
    """optimizer, clipping, batches"""

    def scaled(self, factor: float) -> "Compute":
        """Return the times on a CPU that is slower by a factor."""
        return Compute(*(factor * seconds for seconds in self))


class Work(NamedTuple):
    """Everything that a step has to compute, communicate and update."""

    strategy: CanonicalStrategy
    units: tuple[int, ...]
    """elements: for ddp its buckets in the order of backward, else the root and the units"""
    accumulation: int
    """micro-batches"""
    compute: Compute
    launch_s: float
    """CPU seconds of the engine on the training thread for each collective or copy"""
    wait_s: float
    """before each collective, until the threads of all ranks have a core; where each has its own"""
    gradients: Sequence[Levels]
    """by unit"""
    weights: Coding
    update_s: float = 0.0
    """seconds of `compute.rest` in which AdamW updates the whole model"""
    selective: float = 0.0
    """share of forward that blocks with selective checkpointing compute again"""


class Timeline:
    """Clocks of the lanes of a rank, and of its link."""

    def __init__(self, rank: Rank) -> None:
        self.cpu_s = 0.0
        """CPU time of all lanes so far"""
        self._rank, self._speed = rank, min(1.0, rank.cores)
        self._lanes: dict[str, float] = defaultdict(float)
        self._link_free, self._tokens = 0.0, rank.bucket_bytes

    def run(self, lane: str, phases: Phases, after: float = 0.0) -> float:
        """Run phases one after another, not before a time; return when they end."""
        now = max(self._lanes[lane], after)
        for phase in phases:
            self.cpu_s += phase.cpu
            computed = now + phase.cpu / self._speed
            sent = self._send(now, phase.nbytes) if phase.nbytes else now
            now = max(computed, sent) + phase.wait
        self._lanes[lane] = now
        return now

    def _send(self, now: float, nbytes: float) -> float:
        """Return when bytes have passed the link, whose token bucket refills while it is idle."""
        rate = self._rank.bytes_per_second
        start = max(now, self._link_free)
        if self._rank.bucket_bytes:
            refilled = self._tokens + (start - self._link_free) * rate
            self._tokens = min(refilled, self._rank.bucket_bytes)
        at_once = min(self._tokens, nbytes)
        self._tokens -= at_once
        self._link_free = start + (nbytes - at_once) / rate
        return self._link_free


class Step(ABC):
    """The step of an engine: subclasses walk through it."""

    repeated = 1
    """steps after which they take equally long"""

    def __init__(self, work: Work, costs: Costs) -> None:
        self.work, self.costs = work, costs
        self.timeline = Timeline(costs.rank)
        self.gathered: set[int] = set()
        """units whose parameters are on the device, or on their way to it"""
        self.arrival: dict[int, float] = {}
        """when the parameters of a unit arrive, until their first use"""
        total = sum(work.units)
        self.share = [elements / total for elements in work.units]
        self.forward_s = work.compute.forward / work.accumulation
        overrides = work.strategy.overrides
        self._checkpointing = {
            layer: override.activation_checkpointing
            for override in overrides
            for layer in override.layers or ()
        }

    def seconds(self) -> float:
        """Return the seconds of a step in steady state."""
        end = cpu_s = 0.0
        for _ in range(self.repeated):
            started, computed = end, cpu_s
            self.walk()
            end, cpu_s = self.compute(0.0), self.timeline.cpu_s
        return max(end - started, (cpu_s - computed) / self.costs.rank.cores)

    @abstractmethod
    def walk(self) -> None:
        """Walk through one step."""

    def backward_s(self, unit: int) -> float:
        """Return the seconds of backward of a unit in a micro-batch, with what it computes again.

        The root of several units has no block in it, and only blocks are checkpointed.
        """
        work, strategy = self.work, self.work.strategy
        replicated = strategy.traits.residency == "replicated"
        has_blocks = unit > 0 or len(work.units) == 1 or replicated
        mode = self._checkpointing.get(unit - 1) or strategy.activation_checkpointing
        again = {"full": 1.0, "selective": work.selective}.get(mode, 0.0) * has_blocks
        seconds = work.compute.backward + again * work.compute.forward
        return seconds / work.accumulation * self.share[unit]

    def compute(self, seconds: float, after: float = 0.0) -> float:
        """Compute on the training thread, not before a time; return when it ends."""
        return self.timeline.run(COMPUTE, (Phase(seconds),), after)

    def use(self, unit: int, seconds: float) -> None:
        """Compute with the parameters of a unit once they have arrived."""
        self.compute(seconds, self.arrival.pop(unit, 0.0))

    def launch(self, lane: str, phases: Phases, after: float = 0.0) -> float:
        """Launch phases in a lane when all computation so far is done; return when they end.

        The engine's own work for it is computation, also where a rank has no peers.
        """
        now = self.compute(self.work.launch_s)
        return self.timeline.run(lane, self.awaited(phases), max(now, after)) if phases else now

    def awaited(self, phases: Phases) -> Phases:
        """Return the phases with the wait for other ranks before each collective."""
        wait = Phase(wait=self.work.wait_s * self.costs.ranks_per_core)
        return tuple(
            p for phase in phases for p in ((wait, phase) if phase.collective else (phase,))
        )


class Replicated(Step):
    """Buckets of DDP, reduced concurrently with backward; a codec runs on the training thread."""

    def walk(self) -> None:  # noqa: D102
        work = self.work
        lane = REDUCE if work.gradients[0].inside.native else COMPUTE
        reduced = 0.0
        for left in reversed(range(work.accumulation)):
            self.compute(self.forward_s)
            for bucket, elements in enumerate(work.units):
                self.compute(self.backward_s(bucket))
                if left == 0:
                    phases = self.costs.sum_whole(elements, work.gradients[bucket])
                    reduced = self.launch(lane, phases)
        self.compute(work.compute.rest, reduced)


class Sharded(Step):
    """Units of fsdp1, fsdp2 or manual: gathered for use; their gradients are reduce-scattered among
    the ranks of a copy of the model, then averaged over the copies."""

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
        self._reduces_at_once = False
        if traits.overlap == "async_unshard":
            asked = any(strategy.depths())
            self._asynchronous = asked if strategy.async_unshard is None else strategy.async_unshard
            # FSDP2 averages over copies, or converts, on the training thread
            self._reduces_at_once = copies > 1 or strategy.reduce_dtype != "fp32"
        self._last = len(work.units) - 1
        self._reductions: list[float] = []
        self._reshard = dict.fromkeys(range(1, len(work.units)), strategy.reshard_after_forward)
        for override in strategy.overrides:
            if override.reshard_after_forward is not None:
                for layer in override.layers or ():
                    self._reshard[layer + 1] = override.reshard_after_forward

    def walk(self) -> None:  # noqa: D102
        for left in reversed(range(self.work.accumulation)):
            self._forward()
            self._backward(reduces=left == 0)
        self.compute(0.0, max(self._reductions, default=0.0))
        self.launch(COMPUTE, self.costs.all_reduce(1, NORM))
        # the optimizer updates one shard of the parameters
        self.compute(self.work.compute.rest / self._shards.world_size)

    def _forward(self) -> None:
        units = range(1, self._last + 1)
        self._gather(0, self._shards)
        self._gather_ahead(units[: self._ahead], forward=True)
        self.use(0, 0.0)
        for unit in units:
            self._gather(unit, self._shards)
            self._gather_ahead(units[unit : unit + self._ahead], forward=True)
            self.use(unit, self.forward_s * self.share[unit])
            # gathered parameters that backward starts with stay
            stays = self.work.strategy.traits.last_unit_stays and unit == self._last
            if self._reshard[unit] and not stays:
                self.gathered.discard(unit)
        self.use(0, self.forward_s * self.share[0])

    def _backward(self, reduces: bool) -> None:
        self.use(0, self.backward_s(0))
        for unit in range(self._last, 0, -1):
            self._gather(unit, self._holders(unit))
            ahead = range(unit - 1, max(unit - 1 - self._ahead_backward, 0), -1)
            self._gather_ahead(ahead, forward=False)
            self.use(unit, self.backward_s(unit))
            self.gathered.discard(unit)
            if reduces:
                self._reduce(unit)
        self.gathered.discard(0)
        if reduces:
            self._reduce(0)

    def _holders(self, unit: int) -> Costs:
        """Return the costs among the ranks that hold a unit between forward and backward."""
        ranks = self._reshard[unit]
        return self._shards.among(ranks) if type(ranks) is int else self._shards

    def _gather_ahead(self, units: Sequence[int], forward: bool) -> None:
        if self._asynchronous:
            for unit in units:
                self._gather(unit, self._shards if forward else self._holders(unit))

    def _gather(self, unit: int, holders: Costs) -> None:
        if unit in self.gathered or self._in_place:
            return
        self.gathered.add(unit)
        phases = holders.gather(self.work.units[unit], self.work.weights)
        self.arrival[unit] = self.launch(GATHER if self._asynchronous else COMPUTE, phases)

    def _reduce(self, unit: int) -> None:
        elements, levels = self.work.units[unit], self.work.gradients[unit]
        pooled = self.work.strategy.traits.gradient_buffers == "pool"
        average = levels.replicas
        if pooled:  # shards of gradients are float32
            average = average._replace(element_bytes=4)
            if len(self._reductions) >= _REDUCTIONS:
                self.compute(0.0, self._reductions[-_REDUCTIONS])
        phases = self._shards.sum_scatter(elements, levels)
        phases += self._replicas.all_reduce(elements / self._shards.world_size, average)
        concurrent = self._asynchronous and not self._reduces_at_once
        self._reductions.append(self.launch(REDUCE if concurrent else COMPUTE, phases))
