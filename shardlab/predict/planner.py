"""Predicted memory and step of strategies on devices that nobody has rented yet.

Memory is that of `shardlab.models.memory`, the step that of `shardlab.predict.step` with
collectives in closed form (`shardlab.predict.clusters`). Computation is FLOPs over a share of the
peak, codecs are memory traffic over a share of the bandwidth: both shares are ranges.
"""

import math
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple, Protocol

from shardlab.core.document import Document
from shardlab.models.memory import Sizes, device_memory, host_memory
from shardlab.predict.clusters import Cluster
from shardlab.predict.coding import codings, outer_coding
from shardlab.predict.costs import OnCluster
from shardlab.predict.devices import Device, Efficiency, between_rate
from shardlab.predict.machine import CodecKey, CodecLines, Line, Machine
from shardlab.predict.offers import NamedStrategy, candidates
from shardlab.predict.step import OUTER_COPIES, Compute, StepWork, step_seconds
from shardlab.results.calibration_record import UPDATE_BYTES
from shardlab.results.result import UnitSize
from shardlab.strategy.codec_options import CodecSpec
from shardlab.strategy.codec_table import codec_text
from shardlab.strategy.document import CanonicalStrategy, parse_strategy
from shardlab.strategy.settings import DTYPE_BYTES
from shardlab.strategy.validation import check_fits

CODEC_SHARES = (0.36, 0.8)
"""of the memory bandwidth, for fp8 with a scale per 128 elements: torch on an RTX 5090
(pytorch/ao pull request 3306), Triton on an H100 (issue 4054). Nobody timed our codecs on a GPU"""
USABLE = 0.9
"""share of a device's memory for what is counted; the rest is for the CUDA context, buffers of NCCL
and fragmentation"""
RARE_HOST = 1.5
"""host memory of a node over that of its devices, more than which few nodes have: our assumption"""
UTILISATIONS = (0.5, 0.75, 0.9)
_LOG_RATES, _LOG_ACCURACY = (6.0, 14.0), 0.004
"""bounds of the searched link rates, and their accuracy: logarithms of bits per second"""
CODE_BYTES = {"int8": 1.0, "int4": 0.5, "fp8": 1.0, "bf16": 2.0, "fp16": 2.0}
"""bytes of an element, besides 2 for the scale of a group, by codecs that read a vector once"""
_STATES = ("parameters", "gradients", "moments", "outer", "exchanged", "residuals")
_ACTIVATIONS = ("activations", "logits")


class Shapes(Protocol):
    """Reader of a model, on which memory and steps depend."""

    def sizes(self, strategy: CanonicalStrategy) -> Sizes:
        """Return the sizes that memory depends on."""

    def units(self, strategy: CanonicalStrategy) -> list[UnitSize]:
        """Return what the strategy gathers or reduces together."""


class PlannedJob(NamedTuple):
    """Job to plan: a model, the work of each device, and equal nodes of devices."""

    shapes: Shapes
    parameters: int
    flops: float
    """of a step of a device, without recomputation"""
    batch: int
    """sequences per device and step"""
    dtype: str
    device: Device
    efficiency: Efficiency
    cluster: Cluster
    nodes: int
    on_gpu: bool = True
    checkpointing: str | None = None
    """None: what is fastest of all that fits"""
    host_bytes: float = math.inf
    """of a node; infinite: unknown"""
    rare_host_bytes: float = math.inf
    """more of a node's than this few have"""
    asked: tuple[NamedStrategy, ...] = ()
    """strategies of the user, on all devices"""

    @property
    def world_size(self) -> int:
        """Number of devices."""
        return self.nodes * self.cluster.ranks_per_node

    def alone(self, per_node: int) -> "PlannedJob":
        """Return the same on so many devices of one node."""
        # the node has its memory to itself, however few of its devices compute
        host = self.cluster.memory * self.cluster.ranks_per_node / per_node
        return self._replace(
            nodes=1, asked=(), cluster=self.cluster._replace(ranks_per_node=per_node, memory=host)
        )


class Range(Document):
    """A prediction with its ends: the slowest and the fastest of the assumed shares."""

    middle: float
    low: float
    high: float


