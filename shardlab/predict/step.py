"""Predicted seconds of one step: what an engine computes and communicates, section by section.

All ranks do the same in the same order, so one stands for all. A lane is what a thread or a stream
does, one thing after another. A section has one or more lanes, which begin together: it ends with
its slowest lane, but not before the link has carried the bytes of all lanes and the cores of the
rank have computed all of them. A step is a few sections one after another: what overlaps is in
one section, what is waited for, such as the first all-gather and the last reduction, in another.

Sources: `shardlab.engines` and, for what torch decides, torch 2.13
(distributed/fsdp/_fully_shard/_fsdp_state.py and _fsdp_param_group.py; fsdp/_runtime_utils.py;
nn/parallel/distributed.py). A unit's computation is its share of the parameters: a layer of a
transformer computes 2 operations per parameter and token in forward and 4 in backward (Kaplan et
al. 2020, section 2.1). What belongs to no unit, the root, holds the head: it computes last in
forward and first in backward.
"""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

from shardlab.models.streamed_layout import gradient_bytes, gradient_vectors, window_slots
from shardlab.predict.coding import NORM, Coding, Levels
from shardlab.predict.costs import Costs, Phase, Phases, Rank
from shardlab.predict.machine import Line
from shardlab.strategy.document import CanonicalStrategy
from shardlab.strategy.settings import DTYPE_BYTES

StepSections = list[list[Phases]]
"""lanes of each section"""
_FLOAT = DTYPE_BYTES["fp32"]
OUTER_COPIES = 9
"""copies of a vector that take as long as what an exchange does to it: 72 bytes per element, where
a copy moves 8. The outer gradient moves 20 (parameters concatenated, subtracted), momentum, step
and outer parameters 44, the parameters that are written 8 (`shardlab.comm.outer_parameters`)"""


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


class StepWork(NamedTuple):
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
    gradients: Levels
    weights: Coding
    update_s: float = 0.0
    """seconds of `compute.rest` in which AdamW updates the whole model"""
    outer: Coding | None = None
    """of the outer gradients that copies of the model exchange in place of those of every step"""
    outer_update: Line = Line(0.0, 0.0)
    """seconds of the memory traffic of an exchange, over the elements of a unit"""
    selective: float = 1.0
    """fraction of forward that selective checkpointing computes again. 1 in small blocks on a CPU:
    to dispatch operations takes longer than the products that it keeps"""

    def forward(self) -> Phases:
        """Return forward of a micro-batch."""
        return (Phase(self.compute.forward / self.accumulation),)

    def backward(self, units: Iterable[int]) -> Phases:
        """Return backward of some units in a micro-batch, with what they compute again.

        Only blocks are checkpointed: the root of several units has none in it.
        """
        strategy, (forward, backward, _) = self.strategy, self.compute
        modes = own_settings(strategy, "activation_checkpointing")
        again = {"none": 0.0, "selective": self.selective * forward, "full": forward}
        replicated, seconds = strategy.traits.residency == "replicated", 0.0
        for unit in units:
            has_blocks = unit > 0 or len(self.units) == 1 or replicated
            mode = modes.get(unit) or strategy.activation_checkpointing
            repeated = again[mode] if has_blocks else 0.0
            seconds += (backward + repeated) * self.units[unit]
        return (Phase(seconds / self.accumulation / sum(self.units)),)


def own_settings(strategy: CanonicalStrategy, name: str) -> dict[int, Any]:
    """Return a setting of the units that have their own, by number: the root, 0, has none."""
    return {
        layer + 1: getattr(override, name)
        for override in strategy.overrides
        for layer in override.layers or ()
        if getattr(override, name) is not None
    }


