"""Synchronisation against computation on the machines at hand, and what to make of it.

`torchrun ... -m shardlab probe MODEL` measures the links between the ranks and a training step of
the model, and derives by plain arithmetic what share of a step data parallelism would spend on
synchronisation: uncompressed, compressed, or rare. It judges speed alone, not quality.

algbw and busbw are those of nccl-tests (doc/PERFORMANCE.md): bytes of the vector over the time, and
that times 2(n-1)/n for an all-reduce or (n-1)/n for an all-to-all, the bytes that a rank sends.
"""

import os
import shlex
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from shardlab.choose.probe_answer import LEGEND, STOCK, Times, advice
from shardlab.codecs.base import Block, Unit
from shardlab.comm.ledger import Ledger
from shardlab.comm.object_collectives import (
    device_of,
    gather_values,
    run_or_fail_together,
    subgroup,
)
from shardlab.comm.routes import between_replicas, gradient_route, make_collective
from shardlab.comm.transport import Transport
from shardlab.config.parameters import asked_strategies
from shardlab.core.document import Document, validate
from shardlab.core.errors import UserError
from shardlab.core.host import describe_host
from shardlab.core.launch_environment import started_ranks
from shardlab.core.types import BatchSize, SequenceLength, Vocabulary
from shardlab.kernels import native
from shardlab.models.settings import GPT2_VOCABULARY, PRESETS, Model
from shardlab.predict.asked import admitted, sent_by_replicas, unprobed
from shardlab.predict.codec_costs import interleave
from shardlab.predict.offers import replica_candidates
from shardlab.strategy.codec_options import Int8Spec
from shardlab.strategy.compression import Compression
from shardlab.strategy.document import CanonicalStrategy, Strategy, parse_strategy
from shardlab.train.launch import launch

if TYPE_CHECKING:
    from shardlab.models.build import BuiltModel

_DELAY, _ALL_TO_ALL = "delay", "all-to-all"
_BUCKET = 25 << 20
"""bytes of a message of DistributedDataParallel at most, by default"""
_REPETITIONS = 9
"""of which the 2nd and the 8th are a 96 % interval of the median, whatever the distribution"""
_CALLS = 10
"""of the smallest all-reduce in a row"""
_MESSAGE_S, _CHECK_S = 0.25, 60.0
"""messages grow until one takes so long; a whole gradient is sent that should take less"""
_TIMEOUT_S = 600.0


class ProbeSettings(Document):
    """Model and batch that are measured: the options of `shardlab probe`."""

    model: str
    """preset; or folder, config.json or name on the hub"""
    batch_size: BatchSize = 8
    """sequences per rank and step"""
    sequence_length: SequenceLength = 512
    vocabulary: Vocabulary | None = None
    """vocabulary size of a preset; None: GPT-2's"""
    codec: str = "int4"
    """the strongest compression"""
    param_dtype: Literal["fp32", "bf16"] = "fp32"
    """data type of autocast"""


def _times(
    calls: Mapping[str, Callable[[], object]],
    world: dist.ProcessGroup,
    repetitions: int = _REPETITIONS,
) -> dict[str, Times]:
    """Return the times of calls, interleaved, after one of each that is not counted."""
    on_gpu = device_of(world).type == "cuda"

    def finish(call: Callable[[], object]) -> None:
        call()
        if on_gpu:
            torch.cuda.synchronize()

    finished = {name: partial(finish, call) for name, call in calls.items()}
    ranks = gather_values(interleave(finished, repetitions, world), world)
    times, second = {}, min(1, repetitions - 1)
    for name in calls:
        slowest = sorted(map(max, zip(*(rank[name] for rank in ranks), strict=True)))
        times[name] = Times(statistics.median(slowest), slowest[second], slowest[-1 - second])
    return times