class Outcome(Document):
    """Memory and step of a strategy, in bytes and seconds."""

    name: str
    lossy: bool
    """whether it changes training"""
    attach: str | None
    nodes: int
    devices: int
    checkpointing: str
    micro_batches: int
    states: int
    """bytes of a device: parameters, gradients and what the optimizer keeps"""
    activations: int
    """bytes of a device, with logits"""
    window: int
    """bytes of a device: gathered parameters and buffers"""
    host: int
    """bytes of a node's host memory"""
    host_rare: bool
    """whether few nodes with these devices have so much"""
    fits: bool
    step_s: Range
    exposed_s: float
    """of the middle: what a step takes longer than its computation"""
    utilisation: float
    """of the middle: share of the step in which devices compute"""
    tokens_per_s: Range
    """of all devices"""
    link_rates: dict[str, float | None]
    """bits per second of a node's link by the utilisation in percent that they allow; null: none
    does"""

    @property
    def device_bytes(self) -> int:
        """Bytes of a device at the fullest moment of a step."""
        return self.states + self.activations + self.window


def outcomes(job: PlannedJob, tokens: int, lossy: bool = True) -> list[Outcome]:
    """Return what each strategy for the job needs and how long it takes.

    Args:
        tokens: of a device in a step.
        lossy: whether to consider those that change training.
    """
    considered = (*_candidates(job), *job.asked)
    return [outcome(job, each, tokens) for each in considered if lossy or not each.lossy]


def fits_on(job: PlannedJob) -> bool:
    """Return whether a strategy that does not change training fits."""
    lossless = (each for each in _candidates(job) if not each.lossy)
    return any(fits(job, variant) for each in lossless for variant in _variants(job, each))


def _candidates(job: PlannedJob) -> list[NamedStrategy]:
    return candidates(job.nodes, job.cluster.ranks_per_node, feedback=job.dtype != "fp16")


def outcome(job: PlannedJob, candidate: NamedStrategy, tokens: int) -> Outcome:
    """Return the fastest variant of a strategy that fits, or the smallest where none does.

    Args:
        tokens: of a device in a step.
    """
    best = min(_variants(job, candidate), key=lambda each: _preference(job, each))
    device, host = memory(job, best)
    states, activations = (sum(device.get(k, 0) for k in of) for of in (_STATES, _ACTIVATIONS))
    low, high = job.efficiency.low, job.efficiency.high
    slow, fast = step_s(job, best, low, CODEC_SHARES[0]), step_s(job, best, high, CODEC_SHARES[1])
    middle, computing, all_tokens = step_s(job, best), compute_s(job, best), job.world_size * tokens
    enough = fits(job, best)
    return Outcome(
        name=candidate.name,
        lossy=candidate.lossy,
        attach=best.attach_call(),
        nodes=job.nodes,
        devices=job.world_size,
        checkpointing=best.activation_checkpointing,
        micro_batches=best.accumulation or 1,
        states=states,
        activations=activations,
        window=sum(device.values()) - states - activations,
        host=host,
        host_rare=host > job.rare_host_bytes,
        fits=enough,
        step_s=Range(middle=middle, low=fast, high=slow),
        exposed_s=middle - computing,
        utilisation=computing / middle,
        tokens_per_s=Range(
            middle=all_tokens / middle, low=all_tokens / slow, high=all_tokens / fast
        ),
        link_rates=link_rates(job, best) if enough and job.nodes > 1 else {},
    )


def _variants(job: PlannedJob, candidate: NamedStrategy) -> Iterator[CanonicalStrategy]:
    """Iterate over checkpointing and micro-batches, those that change least first."""
    modes = (job.checkpointing,) if job.checkpointing else ("none", "selective", "full")
    for count in (n for n in range(1, job.batch + 1) if job.batch % n == 0):
        for mode in modes:
            left_open = {"activation_checkpointing": mode, "accumulation": count}
            document = {**left_open, "param_dtype": job.dtype, **candidate.document}
            strategy = parse_strategy(document, candidate.name).canonical()
            check_fits(strategy, job.world_size)
            yield strategy


def _preference(job: PlannedJob, strategy: CanonicalStrategy) -> tuple[bool, float]:
    if fits(job, strategy):
        return False, float(f"{step_s(job, strategy):.3g}")  # equal ones in their order
    return True, sum(memory(job, strategy)[0].values())


def memory(job: PlannedJob, strategy: CanonicalStrategy) -> tuple[dict[str, int], int]:
    """Return the bytes of a device by category, and those of a node's host memory."""
    streamed = strategy.traits.residency == "streamed"
    # the ranks of a node share streamed states
    ranks = job.cluster.ranks_per_node if streamed else job.world_size
    sizes = job.shapes.sizes(strategy)
    host = sum(host_memory(strategy, sizes, ranks).values()) * job.cluster.ranks_per_node
    return device_memory(strategy, sizes, ranks, job.on_gpu), host


