"""Predictions of `shardlab plan` compared with public measurements of others.

    python -m benchmarks.plans [--out FOLDER]

Nothing runs here. The range of each prediction is that of `EFFICIENCY_ROWS` of
`shardlab.predict.devices`, public rows of one node that are not scored, without those of the
model's own size, which a user's model has none of. Plans are also compared
with the timings of the default experiment and of experiments/62m on emulated links, by their steps
without communication.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.common import arguments, publish, text_table
from shardlab.core.link import bits_per_second
from shardlab.core.numbers import fixed, number
from shardlab.models.settings import GPT2_VOCABULARY, StepSize
from shardlab.models.shapes import PUBLISHED, DecoderShapes, decoder_of, gpt2_config, read_decoder
from shardlab.predict.devices import (
    DEVICES,
    EFFICIENCY_ROWS,
    ROWS_SOURCE,
    Device,
    Efficiency,
    EfficiencyRow,
    cluster_of,
    efficiency,
    inside_rate,
)
from shardlab.predict.planner import CODEC_SHARES, PlannedJob, memory, step_s
from shardlab.report.tables import Table
from shardlab.results.calibration_record import UPDATE_BYTES
from shardlab.results.files import read_results
from shardlab.results.result import only
from shardlab.results.timing_result import NO_COMMUNICATION, TimingResult
from shardlab.strategy.document import parse_strategy

_MPT = {
    "125m": (12, 768, 12),
    "350m": (24, 1024, 16),
    "760m": (24, 1536, 12),
    "1b": (24, 2048, 16),
    "3b": (32, 2560, 20),
    "7b": (32, 4096, 32),
    "13b": (40, 5120, 40),
    "30b": (48, 7168, 56),
    "70b": (80, 8192, 64),
}
"""layers, width and heads"""
_FOUNDRY = "mosaicml/llm-foundry 061f2c7, scripts/train/benchmarking/README.md"
_TITAN = "pytorch/torchtitan 31a17bf, benchmarks/llama3_h100_202412_torchtitan.md"


def mpt(name: str, positions: int = 2048) -> dict[str, Any]:
    """Return MPT as a GPT-2: it has as many parameters, weight for weight."""
    own: dict[str, Any] = {
        "vocab_size": 50368,
        "n_positions": positions,
        "activation_function": "gelu",
    }
    return gpt2_config(*_MPT[name], **own)


def _without(parameters: int) -> list[EfficiencyRow]:
    """Return the rows of models of other sizes."""
    return [row for row in EFFICIENCY_ROWS if not 0.9 < row.parameters / parameters < 1.1]


class PublishedRun(NamedTuple):
    """A public measurement of data-parallel training."""

    source: str
    name: str
    config: Mapping[str, Any]
    device: str
    devices: int
    """of nodes of 8"""
    link: str
    """rate of a node's link"""
    batch: int
    """sequences per device and step"""
    micro_batches: int
    sequence_length: int
    checkpointing: str
    tokens_per_s: float
    """of a device"""
    reduced: str = "fp32"
    """type in which gradients are reduced"""
    memory_gib: float | None = None

    def job(self) -> PlannedJob:
        """Return what the row measured."""
        decoder, device = decoder_of(self.config, self.name), DEVICES[self.device]
        assert decoder is not None, "both types have closed forms"
        step = StepSize(self.batch, self.sequence_length)
        tokens = self.batch * self.sequence_length
        inside = inside_rate("nvlink", device)
        return PlannedJob(
            shapes=DecoderShapes(decoder, step),
            parameters=decoder.parameters,
            flops=decoder.flops_per_token(self.sequence_length) * tokens,
            batch=self.batch,
            dtype="bf16",
            device=device,
            efficiency=efficiency(
                self.device, "bf16", decoder.parameters, _without(decoder.parameters)
            ),
            cluster=cluster_of(device, 8, inside, bits_per_second(self.link)),
            nodes=self.devices // 8,
        )

    def predicted(self) -> tuple[float, float, float]:
        """Return tokens per second and device: the middle, and the ends of the range."""
        job, strategy = self.job(), self._strategy()
        share, tokens = job.efficiency, self.batch * self.sequence_length
        ends = zip((share.low, share.high), CODEC_SHARES, strict=True)
        low, high = (tokens / step_s(job, strategy, *each) for each in ends)
        return tokens / step_s(job, strategy), low, high

    def of_one_node(self) -> float | None:
        """Return tokens per second and device at the share of the peak that the same model reaches
        on one node, without any communication; None where no row has it."""
        job, tokens = self.job(), self.batch * self.sequence_length
        rows = [row for row in EFFICIENCY_ROWS if row not in _without(job.parameters)]
        share = next((row.achieved for row in rows if row.device == self.device), None)
        if share is None:
            return None
        repeated = 4 / 3 if self.checkpointing == "full" else 1.0
        return tokens * share * job.device.peaks["bf16"] / (job.flops * repeated)

    def predicted_gib(self) -> float:
        """Return the memory of a device in closed form."""
        return sum(memory(self.job(), self._strategy())[0].values()) / 2**30

    def _strategy(self) -> Any:
        document = {"param_dtype": "bf16", "reduce_dtype": self.reduced}
        own = {"activation_checkpointing": self.checkpointing, "accumulation": self.micro_batches}
        return parse_strategy(document | own).canonical()


