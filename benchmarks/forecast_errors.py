"""Errors of the forecast on held-out runs of many links, ranks, engines, codecs and models.

    python -m benchmarks.forecast_errors [--models NAMES] [--repetitions N] [--data FOLDER]
        [--work FOLDER] [--out FOLDER]

For each model operations are calibrated, then timings take turns; the forecast is fitted on plain
engines on one rank, on two, and on the fastest link, and predicts the rest.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from benchmarks.common import DATA, WORK, arguments, publish, text_table
from shardlab.core.numbers import fixed
from shardlab.models.settings import Model
from shardlab.predict.calibrate import calibrate
from shardlab.predict.codec_costs import codecs_of
from shardlab.predict.results import Check, predict, summarize
from shardlab.predict.settings import Forecast, Space
from shardlab.results.calibration_record import memory_operations
from shardlab.results.files import read_results
from shardlab.results.result import only
from shardlab.results.settings import Timing
from shardlab.results.timing_parts import parts
from shardlab.results.timing_result import TimingResult
from shardlab.strategy.document import parse_strategy
from shardlab.train.interleaved import time_strategies
from shardlab.train.plans import TimingPlan
from shardlab.train.settings import Train

_FITTED = ("ddp", "fsdp2", "manual", "slide")
_RUNS = (
    *_FITTED,
    *("fsdp1", "ddp-bf16", "ddp-int8", "ddp-int4", "fsdp2-int8", "fsdp2-topk", "manual-int8"),
    *("manual-fp8", "fsdp2-int8-w8", "slide-int4"),
)
_RARE = ("ddp", "ddp-every8", "ddp-every8-int4", "ddp-every32-int4")
_NODES = ("hsdp", "hsdp-int8", "hsdp-every8-int4")
_CODECS: dict[str, dict[str, object]] = {
    "bf16": {"codec": "bf16"},
    "int8": {"codec": "int8:group=128"},
    "int4": {"codec": "int4:group=128", "error_feedback": True},
    "topk": {"codec": "topk:density=0.05", "error_feedback": True},
    "fp8": {"codec": "fp8:format=e4m3"},
}
_WHOLE = "two-ranks"
_LINKS = ("1gbit", "500mbit", "300mbit", "200mbit", "100mbit")
_FORECAST = Forecast(
    timings=("one-rank", _WHOLE, "1gbit"), runs=_FITTED, ranks=(8,), links=("ethernet-10g",)
)
_ERROR_GOAL, _WORST_GOAL, _INSIDE_GOAL = 0.08, 0.20, (0.90, 0.99)
_TRAIN = Train(batch_size=8, sequence_length=64, timeout_s=300)


def timings(repetitions: int) -> Timing:
    """Return the timing of all: the plain engines on one rank, and all runs elsewhere."""

    def part(
        world_size: int, rate: str | None = None, runs: Sequence[str] = _RUNS, **tiers: int
    ) -> object:
        link = None if rate is None else {"rate": rate, **tiers}
        return {"runs": runs, "world_size": world_size, "link": link, "repetitions": repetitions}

    others = {
        "one-rank": part(1, runs=_FITTED),
        **{rate: part(2, rate) for rate in _LINKS},
        "four-ranks": part(4),
        **{f"four-ranks-{rate}": part(4, rate) for rate in ("300mbit", "100mbit")},
        **{f"rare-{rate}": part(2, rate, _RARE) for rate in ("300mbit", "100mbit")},
        **{
            f"nodes-{rate}": part(4, rate, _NODES, ranks_per_node=2)
            for rate in ("300mbit", "100mbit")
        },
    }
    return Timing.model_validate({"runs": _RUNS, "repetitions": repetitions, "interleaved": others})


def _document(run: str) -> dict[str, object]:
    """Return the strategy of a run by its name: ENGINE[-everyN][-CODEC][-w8]."""
    engine, *words = run.split("-")
    coded = [_CODECS[word] for word in words if word in _CODECS]
    document: dict[str, object] = {"engine": engine}
    if engine == "hsdp":
        document = {"sharding": "hybrid_shard", "replicas": 2}
    if words and words[0].startswith("every"):
        every = int(words[0].removeprefix("every"))
        return {**document, "sync": {"every": every, **(coded[0] if coded else {})}}
    if coded:
        between = {"between_nodes": coded[0]["codec"]}
        document["gradients"] = between if engine == "hsdp" else coded[0]
    if "w8" in words:
        document["weights"] = {"codec": "int8:group=128"}
    return document


def main() -> None:
    args = arguments(
        __doc__,
        models=(["tiny", "small"], "presets"),
        repetitions=(12, "of every timing"),
        data=DATA,
        work=WORK,
    )
    checks = {
        name: held_out(name, args.repetitions, args.data, args.work / f"forecast_{name}.jsonl")
        for name in args.models
    }
    both = [check for of_model in checks.values() for check in of_model]
    everything = {
        **checks,
        "all": both,
        "of these, rare exchanges": [check for check in both if "every" in check.run],
        "of these, two nodes of two ranks": [c for c in both if c.timing.startswith("nodes")],
    }
    rows = [[name, *_summary(of_model)] for name, of_model in everything.items()]
    headings = ["model", "held out", "median, %", "worst, %", "of", "inside, %", "interval, ± %"]
    table = text_table("Predicted over measured step, minus 1", headings, rows)
    publish(__doc__, args.out / "forecast_errors.md", table, _goals(everything))


def held_out(model: str, repetitions: int, data: Path, output: Path) -> list[Check]:
    """Calibrate, time and predict; return what was predicted of held-out runs."""
    runs = dict.fromkeys((*_RUNS, *_RARE, *_NODES))
    named = {run: parse_strategy(_document(run)) for run in runs}
    canonical = [each.canonical() for each in named.values()]
    memory = dict.fromkeys(op for strategy in canonical for op in memory_operations(strategy))
    calibration = calibrate(
        [2],
        codecs_of(canonical, Space(gradients=(), weights=())),
        _TRAIN.threads,
        _TRAIN.timeout_s,
        memory=[*memory],
    )
    assert calibration is not None, "no other command starts these ranks"
    plans = [
        TimingPlan(name, timing, named, _TRAIN, Model.model_validate({"preset": model}), data)
        for name, timing in parts(timings(repetitions), _WHOLE).items()
    ]
    output.parent.mkdir(parents=True, exist_ok=True)
    time_strategies(plans, output)
    timed = only(read_results(output, "run the benchmark again"), TimingResult)
    predicted = predict(calibration, timed, _FORECAST)
    return [check for check in predicted.checks if check.held_out]


def _goals(everything: Mapping[str, Sequence[Check]]) -> str:
    """Return the goals, and which of the rows miss one."""
    low, high = _INSIDE_GOAL
    goals = (
        f"Goals: a median of at most {100 * _ERROR_GOAL:.0f} %, none beyond "
        f"{100 * _WORST_GOAL:.0f} %, and {100 * low:.0f} to {100 * high:.0f} % inside the interval."
    )
    missed = []
    for name, checks in everything.items():
        summary = summarize(checks)
        assert summary is not None, "all of them are held out"
        worst = max(abs(check.error) for check in checks)
        reached = {
            "the median": summary.median <= _ERROR_GOAL,
            "the worst": worst <= _WORST_GOAL,
            f"{100 * summary.within:.0f} % inside": low <= summary.within <= high,
        }
        if words := [what for what, good in reached.items() if not good]:
            missed.append(f"{name} ({', '.join(words)})")
    return f"{goals} {'Missed by: ' + '; '.join(missed) if missed else 'All are reached'}."


def _summary(checks: Sequence[Check]) -> list[str]:
    summary = summarize(checks)
    assert summary is not None, "all of them are held out"
    worst = max(checks, key=lambda check: abs(check.error))
    half = median(check.high_ms / check.predicted_ms - 1 for check in checks)
    return [
        str(len(checks)),
        fixed(100 * summary.median, 1),
        fixed(100 * worst.error, 1),
        f"{worst.run} in {worst.timing}",
        fixed(100 * summary.within, 0),
        fixed(100 * half, 0),
    ]


if __name__ == "__main__":
    main()