def fits(job: PlannedJob, strategy: CanonicalStrategy) -> bool:
    """Return whether device and host have the memory that a strategy needs."""
    device, host = memory(job, strategy)
    return sum(device.values()) <= USABLE * job.device.memory and host <= job.host_bytes


def step_s(
    job: PlannedJob,
    strategy: CanonicalStrategy,
    share: float | None = None,
    codec_share: float | None = None,
) -> float:
    """Return the seconds of a step.

    Args:
        share: of the peak, at which computation runs.
        codec_share: of the memory bandwidth, at which codecs run.
    """
    work = _work(job, strategy, share, codec_share)
    return step_seconds(work, OnCluster(job.cluster, job.world_size, streams=job.on_gpu))


def compute_s(job: PlannedJob, strategy: CanonicalStrategy) -> float:
    """Return the seconds that a step computes, recomputation and optimizer included."""
    work = _work(job, strategy, codec_share=math.inf)._replace(outer=None)
    return step_seconds(work, OnCluster(job.cluster.unlimited(), job.world_size, streams=True))


def link_rates(job: PlannedJob, strategy: CanonicalStrategy) -> dict[str, float | None]:
    """Return the lowest rate of a node's link, in bits per second, at which devices compute for
    each share of the step, by the share in percent; None where no rate is enough."""
    computing, per_node = compute_s(job, strategy), job.cluster.ranks_per_node
    work = _work(job, strategy)

    @cache
    def share(log_rate: float) -> float:
        cluster = job.cluster._replace(between=between_rate(10**log_rate, per_node))
        return computing / step_seconds(work, OnCluster(cluster, job.world_size, job.on_gpu))

    def lowest(goal: float) -> float | None:
        low, high = _LOG_RATES
        if share(high) < goal:
            return None
        while high - low > _LOG_ACCURACY:
            middle = (low + high) / 2
            low, high = (middle, high) if share(middle) < goal else (low, middle)
        return float(10**high)

    return {f"{100 * goal:g}": lowest(goal) for goal in UTILISATIONS}


def _middle(ends: tuple[float, float]) -> float:
    return math.sqrt(ends[0] * ends[1])


def _work(
    job: PlannedJob,
    strategy: CanonicalStrategy,
    share: float | None = None,
    codec_share: float | None = None,
) -> StepWork:
    """Return the work of a step; without shares that of the middle of their ranges."""
    strategy = strategy.after_warmup()
    share = share or _middle((job.efficiency.low, job.efficiency.high))
    codec_share = codec_share or _middle(CODEC_SHARES)
    machine = _codecs(strategy, codec_share * job.device.bandwidth)
    forward = job.flops / 3 / (job.device.peaks[job.dtype] * share)
    update = UPDATE_BYTES * job.parameters / job.device.bandwidth
    streamed = strategy.traits.residency == "streamed"
    gradients, weights = codings(strategy, machine)
    copied = 2 * DTYPE_BYTES["fp32"] / job.device.bandwidth
    return StepWork(
        strategy,
        tuple(unit.elements for unit in job.shapes.units(strategy)),
        strategy.accumulation or 1,
        # streamed states are updated on the host
        Compute(forward, 2 * forward, 0.0 if streamed else update),
        launch_s=0.0,
        wait_s=0.0,
        gradients=gradients,
        weights=weights,
        outer=outer_coding(strategy, machine),
        outer_update=Line(0.0, OUTER_COPIES * copied),
        # it keeps the products, and public steps that use it are within the efficiency of others
        selective=0.0 if job.on_gpu else 1.0,
    )


def _codecs(strategy: CanonicalStrategy, rate: float) -> Machine:
    """Return a machine that moves each byte of the codecs of a strategy once."""
    gradients, weights, sync = strategy.gradients, strategy.weights, strategy.sync
    used: dict[CodecKey, CodecLines] = {}

    def add(codec: CodecSpec | None, feedback: bool = False) -> None:
        if codec is None or codec.name == "none":
            return
        payload = CODE_BYTES[codec.name] + 2 / getattr(codec, "group", math.inf)
        # float32 is read; error feedback also reads and writes what was not sent
        encoded = 4 + payload + 8 * feedback
        encode, decode = (Line(0.0, moved / rate) for moved in (encoded, payload + 8))
        used[codec_text(codec), feedback] = CodecLines(encode, decode, Line(0.0, payload))

    for codec in (gradients.codec, gradients.between_nodes):
        add(codec, gradients.error_feedback)
    add(weights.codec if weights else None)
    add(sync.codec if sync else None, sync.error_feedback if sync else False)
    return Machine({}, used, {})