class MeasuredLink(NamedTuple):
    """Measured link between the ranks of a group, while other groups of its kind send as well."""

    name: str
    ranks: int
    nbytes: int
    """size of the vector that is reduced"""
    times: dict[str, Times]
    """seconds of `_DELAY`, an all-reduce of one element; of `_ALL_TO_ALL`; and of an all-reduce in
    each way"""
    offered: Sequence[str]
    """ways that every probe measures, the strongest compression last"""
    asked: Mapping[str, CanonicalStrategy]
    """strategies of the user whose replicas are these ranks"""

    def sync(self, way: str, gradient_bytes: int) -> Times:
        """Return the times of an all-reduce of a float32 gradient, at this rate."""
        return self.times[way].scaled(gradient_bytes / self.nbytes)

    def advice(
        self, gradient_bytes: int, what: str, computation: Times, sharded: bool = False
    ) -> str:
        """Return what ways to synchronise these ranks cost; arguments as of `advice`."""
        times = {way: self.sync(way, gradient_bytes) for way in (STOCK, *self.offered)}
        asked = {name: (s, self.sync(name, gradient_bytes)) for name, s in self.asked.items()}
        sizes = self.name, self.ranks, times, gradient_bytes
        return advice(*sizes, what, computation, sharded=sharded, asked=asked)

    def __str__(self) -> str:
        part = (self.ranks - 1) / self.ranks
        factors = {STOCK: 2 * part, _ALL_TO_ALL: part}
        lines = [f"{self.name}: all-reduce of 4 bytes {self.times[_DELAY]}"]
        for name, times in self.times.items():
            if name in factors:
                algbw = self.nbytes / times.median / 1e6
                rates = f"algbw {algbw:.4g} MB/s, busbw {algbw * factors[name]:.4g} MB/s"
                lines.append(f"  {name} of {self.nbytes:,} bytes {times}, {rates}")
            elif name != _DELAY:
                lines.append(f"  all-reduce by {name} {times}")
        return "\n".join(lines)


