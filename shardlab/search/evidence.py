"""Evidence for a judge: facts in words, by one template with fixed units.

Judges favour what is longer, praised or listed first. So there is no adjective, no advice and no
ranking here, and strategies come in the order of their hashes.
"""

from collections.abc import Mapping, Sequence
from statistics import stdev
from typing import Any

from shardlab.config.codec_table import codec_text
from shardlab.config.machine import Gpu, Hardware
from shardlab.config.schema import Agent
from shardlab.config.strategy import Strategy, override_words
from shardlab.search.history import History, perplexity_ratio
from shardlab.search.records import Decision, Measured, Prediction, Workload


def changes(before: Strategy, after: Strategy) -> dict[str, tuple[Any, Any]]:
    """Return the settings of the canonical form that differ, before and after, by key."""
    old, new = _settings(before), _settings(after)
    return {key: (old[key], new[key]) for key in sorted(old) if old[key] != new[key]}


def aspects(before: Strategy, after: Strategy) -> set[str]:
    """Return in which of `sharding`, `gradients` and `weights` two strategies differ."""
    weights = {"weights", "weights_minimum_size"}
    return {
        "weights" if key in weights else "sharding" if key in Strategy.model_fields else "gradients"
        for key in changes(before, after)
    }


def in_words(before: Strategy, after: Strategy) -> str:
    """Return the changes as `engine: fsdp2 to ddp; wrap: block to unset`."""
    differences = changes(before, after).items()
    return "; ".join(f"{key}: {_word(old)} to {_word(new)}" for key, (old, new) in differences)


def _settings(strategy: Strategy) -> dict[str, Any]:
    """Flatten the canonical form to one level; a codec with its options is one setting."""
    canonical = strategy.canonical()
    form = canonical.model_dump(mode="json", exclude={"gradients", "weights", "overrides"})
    gradients, weights = canonical.gradients, canonical.weights
    between = gradients.between_nodes
    return {
        **form,
        "overrides": "; ".join(override_words(unit) for unit in canonical.overrides) or None,
        "weights": codec_text(weights.codec) if weights else "none",
        "weights_minimum_size": weights and weights.minimum_size,
        **gradients.model_dump(mode="json"),
        "codec": codec_text(gradients.codec),
        "between_nodes": between and codec_text(between),
    }


def _word(value: Any) -> str:
    if value is None:
        return "unset"
    return str(value).lower() if isinstance(value, bool) else str(value)


def describe(
    history: History, agent: Agent, memory_limit_bytes: int, facts: Sequence[str] = ()
) -> str:
    """Return the evidence of all that was measured, one fact per line.

    Args:
        facts: on the machine and the data.
    """
    tried, rows = history.tried, history.measured
    shown = [rows[key] for key in sorted(rows) if key in tried or rows[key].trained]
    ran = sum(decision.decision != "none" for decision in history.own_rounds)
    return "\n".join(
        [
            _workload(history.workload),
            *facts,
            "Step ratios are of interleaved steps on link and ranks of the search. Training runs "
            "may have had others: their figures are means over seeds, +- the standard deviation.",
            *(_strategy(row, history) for row in shown),
            f"Start: {history.reference.strategy.label()}.",
            f"Incumbent: {history.held.strategy.label()} [{history.held.source}].",
            *map(_round, history.own_rounds),
            f"Limits: validation perplexity at most {1 + agent.quality_tolerance:.3f} times the "
            f"start's; peak memory at most {memory_limit_bytes / 1e6:.0f} MB per rank.",
            f"Trials left: {max(0, agent.budget - ran)} of {agent.budget}.",
        ]
    )


def machine_facts(hardware: Hardware) -> str:
    """Return what the machine is, and how fast its ranks send on each link."""
    facts = [
        hardware.cpu,
        hardware.cores and f"{hardware.cores} cores",
        hardware.numa_nodes and f"NUMA nodes: {hardware.numa_nodes}",
        hardware.caches_kb
        and "caches " + ", ".join(f"{name} {n} kB" for name, n in hardware.caches_kb.items()),
        hardware.memory_gb and f"{hardware.memory_gb:.1f} GB of memory",
        hardware.copy_gb_per_s and f"a rank copies {hardware.copy_gb_per_s:.1f} GB/s",
        *(", ".join(fact for fact in _gpu_facts(gpu) if fact) for gpu in hardware.gpus or []),
        *(
            f"a rank sends {network.mb_per_s:.0f} MB/s after {network.latency_us:.0f} us "
            f"({network.world_size} ranks, {network.link})"
            for network in hardware.connections or []
        ),
    ]
    return f"Machine: {'; '.join(fact for fact in facts if fact)}."