def unsupported(strategy: CanonicalStrategy) -> str | None:
    """Return the setting of a canonical strategy that no prediction covers, or None."""
    gradients, overrides = strategy.gradients, strategy.overrides
    if strategy.offload:
        return "offload"
    if strategy.activations != "device":
        return f"activations {strategy.activations}"
    if strategy.moments == "disk":
        return "moments disk"
    if strategy.compile:
        return "compile"
    if any(override.module is not None for override in overrides):
        return "overrides of embedding or head"
    if any(override.param_dtype is not None for override in overrides):
        return "overrides of param_dtype"
    if overrides and not (strategy.wrap == "block" and strategy.wrap_size is None):
        return "overrides of layers that are not units"
    copies = strategy.replicas or strategy.sharding == "no_shard"
    if gradients.codec.needs_matrices and (copies or gradients.between_nodes is not None):
        return f"codec {gradients.codec.name} between copies of the model"
    return None


def step_seconds(work: StepWork, costs: Costs) -> float:
    """Return the seconds of one step in steady state; with rare exchanges the mean of a round."""
    sections = _SECTIONS[work.strategy.traits.residency](work, costs)
    wait = work.wait_s * costs.ranks_per_core
    seconds = sum(section_seconds(lanes, costs.rank, wait) for lanes in sections)
    if work.outer is None:
        return seconds
    phases = [phase for lanes in sections for phase in chain(*lanes)]
    step = Phase(sum(p.cpu for p in phases), sum(p.nbytes for p in phases))
    return seconds + _exchange_seconds(work, work.outer, costs, step, seconds)