def _link(
    name: str,
    group: dist.ProcessGroup,
    world: dist.ProcessGroup,
    gradient_bytes: int,
    offered: Mapping[str, Compression],
    asked: Mapping[str, CanonicalStrategy],
) -> MeasuredLink:
    """Measure delay, rate and compressions between the ranks of `group`, with large messages."""
    size, device = dist.get_world_size(group), device_of(world)
    most = max(size, min(_BUCKET, gradient_bytes) // 4)
    count, seconds = min(1 << 14, most), 0.0
    while count < most and seconds < _MESSAGE_S:
        count = min(4 * count, most)
        call = partial(dist.all_reduce, torch.zeros(count, device=device), group=group)
        seconds = _times({"": call}, world, 1)[""].median
    count -= count % size
    one, sent, received = (torch.zeros(n, device=device) for n in (1, count, count))
    unit = Unit("probe", (Block("probe", count, 1),))

    def small() -> None:
        for _ in range(_CALLS):
            dist.all_reduce(one, group=group)

    calls: dict[str, Callable[[], object]] = {
        _DELAY: small,
        STOCK: partial(dist.all_reduce, received, group=group),
        _ALL_TO_ALL: partial(Transport(group).all_to_all, sent.chunk(size), received.chunk(size)),
    }
    sent_by = {name: sent_by_replicas(strategy) for name, strategy in asked.items()}
    for way, compression in {**offered, **sent_by}.items():
        route = gradient_route(compression, frozenset(), seed=0)
        route = route if group is world else between_replicas(route)
        collective = make_collective(group, Ledger(), "gradients", route)
        vector = 1e-3 * torch.randn(count, device=device)
        calls[way] = partial(collective.all_reduce, vector, 1 / size, unit)
    times = _times(calls, world)
    times[_DELAY] = times[_DELAY].scaled(1 / _CALLS)
    return MeasuredLink(name, size, sent.nbytes, times, [*offered], asked)


def _whole(gradient_bytes: int, world: dist.ProcessGroup) -> float:
    """Return the seconds of an all-reduce of a whole gradient, in buckets."""
    buckets = torch.zeros(gradient_bytes // 4, device=device_of(world)).split(_BUCKET // 4)

    def reduce() -> None:
        for bucket in buckets:
            dist.all_reduce(bucket, group=world)

    return _times({"": reduce}, world, 3)[""].median


def _build(settings: ProbeSettings, device: torch.device) -> "BuiltModel":
    """Return the model on the meta device.

    Raises:
        UserError: there is no such model, or it does not fit into memory.
    """
    from shardlab.models.build import build_model
    from shardlab.train.step_space import free_bytes

    name, vocabulary = settings.model, settings.vocabulary
    preset = name in PRESETS
    if vocabulary and not preset:
        raise UserError(f"--vocabulary is for presets: {name} has its own")
    model = Model.model_validate({"preset" if preset else "config": name})
    tokens = (vocabulary or GPT2_VOCABULARY) if preset else 1
    built = build_model(model, tokens, settings.sequence_length, 0, seed=0)
    words = built.module.config.get_text_config().vocab_size
    logits = settings.batch_size * settings.sequence_length * words
    # of each parameter weight, gradient and two moments; logits and their gradient
    needed = 16 * built.parameters + 8 * logits
    free = free_bytes(device, int(os.environ["LOCAL_WORLD_SIZE"]))
    if needed > free:
        raise UserError(
            f"{name}: a step needs more than {needed / 1e9:.3g} GB, and a rank has "
            f"{free / 1e9:.3g} GB on {device.type}: lower --batch-size or "
            "--sequence-length, or take a smaller model"
        )
    return built


def _step(built: "BuiltModel", settings: ProbeSettings, world: dist.ProcessGroup) -> Times:
    """Return the times of a training step without communication, of random tokens."""
    model, device = built.whole(), device_of(world)
    model.to(device=device)  # type: ignore[call-arg]
    optimizer = torch.optim.AdamW(model.parameters())
    words = model.config.get_text_config().vocab_size
    tokens = torch.randint(words, (settings.batch_size, settings.sequence_length), device=device)

    def train() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=settings.param_dtype == "bf16"):
            logits = model(input_ids=tokens).logits[:, :-1]
        F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    # a step that fails on one rank ends all
    run_or_fail_together(world, "probe: the model does not train", train)
    return _times({"": train}, world)[""]


def _compare(facts: Mapping[str, object], world: dist.ProcessGroup) -> None:
    """Raise `UserError` on all ranks, in one line, where what must be equal differs."""
    first, *others = gather_values(facts, world)
    for rank, other in enumerate(others, 1):
        for key in (key for key in first if first[key] != other[key]):
            raise UserError(
                f"ranks differ: {key} is {first[key]} on rank 0 and {other[key]} on rank {rank}: "
                "start all by the same command, and as many on each node"
            )


def _header(
    settings: ProbeSettings, parameters: int, ranks: str, kinds: Sequence[str], backend: str
) -> str:
    """Return what is measured, and on what: `kinds` are the devices of all ranks."""
    threads = torch.get_num_threads()
    return (
        f"{settings.model}: {parameters:,} parameters, random weights, {settings.param_dtype}; "
        f"{settings.batch_size} x {settings.sequence_length} tokens per rank and step\n"
        f"{ranks}, of {threads} thread{'s' * (threads > 1)}; {backend}; "
        f"{', '.join(sorted({*kinds}))}\n"
        f"torch {torch.__version__}, kernels {native.serving()}\n"
        f"medians of {_REPETITIONS} repetitions of the slowest rank, with 96 % intervals"
    )


def probe(
    settings: ProbeSettings,
    strategies: Mapping[str, Strategy],
    world: dist.ProcessGroup,
    skip: bool = False,
) -> None:
    """Measure, and print on rank 0 what was measured and what follows from it.

    Args:
        strategies: of the user, by name, beside those of a probe.
        skip: whether to leave out those that cannot be measured, in place of an error.

    Raises:
        UserError: on all ranks: the model cannot be trained here, a strategy cannot be measured, or
            the ranks differ.
    """
    rank, size, device = dist.get_rank(world), dist.get_world_size(world), device_of(world)
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    reason_of = partial(unprobed, world_size=size, nodes=size // local)
    asked, left_out = admitted(strategies, reason_of, skip)
    built = run_or_fail_together(world, "probe: model", partial(_build, settings, device))
    nbytes = 4 * built.parameters
    # a folder may have another name on each node
    model, labels = f"of {nbytes // 4:,} parameters", [s.label() for s in asked.values()]
    _compare({**settings.model_dump(), "model": model, "node": local, "strategies": labels}, world)
    backend, host = ("gloo" if device.type == "cpu" else "nccl"), describe_host()
    kinds = gather_values(host["cpu"] if backend == "gloo" else " ".join(host["gpus"]), world)

    def show(text: str) -> None:
        if rank == 0:
            print(text, flush=True)

    show(_header(settings, nbytes // 4, f"{size} ranks, {local} on each node", kinds, backend))
    show("".join(f"{line}\n" for line in left_out))
    step = _step(built, settings, world)
    del built
    show(f"forward, backward and AdamW without communication: {step}")
    strongest = Compression.model_validate({"codec": settings.codec, "error_feedback": True})
    offered = {"int8": Compression(codec=Int8Spec()), settings.codec: strongest}
    # replicas are ranks, or nodes
    full = {name: strategy.canonical() for name, strategy in asked.items()}
    of_ranks = {name: s for name, s in full.items() if s.replica_count(size) == size}
    link = _link("all ranks", world, world, nbytes, offered, of_ranks)
    expected = link.sync(STOCK, nbytes).median
    whole = f"{_whole(nbytes, world):.4g} s" if expected < _CHECK_S else "not measured"
    show(f"{link}\n  all-reduce of the whole gradient {whole}, {expected:.4g} s at this rate")
    answers = [link.advice(nbytes, "computation of a step", step)]
    if 1 < local < size:
        first, part = rank // local * local, nbytes // local
        inside = subgroup(world, [*range(first, first + local)])
        across = subgroup(world, [*range(rank % local, size, local)])
        near = _link("inside nodes", inside, world, nbytes, offered, {})
        of_nodes = {name: s for name, s in full.items() if name not in of_ranks}
        far = _link("between nodes", across, world, part, offered, of_nodes)
        show(f"{near}\n{far}")
        # a node is a replica
        what = "step of a node, with its own all-reduce"
        island = Times(*map(sum, zip(step, near.sync(STOCK, nbytes), strict=True)))
        answers.append(far.advice(part, what, island, sharded=True))
    show("\n".join([*answers, LEGEND]))


def _check_uses(codec: str) -> None:
    """Raise `UserError` where a way to synchronise replicas cannot have the codec."""
    validate(Compression, {"codec": codec, "error_feedback": True}, "--codec")
    for nodes in (1, 2):
        for offer in replica_candidates(codec, nodes):
            parse_strategy(offer.document, f"--codec {codec}")


def main(strategies: Sequence[str], params: str, **options: Any) -> None:
    """Probe as one rank of torchrun or srun.

    Args:
        strategies: of the user, as `asked_strategies` reads them.
        params: file with their names.
        options: fields of `ProbeSettings`.

    Raises:
        UserError: an option is wrong, or this process is not one of several ranks.
    """
    settings, size = validate(ProbeSettings, options, ""), started_ranks()
    _check_uses(settings.codec)  # before anything is measured
    asked = asked_strategies(strategies, params)
    import shardlab.models.build  # noqa: F401 - the extra `hf`, before ranks are forked

    if size is None:
        command = f"torchrun --nproc-per-node 2 -m shardlab {shlex.join(sys.argv[1:])}"
        raise UserError(f"nobody started the ranks, one for each device: {command}")
    if size < 2:
        raise UserError("1 rank has no other to synchronise with: --nproc-per-node 2 or more")
    work = partial(probe, settings, asked, skip="all" in strategies)
    launch(work, size, torch.get_num_threads(), _TIMEOUT_S, placement="none")


if __name__ == "__main__":
    print("probe: error: python -m shardlab.probe is python -m shardlab probe now", file=sys.stderr)
    sys.exit(2)