def _gpu_facts(gpu: Gpu) -> tuple[str | None, ...]:
    peak = None if gpu.peak_tflops is None else f"peak {gpu.peak_tflops:.0f} TFLOP/s"
    return gpu.name, f"{gpu.memory_gb:.1f} GB of memory", peak, gpu.link


def data_facts(statistics: Mapping[str, Any]) -> str:
    """Return size and shape of the corpus, by the statistics that tokenize wrote."""
    train, length = statistics["train"], statistics["length"]
    return (
        f"Data: {train['tokens']} training tokens of {train['documents']} documents, "
        f"{train['bytes_per_token']:.2f} bytes per token, vocabulary {statistics['vocabulary']}; "
        f"tokens per document p50 {length['p50']:.0f}, p90 {length['p90']:.0f}, "
        f"p99 {length['p99']:.0f}; padding {100 * statistics['pad_ratio']:.0f} %; entropy of "
        f"token frequencies {statistics['entropy_bits']:.2f} bits."
    )


def predicted(prediction: Prediction) -> str:
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


def _workload(load: Workload) -> str:
    # without the name of the model, which others may have written: a judge would read it
    return (
        f"Workload: {load.parameters} parameters on {load.world_size} ranks; "
        f"{load.batch_size} sequences of {load.sequence_length} tokens per rank and "
        f"micro-batch; {load.accumulation} micro-batches per step; link {load.link}."
    )


def _strategy(row: Measured, history: History) -> str:
    facts = []
    failure, step = row.failure(history.workload), row.step(history.workload)
    if failure:
        facts.append(f"no figures, the trial ended with outcome {failure.outcome}")
    if step:
        facts.append(
            f"step {step.ratio:.3f} times the start's (95 % {step.low:.3f} to {step.high:.3f}, "
            f"{step.source})"
        )
    if row.trained:
        facts.append(_trained(row, history.reference))
    return f"Strategy {row.strategy.label()} [{row.source}]: {'; '.join(facts)}."


def _trained(row: Measured, start: Measured) -> str:
    mean = row.mean
    return (
        f"trained with {len(row.trained)} of {len(start.trained)} seeds: traced step "
        f"{mean('profiled_step_ms'):.2f} ms with compute {mean('compute_ms'):.2f} ms, "
        f"communication {mean('comm_ms_per_step'):.2f} ms, exposed communication "
        f"{mean('exposed_comm_ms'):.2f} ms, idle {mean('idle_ms'):.2f} ms; "
        f"encoding {mean('encode_ms'):.2f} ms, decoding {mean('decode_ms'):.2f} ms; "
        f"gradients {_moved(row, 'gradients')}; weights {_moved(row, 'weights')}; "
        f"{100 * mean('flops_share'):.1f} % of the fastest matrix product's operations per second; "
        f"validation perplexity {mean('val_ppl'):.2f}{_spread(row, 'val_ppl')}, "
        f"{perplexity_ratio(row, start):.3f} times the start's; "
        f"peak memory {mean('memory_peak_bytes') / 1e6:.0f} MB per rank"
    )


def _moved(row: Measured, kind: str) -> str:
    raw, wire = (row.mean(f"{kind}_bytes_{what}") / 1e6 for what in ("raw", "wire"))
    return f"{raw:.3f} MB asked, {wire:.3f} MB moved"


def _spread(row: Measured, field: str) -> str:
    values = [getattr(run, field) for run in row.trained]
    return f" +- {stdev(values):.2f}" if len(values) > 1 else ""


def _round(decision: Decision) -> str:
    raced = ", ".join(arm.label for arm in decision.compared) or "nothing"
    return f"Round {decision.round}: raced {raced}; decision {decision.decision}."