def _exchange_seconds(
    work: StepWork, coding: Coding, costs: Costs, step: Phase, step_s: float
) -> float:
    """Return what the exchanges of all fragments add to a step, on average.

    A fragment's messages may take the steps of its delay, but not more than there are until the
    next fragment's begin, which the same thread sends. To find the outer gradient, to update and to
    write the parameters back is not overlapped.

    Args:
        step: everything that a step computes and sends between exchanges.
        step_s: its duration.
    """
    strategy, sync = work.strategy, work.strategy.sync
    assert sync is not None, "it has a coding"
    copies = strategy.replica_count(costs.world_size)
    shards = max(costs.world_size // copies, 1)
    replicas = costs.among(copies, apart=shards)
    # ranks compare their step first
    compared = replicas.transfer("exchange", 8 * copies) if copies > 1 else Phase()
    steps = min(sync.delay, sync.every // sync.fragments)
    meanwhile = Phase(steps * step.cpu, steps * step.nbytes)
    total, wait = 0.0, work.wait_s * costs.ranks_per_core
    for index in range(sync.fragments):
        own = [elements / shards for elements in work.units[index :: sync.fragments]]
        sent = [compared, *chain(*(replicas.all_reduce(n, coding) for n in own))]
        lanes = [tuple(sent), (meanwhile,)]
        total += max(section_seconds(lanes, costs.rank, wait) - steps * step_s, 0.0)
        total += sum(work.launch_s + work.outer_update.at(n) for n in own)
    return total / sync.every


def section_seconds(lanes: Sequence[Phases], rank: Rank, wait: float = 0.0) -> float:
    """Return the seconds of lanes that begin together, with a wait before each collective."""
    phases = [*chain(*lanes)]
    return max(
        *(_lane_seconds(lane, rank, wait) for lane in lanes),
        sum(phase.nbytes for phase in phases) / rank.bytes_per_second,
        sum(phase.cpu for phase in phases) / rank.cores,
    )


def _lane_seconds(lane: Phases, rank: Rank, wait: float) -> float:
    """Return the seconds of a lane; the token bucket of the link fills while it sends nothing."""
    seconds = tokens = 0.0
    for phase in lane:
        pause = wait if phase.collective else 0.0
        tokens = min(tokens + pause, rank.bucket_s)
        computed, sent = phase.cpu / min(1.0, rank.cores), phase.nbytes / rank.bytes_per_second
        at_once = min(tokens, sent)
        working = max(computed, sent - at_once)
        seconds += pause + working + phase.wait
        tokens += working + phase.wait - sent
    return seconds


def _replicated(work: StepWork, costs: Costs) -> StepSections:
    """Return the step of ddp: buckets are reduced concurrently with backward, except for the last
    one; a codec runs on the training thread. Copies that train alone reduce nothing."""
    if work.outer is not None:
        alone = work.backward(range(len(work.units)))
        return [[(*work.forward(), *alone) * work.accumulation], [(Phase(work.compute.rest),)]]
    launch, buckets = (Phase(work.launch_s),), range(len(work.units))
    *reduced, last = (costs.sum_whole(elements, work.gradients) for elements in work.units)
    before = (*work.forward(), *work.backward(buckets)) * (work.accumulation - 1)
    backward, concurrent = work.backward(buckets), tuple(chain(*reduced))
    computed = (*before, *work.forward(), *launch * len(buckets))
    end: list[Phases] = [(*last, Phase(work.compute.rest))]
    if work.gradients.inside.native or costs.streams:
        return [[computed], [backward, concurrent], end]
    return [[(*computed, *backward, *concurrent)], end]


def _sharded(work: StepWork, costs: Costs) -> StepSections:
    """Return the step of fsdp1, fsdp2 or manual: units are gathered for use; their gradients are
    reduce-scattered among the ranks of a copy of the model, then averaged over the copies."""
    strategy, traits, units = work.strategy, work.strategy.traits, range(1, len(work.units))
    copies, launch = strategy.replica_count(costs.world_size), Phase(work.launch_s)
    shards = costs.among(max(costs.world_size // copies, 1))
    replicas = costs.among(copies, apart=shards.world_size)
    # torch's streams are no-ops on a CPU: every call is synchronous
    gathers_overlap = reductions_overlap = costs.streams or traits.overlap == "threads"
    if traits.overlap == "async_unshard" and not costs.streams:
        asked = strategy.async_unshard
        gathers_overlap = any(strategy.depths()) if asked is None else asked
        # FSDP2 averages over copies, or converts, on the training thread
        at_once = (copies > 1 and work.outer is None) or strategy.reduce_dtype != "fp32"
        reductions_overlap = gathers_overlap and not at_once
    average = work.gradients.replicas
    if traits.gradient_buffers == "pool":  # shards of gradients are float32
        average = average._replace(element_bytes=4)
    in_place = traits.no_shard_in_place and strategy.sharding == "no_shard"

    def gather(unit: int, holders: Costs = shards) -> Phases:
        # without shards such an engine has nothing to gather, and does not ask for it
        return () if in_place else (launch, *holders.gather(work.units[unit], work.weights))

    def gather_again(unit: int) -> Phases:
        ranks = reshard[unit]
        if not ranks or (traits.last_unit_stays and unit == units[-1]):
            return ()
        # a number: of ranks that hold a unit between forward and backward
        return gather(unit, shards if ranks is True else shards.among(ranks))

    def reduce(unit: int) -> Phases:
        elements = work.units[unit]
        averaged: Phases = ()
        if work.outer is None:
            averaged = replicas.all_reduce(elements / shards.world_size, average)
        return (launch, *shards.sum_scatter(elements, work.gradients), *averaged)

    reshard = dict.fromkeys(units, strategy.reshard_after_forward)
    reshard |= own_settings(strategy, "reshard_after_forward")
    sections: StepSections = []
    for left in reversed(range(work.accumulation)):
        sections += _passes(
            work,
            [gather(unit) for unit in (0, *units)],
            [gather_again(unit) for unit in reversed(units)],
            [reduce(unit) for unit in (*reversed(units), 0)] if left == 0 else [],
            gathers_overlap,
            reductions_overlap,
        )
    # the optimizer updates one shard of the parameters
    rest = Phase(work.compute.rest / shards.world_size)
    of_norm = costs if work.outer is None else shards
    return [*sections, [(launch, *of_norm.all_reduce(1, NORM), rest)]]


def _passes(
    work: StepWork,
    arrivals: Sequence[Phases],
    again: Sequence[Phases],
    reductions: Sequence[Phases],
    arrivals_overlap: bool,
    reductions_overlap: bool,
    updates: Phases = (),
) -> StepSections:
    """Return forward and backward of a micro-batch.

    Args:
        arrivals: of the root and the units, in forward.
        again: of the units in backward, in its order.
        reductions: of units and root, in the order of backward.
        updates: that overlap with forward.
    """
    units = range(1, len(work.units))
    first, later = tuple(chain(*arrivals[:2])), tuple(chain(*arrivals[2:]))
    root, blocks = work.backward([0]), work.backward(units)
    first_again, later_again = tuple(chain(*again[:1])), tuple(chain(*again[1:]))
    # the gradients of the last unit and of the root are complete when backward is over
    reduced, end = tuple(chain(*reductions[:-2])), tuple(chain(*reductions[-2:]))
    forward: list[Phases] = [work.forward(), later, updates]
    backward: list[Phases] = [blocks, later_again, reduced]
    if not arrivals_overlap:
        forward, backward = [(*later, *work.forward())], [(*later_again, *blocks), reduced]
    if not reductions_overlap:
        backward = [(*backward[0], *reduced), *backward[1:-1]]
    return [[first], forward, [(*root, *first_again)], backward, [end]]


def _streamed(work: StepWork, costs: Costs) -> StepSections:
    """Return the step of slide, whose units slide through a window; gradients are summed in host
    memory.

    With P parameters, N units of G elements of which K stay in the window, W ranks of a node, b
    bytes of a parameter on the device and l of a gradient, a rank copies b (P + (N - K) G) in and
    l P out, a W-th of either where ranks gather or reduce on the device. An update moves 28 bytes
    per element in float32 (parameter and two moments read and written, gradient read). Gradients
    are clipped: updates wait for the norm and overlap with the next forward pass.
    """
    strategy, inside, across = work.strategy, costs.inside, costs.across
    ranks, coding, launch = inside.world_size, work.gradients.inside, Phase(work.launch_s)
    copied, units = work.weights.element_bytes, range(1, len(work.units))
    returned = gradient_bytes(strategy, copied, ranks)
    vectors = gradient_vectors(strategy, ranks)
    reduces = strategy.grad_sync == "gpu_reduce" and ranks > 1

    def moved(nbytes: float) -> Phase:
        return costs.move("update", nbytes)

    def arrive(unit: int) -> Phases:
        elements, gathered = work.units[unit], tuple[Phase, ...]()
        if strategy.param_transfer == "shard":
            gathered = inside.gather(elements, work.weights)
        parts = ranks if gathered else 1
        return (launch, costs.move("copy", elements * copied / parts), *gathered)

    def leave(unit: int, last: bool) -> Phases:
        elements, chunk = work.units[unit], work.units[unit] / ranks
        phases = [launch]
        if reduces:
            phases += inside.reduce_scatter(elements, coding)
        phases.append(costs.move("copy", (chunk if reduces else elements) * returned))
        if work.accumulation > 1:  # read, and added to float32
            phases.append(moved(elements / vectors * (returned + 2 * _FLOAT)))
        if last:
            if not (coding.native or reduces):  # messages, not sums in shared memory
                phases += inside.reduce_scatter(elements, coding)
            phases += across.all_reduce(round(chunk), coding._replace(element_bytes=_FLOAT))
            phases.append(moved(chunk * vectors * returned))  # the norm
        return tuple(phases)

    states = 2 * (_FLOAT + 2 * DTYPE_BYTES[strategy.moment_dtype])
    narrow = 0 if copied == _FLOAT else copied
    # of this rank's part, with the vectors of all ranks
    update = moved(sum(work.units) / ranks * (states + vectors * returned + narrow))
    window, sections = window_slots(strategy, len(units)), StepSections()
    for left in reversed(range(work.accumulation)):
        sections += _passes(
            work,
            [arrive(unit) for unit in (0, *units)],
            [arrive(unit) for unit in list(reversed(units))[window:]],
            [leave(unit, last=left == 0) for unit in (*reversed(units), 0)],
            arrivals_overlap=True,
            reductions_overlap=True,
            updates=(update,) if left == work.accumulation - 1 else (),
        )
    rest = Phase(max(work.compute.rest - work.update_s, 0.0))
    return [*sections, [(launch, *inside.all_reduce(1, NORM), rest)]]


_SECTIONS = {"replicated": _replicated, "sharded": _sharded, "streamed": _streamed}
"""by where the states of the engine are"""
