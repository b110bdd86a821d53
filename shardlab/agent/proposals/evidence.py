"""Evidence for a judge: facts in words, by one template with fixed units.

Judges favour what is longer, praised or listed first. So there is no adjective, no advice and no
ranking here, and strategies come in the order of their hashes.
"""

from statistics import stdev

from shardlab.agent.records.history import History, Measured, Workload
from shardlab.experiment.schema import Agent
from shardlab.memory.step import parameter_bytes
from shardlab.strategy.strategy import Strategy


def describe(history: History, agent: Agent, memory_limit_bytes: int) -> str:
    """Return the evidence of all trials so far, one fact per line."""
    tried = [history.measured[key] for key in sorted(history.measured)]
    return "\n".join(
        [
            _workload(history.workload),
            "Times are per step; each figure is the mean over seeds, and +- is the standard "
            "deviation over seeds.",
            *(_strategy(entry) for entry in tried),
            f"Incumbent: {history.incumbent.strategy.label()} [{history.incumbent.source}].",
            *_rounds(history),
            f"Limits: validation perplexity at most {1 + agent.quality_tolerance:.3f} times that "
            f"of {history.measured[history.start].strategy.label()}; peak memory at most "
            f"{memory_limit_bytes / 1e6:.0f} MB per rank.",
            f"Trials left: {max(0, agent.budget - trials(history))} of {agent.budget}.",
        ]
    )


def estimate_peak(strategy: Strategy, incumbent: Measured, workload: Workload) -> int:
    """Estimate the peak memory of a rank under `strategy`, in bytes.

    The part of the incumbent's measured peak beyond its closed form (activations, the interpreter,
    short-lived buffers) is assumed to be the same.
    """

    def in_closed_form(each: Strategy) -> int:
        return parameter_bytes(
            each,
            parameters=workload.parameters,
            world_size=workload.world_size,
            accumulation=workload.accumulation,
        )

    measured = max(each.memory_peak_bytes for each in incumbent.measurements)
    rest = max(0, measured - in_closed_form(incumbent.strategy))
    return rest + in_closed_form(strategy)


def trials(history: History) -> int:
    """Return the number of rounds that ran a trial."""
    return sum(each.trial.outcome != "none" for each in history.rounds)


def _workload(load: Workload) -> str:
    return (
        f"Workload: model {load.model} with {load.parameters} parameters on {load.world_size} "
        f"ranks; {load.batch_size} sequences of {load.sequence_length} tokens per rank and "
        f"micro-batch; {load.accumulation} micro-batches per step; link {load.link}."
    )


def _strategy(entry: Measured) -> str:
    head = f"Strategy {entry.strategy.label()} [{entry.source}]: "
    if entry.outcome != "ok":
        return f"{head}no figures, the trial ended with outcome {entry.outcome}."
    mean = entry.mean
    return (
        f"{head}{len(entry.measurements)} seeds; "
        f"step {mean('step_ms_p50'):.2f} ms{_spread(entry, 'step_ms_p50')}; "
        f"traced step {mean('profiled_step_ms'):.2f} ms with compute {mean('compute_ms'):.2f} ms, "
        f"communication {mean('comm_ms_per_step'):.2f} ms, "
        f"exposed communication {mean('exposed_comm_ms'):.2f} ms, idle {mean('idle_ms'):.2f} ms; "
        f"encoding {mean('encode_ms'):.2f} ms, decoding {mean('decode_ms'):.2f} ms; "
        f"gradients {_moved(entry, 'gradients')}; weights {_moved(entry, 'weights')}; "
        f"validation perplexity {mean('val_ppl'):.2f}{_spread(entry, 'val_ppl')}; "
        f"peak memory {mean('memory_peak_bytes') / 1e6:.0f} MB per rank."
    )


def _moved(entry: Measured, kind: str) -> str:
    raw, wire = (entry.mean(f"{kind}_bytes_{what}") / 1e6 for what in ("raw", "wire"))
    return f"{raw:.3f} MB asked, {wire:.3f} MB moved"


def _spread(entry: Measured, field: str) -> str:
    values = [getattr(each, field) for each in entry.measurements]
    return f" +- {stdev(values):.2f}" if len(values) > 1 else ""


def _rounds(history: History) -> list[str]:
    return [
        f"Round {each.round}: tried {each.trial.label or 'nothing'}; decision {each.decision}."
        for each in history.rounds
    ]