def _foundry() -> Iterator[PublishedRun]:
    """Iterate over the rows of several nodes whose link is stated, 2048 tokens, FULL_SHARD."""
    # devices, micro-batch, micro-batches, checkpointing, tokens per second and device
    of_40g = {
        "125m": [(16, 26, 1, "none", 130535), (128, 26, 1, "none", 123936)],
        "350m": [(16, 18, 1, "none", 55413), (128, 18, 1, "none", 51934)],
        "760m": [(16, 12, 1, "none", 29607), (128, 12, 1, "none", 28940)],
        "1b": [(16, 8, 1, "none", 19085), (32, 10, 1, "none", 15555), (128, 10, 1, "none", 18647)],
        "3b": [(16, 5, 1, "none", 9750), (64, 6, 1, "none", 9736), (128, 6, 1, "none", 9538)],
        "7b": [(16, 16, 1, "full", 3645), (64, 18, 1, "full", 3665), (128, 18, 1, "full", 3623)],
        "13b": [(16, 10, 1, "full", 1993), (64, 16, 1, "full", 1976), (128, 16, 1, "full", 1972)],
        "30b": [(32, 4, 1, "full", 857), (128, 6, 1, "full", 865)],
        "70b": [(64, 2, 1, "full", 276), (128, 4, 1, "full", 376)],
    }
    of_80g = {"70b": [(32, 2, 16, "full", 373), (64, 8, 4, "full", 410)]}
    for device, rows in (("a100-40g", of_40g), ("a100-80g", of_80g)):
        for name, measured in rows.items():
            for devices, micro, count, mode, tokens in measured:
                yield PublishedRun(
                    *(_FOUNDRY, f"MPT {name}", mpt(name), device, devices, "1600gbit"),
                    *(micro * count, count, 2048, mode, tokens),
                    reduced="bf16",  # MP mode PURE
                )


_LLAMA = ("Llama 3.1 8B", PUBLISHED["llama-3-8b"])
_LINK = "3200gbit"
"""400 Gbit/s for each of 8 devices; only rows of several nodes depend on it"""
ROWS = [
    *_foundry(),
    PublishedRun(
        *(_TITAN, *_LLAMA, "h100-80g", 8, _LINK, 2, 1, 8192, "selective", 5762),
        memory_gib=82.4,
    ),
    PublishedRun(
        *(_TITAN, *_LLAMA, "h100-80g", 128, _LINK, 2, 1, 8192, "selective", 5605),
        memory_gib=67.0,
    ),
]
_REFUSED = [
    (f"{_TITAN}: FSDP with torch.compile, 8 and 128 H100", "compiled blocks are not modelled"),
    (f"{_TITAN}: Float8; tensor, pipeline and context parallelism", "none of our strategies"),
    ("pytorch/torchtitan bcdeaa3, benchmarks/llama3_8b_h200_2025-06_torchtitan.md", "Float8"),
    (
        "pytorch/torchtitan 0413364, docs/performance.md: Llama 2 and 3 on 64 A100",
        "the link between nodes is not stated",
    ),
    (
        "foundation-model-stack/fms-fsdp 0d31998, README.md: Llama 2 on 128 A100",
        "the link between nodes is not stated",
    ),
    (f"{_FOUNDRY}: H100 in bf16, several nodes", "the link between nodes is not stated"),
    (f"{_FOUNDRY}: H100 in fp8", "none of our strategies"),
    (f"{_FOUNDRY}: one node, 2048 tokens", "they set the range of efficiencies"),
    (f"{_FOUNDRY}: one node, other sequence lengths", "too near to the rows that set the range"),
    (
        "arXiv 2412.01152, INTELLECT-1: exchanges every 100 steps by int8 between up to 14 nodes, "
        "83 to 96 % of the time computing",
        "the stored text has no rates of the links",
    ),
    (
        "jingchaozhang.github.io, IB-vs-Ethernet-Fine-Tuning-at-Scale: FSDP, H100",
        "the stored text ends before the results",
    ),
]


