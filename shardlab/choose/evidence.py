"""Evidence for a judge: measurements in words, by one template with fixed units.

Judges favour candidates that are described at length, praised or listed first. So the template has
no adjective, no advice and no ranking, and strategies come in the order of their hashes.

Answers of language models are stored by the hash of their prompt: a new wording asks them again.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from shardlab.choose.history import History, mean_ratio
from shardlab.choose.records import Decision, Prediction
from shardlab.choose.settings import Agent
from shardlab.results.hardware import Hardware
from shardlab.results.table import SearchWorkload, StrategyResults
from shardlab.results.train_result import TrainResult

_STRATEGIES, _ROUNDS = 6, 4
"""Maximum numbers of strategies and of rounds in the evidence."""


def describe(
    history: History, agent: Agent, memory_limit_bytes: int, context: Sequence[str] = ()
) -> str:
    """Return the evidence, one item per line: the start, the incumbent, the fastest further
    strategies, and the last rounds. Its length does not grow with the number of rounds.

    Args:
        context: sentences on the machine and the data.
    """
    ran = sum(decision.decision != "none" for decision in history.search_rounds)
    incumbent = history.incumbent_results
    return "\n".join(
        [
            _workload(history.workload),
            *context,
            "Step ratios are of interleaved steps on link and ranks of the search. Training runs "
            "may have had others: their figures are means over seeds, +- the standard deviation.",
            *(_strategy(row, history) for row in _shown(history)),
            f"Start: {history.start_results.strategy.label()}.",
            f"Incumbent: {incumbent.strategy.label()} [{incumbent.source}].",
            *map(_round, history.search_rounds[-_ROUNDS:]),
            f"Limits: validation perplexity at most {1 + agent.quality_tolerance:.3f} times the "
            f"start's; peak memory at most {memory_limit_bytes / 1e6:.0f} MB per rank.",
            f"Trials left: {max(0, agent.budget - ran)} of {agent.budget}.",
        ]
    )


def describe_machine(hardware: Hardware) -> str:
    """Return the machine in words, and the rate of its ranks on each link; names have units."""

    def words(value: Any) -> str:
        match value:
            case dict():
                return ", ".join(f"{key} {words(item)}" for key, item in value.items())
            case list():
                return " and ".join(f"({words(item)})" for item in value)
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    fields = hardware.model_dump(exclude_none=True).items()
    return f"Machine: {'; '.join(f'{key} {words(value)}' for key, value in fields if value)}."


def describe_data(statistics: Mapping[str, Any]) -> str:
    """Return the size and the statistics of the corpus in words, as tokenize measured them."""
    train, length = statistics["train"], statistics["length"]
    ratio = train["bytes_per_token"]
    density = "" if ratio is None else f"{ratio:.2f} bytes per token, "
    return (
        f"Data: {train['tokens']} training tokens of {train['documents']} documents, "
        f"{density}vocabulary {statistics['vocabulary']}; "
        f"tokens per document p50 {length['p50']:.0f}, p90 {length['p90']:.0f}, "
        f"p99 {length['p99']:.0f}; padding {100 * statistics['pad_ratio']:.0f} %; entropy of "
        f"token frequencies {statistics['entropy_bits']:.2f} bits."
    )


def describe_prediction(prediction: Prediction) -> str:
    """Return a prediction in words."""
    step = "step unknown"
    if prediction.step_ms is not None:
        step = (
            f"step {prediction.step_ms:.2f} ms (95 % {prediction.low_ms:.2f} to "
            f"{prediction.high_ms:.2f})"
        )
    quality = prediction.perplexity_ratio
    ratio = "unknown" if quality is None else f"{quality:.3f} times the start's"
    return (
        f"predicted: {step}, peak memory {prediction.memory_bytes / 1e6:.0f} MB per rank, "
        f"perplexity {ratio} ({prediction.note})"
    )


def _shown(history: History) -> list[StrategyResults]:
    """Return the start, the incumbent and the strategies with the shortest steps, by hash."""
    load = history.workload

    def order(row: StrategyResults) -> tuple[bool, float, str]:
        step = row.step(load)
        required = row.hash in (history.start, history.incumbent)
        return not required, math.inf if step is None else step.ratio, row.hash

    tried = history.tried
    rows = [row for key, row in history.measured.items() if key in tried or row.trained]
    return sorted(sorted(rows, key=order)[:_STRATEGIES], key=lambda row: row.hash)


def _workload(load: SearchWorkload) -> str:
    # without the name of the model: it is text from a third party, which a judge would read
    return (
        f"Workload: {load.parameters} parameters on {load.world_size} ranks; "
        f"{load.batch_size} sequences of {load.sequence_length} tokens per rank and "
        f"micro-batch; {load.accumulation} micro-batches per step; link {load.link}."
    )


def _strategy(row: StrategyResults, history: History) -> str:
    figures = []
    failure, step = row.failure(history.workload), row.step(history.workload)
    if failure:
        figures.append(f"no figures, the trial ended with outcome {failure.outcome}")
    if step:
        figures.append(
            f"step {step.ratio:.3f} times the start's (95 % {step.interval}, {step.source})"
        )
    if row.trained:
        figures.append(_trained(row.trained, history.start_results.trained))
    return f"Strategy {row.strategy.label()} [{row.source}]: {'; '.join(figures)}."


def _trained(runs: Sequence[TrainResult], start: Sequence[TrainResult]) -> str:
    def values(field: str) -> list[float]:
        return [getattr(run, field) for run in runs]

    def mean(field: str) -> float:
        return fmean(values(field))

    def moved(kind: str) -> str:
        raw, wire = (
            fmean(run.ledger[kind][field] for run in runs) / 1e6
            for field in ("bytes_raw", "bytes_wire")
        )
        return f"{raw:.3f} MB asked, {wire:.3f} MB moved"

    names = sorted({name for run in runs for name in run.comm_ms_by_op})
    times = (fmean(run.comm_ms_by_op.get(name, 0.0) for run in runs) for name in names)
    pairs = zip(names, times, strict=True)
    operations = ", ".join(f"{name} {time:.2f} ms" for name, time in pairs) or "none"
    collectives = fmean(sum(kind["collectives"] for kind in run.ledger.values()) for run in runs)
    spread = f" +- {stdev(values('val_ppl')):.2f}" if len(runs) > 1 else ""
    return (
        f"trained with {len(runs)} of {len(start)} seeds: traced step "
        f"{mean('profiled_step_ms'):.2f} ms with compute {mean('compute_ms'):.2f} ms, "
        f"communication {mean('comm_ms_per_step'):.2f} ms ({operations}; "
        f"{100 * mean('backward_comm_share'):.0f} % of backward) in {collectives:.0f} collectives, "
        f"exposed communication {mean('exposed_comm_ms'):.2f} ms, idle {mean('idle_ms'):.2f} ms; "
        f"encoding {mean('encode_ms'):.2f} ms, decoding {mean('decode_ms'):.2f} ms; "
        f"gradients {moved('gradients')}; weights {moved('weights')}; "
        f"{100 * mean('flops_share'):.1f} % of the fastest matrix product's operations per second; "
        f"validation perplexity {mean('val_ppl'):.2f}{spread}, "
        f"{mean_ratio(runs, start):.3f} times the start's; "
        f"peak memory {mean('memory_peak_bytes') / 1e6:.0f} MB per rank"
    )


def _round(decision: Decision) -> str:
    raced = ", ".join(arm.label for arm in decision.compared) or "nothing"
    return f"Round {decision.round}: raced {raced}; decision {decision.decision}."
