"""Evidence for a judge: facts in words, by one template with fixed units.

Judges favour what is longer, praised or listed first. So there is no adjective, no advice and no
ranking here, and strategies come in the order of their hashes.
"""

from collections.abc import Mapping, Sequence
from statistics import stdev
from typing import Any

from shardlab.config.hardware import Gpu, Hardware
from shardlab.config.search import Agent
from shardlab.search.history import History, Measured, Workload, perplexity_ratio
from shardlab.search.rounds import Prediction, Round


def describe(
    history: History, agent: Agent, memory_limit_bytes: int, facts: Sequence[str] = ()
) -> str:
    """Return the evidence of all that was measured, one fact per line.

    Args:
        facts: on the machine and the data.
    """
    tried = [history.measured[key] for key in sorted(history.measured)]
    ran = sum(each.decision != "none" for each in history.own_rounds)
    return "\n".join(
        [
            _workload(history.workload),
            *facts,
            "Step ratios are of interleaved steps on link and ranks of the search. Training runs "
            "may have had others: their figures are means over seeds, +- the standard deviation.",
            *(_strategy(entry, history) for entry in tried),
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
            f"a rank sends {each.mb_per_s:.0f} MB/s after {each.latency_us:.0f} us "
            f"({each.world_size} ranks, {each.link})"
            for each in hardware.connections or []
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


def _strategy(entry: Measured, history: History) -> str:
    head = f"Strategy {entry.strategy.label()} [{entry.source}]: "
    facts = [_failure(entry)] if entry.outcome != "ok" else []
    if entry.steps:
        last = entry.steps[-1]
        facts.append(
            f"step {last.ratio:.3f} times the start's (95 % {last.low:.3f} to {last.high:.3f}, "
            f"{last.source})"
        )
    if entry.measurements:
        facts.append(_trained(entry, history.reference))
    return f"{head}{'; '.join(facts)}."


def _failure(entry: Measured) -> str:
    return f"no figures, the trial ended with outcome {entry.outcome}"


def _trained(entry: Measured, start: Measured) -> str:
    mean = entry.mean
    return (
        f"trained with {len(entry.measurements)} of {len(start.measurements)} seeds: traced step "
        f"{mean('profiled_step_ms'):.2f} ms with compute {mean('compute_ms'):.2f} ms, "
        f"communication {mean('comm_ms_per_step'):.2f} ms, exposed communication "
        f"{mean('exposed_comm_ms'):.2f} ms, idle {mean('idle_ms'):.2f} ms; "
        f"encoding {mean('encode_ms'):.2f} ms, decoding {mean('decode_ms'):.2f} ms; "
        f"gradients {_moved(entry, 'gradients')}; weights {_moved(entry, 'weights')}; "
        f"{100 * mean('flops_share'):.1f} % of the fastest matrix product's operations per second; "
        f"validation perplexity {mean('val_ppl'):.2f}{_spread(entry, 'val_ppl')}, "
        f"{perplexity_ratio(entry, start):.3f} times the start's; "
        f"peak memory {mean('memory_peak_bytes') / 1e6:.0f} MB per rank"
    )


def _moved(entry: Measured, kind: str) -> str:
    raw, wire = (entry.mean(f"{kind}_bytes_{what}") / 1e6 for what in ("raw", "wire"))
    return f"{raw:.3f} MB asked, {wire:.3f} MB moved"


def _spread(entry: Measured, field: str) -> str:
    values = [getattr(each, field) for each in entry.measurements]
    return f" +- {stdev(values):.2f}" if len(values) > 1 else ""


def _round(each: Round) -> str:
    raced = ", ".join(arm.label for arm in each.compared) or "nothing"
    return f"Round {each.round}: raced {raced}; decision {each.decision}."