_TIMINGS = Path("results/timings/two-ranks.jsonl"), "timings of the default experiment"
_VOCABULARY = 2048
"""tokens of the default tokenizer"""
_LARGE_TIMINGS = Path("experiments/62m/results/timings/link-1gbit.jsonl")


def _timed_job(run: TimingResult, bound: TimingResult, vocabulary: int) -> PlannedJob:
    """Return the job of a timed run on CPUs that are described by steps without communication.

    Args:
        bound: those steps. Their time without the update is computation, and the update tells the
            bandwidth of the memory.
    """
    traced = bound.breakdown
    parts = (traced.forward_ms, traced.backward_ms, traced.update_ms)
    step_ms, whole = median(bound.step_ms), sum(parts)
    update_s = step_ms / 1e3 * traced.update_ms / whole
    bandwidth = UPDATE_BYTES * run.parameters / update_s
    decoder = read_decoder(run.model, vocabulary, run.sequence_length)
    assert decoder is not None and decoder.parameters == run.parameters
    step = StepSize(run.batch_size, run.sequence_length)
    # operations in units of what a core does in a second
    device = Device(0.0, {"fp32": 1.0}, bandwidth, bandwidth / 2, "", "timed")
    return PlannedJob(
        shapes=DecoderShapes(decoder, step),
        parameters=run.parameters,
        flops=step_ms / 1e3 - update_s,
        batch=run.batch_size,
        dtype="fp32",
        device=device,
        efficiency=Efficiency(1.0, 1.0, "timed"),
        cluster=cluster_of(device, 1, float("inf"), run.bits_per_second or 0),
        nodes=run.world_size,
        on_gpu=False,
    )


def _emulated(path: Path, vocabulary: int) -> Table:
    """Return plans beside timed steps on emulated links, with plain gradients, int8 and int4."""
    runs = only(read_results(path, "run shardlab timing"), TimingResult)
    bounds = {run.timing: run for run in runs if run.run == NO_COMMUNICATION}
    lines = []
    for run in runs:
        if run.bits_per_second is None or run.run == NO_COMMUNICATION:
            continue
        strategy = parse_strategy(run.strategy).canonical()
        predicted = 1e3 * step_s(_timed_job(run, bounds[run.timing], vocabulary), strategy)
        measured = median(run.step_ms)
        times = [fixed(each, 1) for each in (measured, predicted)]
        lines.append([run.link, run.run, *times, fixed(100 * (predicted / measured - 1), 1)])
    headings = ["link of 2 CPU ranks", "strategy", "measured, ms", "predicted, ms", "error, %"]
    size = number(runs[0].parameters)
    return text_table(f"Steps of {size} parameters on emulated links", headings, lines)


_OF_LINKS = (
    "Computation, and the bandwidth of the memory, are those of steps without communication, "
    "interleaved with these. fsdp2 reduces by gloo's reduce-scatter, which sends twice as much as "
    "a real one; fsdp2-exchange does not. A plan knows nothing of what engines do for each "
    "collective, nor of ranks that wait for a core: on fast links that is up to a fourth of such "
    "small steps."
)


_OF_MEMORY = (
    "The rows are of selective checkpointing, which keeps the result of every product here. "
    "torchtitan's keeps every second one (parallelize_llama.py at 3f20451): per block not those of "
    "keys, of attention's last weight and of one weight before the gate, 19.0 GiB in these rows. "
    "Without these the closed form gives 71.9 and 61.3 GiB, 13 and 8 % too little: it counts what "
    "is allocated, torchtitan what the allocator reserves."
)


def _throughput() -> Table:
    """Return the rows with what is predicted for them."""
    lines = []
    for row in ROWS:
        (middle, low, high), simple = row.predicted(), row.of_one_node()
        lines.append(
            [
                _source(row),
                row.name,
                f"{row.devices} {row.device}",
                f"{row.batch // row.micro_batches} x {row.micro_batches}",
                row.checkpointing,
                f"{row.tokens_per_s:,.0f}",
                f"{middle:,.0f} ({low:,.0f} to {high:,.0f})",
                fixed(100 * (middle / row.tokens_per_s - 1), 1),
                "yes" if low <= row.tokens_per_s <= high else "no",
                "" if simple is None else fixed(100 * (simple / row.tokens_per_s - 1), 1),
            ]
        )
    headings = ["source", "model", "devices", "micro-batch x number", "checkpointing"]
    headings += ["measured, tokens/s per device", "predicted", "error, %", "inside"]
    return text_table("Throughput", [*headings, "error of one node's row, %"], lines)


def _source(row: PublishedRun) -> str:
    return row.source.split("/")[1].split()[0]


def _errors() -> Table:
    """Return the errors by source, and those of the one-node row of the same model."""
    lines = []
    for source in dict.fromkeys(map(_source, ROWS)):
        rows = [row for row in ROWS if _source(row) == source]
        simple = [(row, tokens) for row in rows if (tokens := row.of_one_node()) is not None]
        plans = [(row, row.predicted()) for row in rows]
        inside = sum(low <= row.tokens_per_s <= high for row, (_, low, high) in plans)
        every = [(row, middle) for row, (middle, *_) in plans]
        both = [(row, middle) for row, middle in every if row.of_one_node() is not None]
        what = "the plan, without rows of the model's size"
        lines.append([source, what, *_median_and_worst(every), f"{inside} of {len(rows)}"])
        if simple:
            lines.append(
                [source, "the plan, rows with a one-node row", *_median_and_worst(both), ""]
            )
            what = "the one-node row of the same model"
            lines.append([source, what, *_median_and_worst(simple), ""])
    headings = ["source", "prediction", "rows", "median error, %", "worst, %", "inside the range"]
    return text_table("Errors by source", headings, lines)


def _median_and_worst(pairs: Sequence[tuple[PublishedRun, float]]) -> list[str]:
    errors = [abs(tokens / row.tokens_per_s - 1) for row, tokens in pairs]
    return [str(len(errors)), *(fixed(100 * each, 1) for each in (median(errors), max(errors)))]


_OF_ROWS = (
    "A plan is scored with a range that holds no row of the model's own size: a user's model has "
    "none. Where there is such a row of one node, of the same source, device and sequence length, "
    "it alone is the better prediction: on these fast links communication hardly counts. All have "
    "fast links: they test efficiency and memory, and say little of slow links and nothing of "
    "codecs or rare exchanges. torchtitan's H100 have 96 GB of HBM2e and 500 W, so that their peak "
    "is below the table's, and its selective checkpointing keeps every second product, where ours "
    "keeps all."
)


def main() -> None:
    args = arguments(__doc__, timings=_TIMINGS)
    gib = [(row, row.memory_gib, row.predicted_gib()) for row in ROWS if row.memory_gib]
    sizes = [
        [row.name, f"{row.devices} {row.device}"]
        + [fixed(each, 1) for each in (known, found, 100 * (found / known - 1))]
        for row, known, found in gib
    ]
    of_memory = ["model", "devices", "measured, GiB", "predicted, GiB", "error, %"]
    used = [
        [each.device, f"{each.parameters / 1e9:.3g} G", fixed(100 * each.achieved, 1)]
        for each in EFFICIENCY_ROWS
    ]
    publish(
        __doc__,
        args.out / "plans.md",
        _throughput(),
        _errors(),
        _OF_ROWS,
        text_table("Memory of a device at its peak", of_memory, sizes),
        _OF_MEMORY,
        _emulated(args.timings, _VOCABULARY),
        _emulated(_LARGE_TIMINGS, GPT2_VOCABULARY),
        _OF_LINKS,
        text_table("Rows that are not scored", ["rows", "reason"], [[*each] for each in _REFUSED]),
        text_table("Share of the peak", ["device", "parameters", "achieved, %"], used),
        f"Source: {ROWS_SOURCE}.",
    )


if __name__ == "__main__":
    main()
