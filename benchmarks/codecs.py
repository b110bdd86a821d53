"""One table of all codecs: bytes, errors on real gradients, speed, and earlier figures.

    python -m benchmarks.codecs [SPEC ...] [--codecs MODULE ...] [--data FOLDER] [--work FOLDER]
                                [--repetitions R]

Without SPEC all codecs of codecs.yaml. The tables go to stdout, all figures to codecs.json in the
work folder. `aggregation.py`, `speed.py` and `gradients.py` describe what is measured.
"""

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from benchmarks.aggregation import (
    WORLD_SIZES,
    Errors,
    codec_errors,
    phase_cumulative,
    phase_errors,
    phase_one_shot,
)
from benchmarks.cases import Case, cases
from benchmarks.common import (
    DATA,
    WORK,
    arguments,
    on_ranks,
    print_table,
    write_results,
)
from benchmarks.gradients import Gradients, prepare, statistics
from benchmarks.speed import Speed, codec_speed, phase_speed
from shardlab.codecs.base import Codec
from shardlab.codecs.multi_phase import MultiPhaseMethod
from shardlab.config.codec_table import load_codecs
from shardlab.core.progress import say, stopwatch
from shardlab.report.tables import ABSENT, figure, fixed, scientific

_LARGEST_DEVIATION = 0.1
_SENDERS = 4


def main() -> None:
    args = arguments(
        __doc__,
        ("specs", "default: all of codecs.yaml"),
        codecs=([], "modules that register codecs"),
        repetitions=(8, "of timing; the fastest counts"),
        data=DATA,
        work=WORK,
    )
    load_codecs(args.codecs, "--codecs")
    chosen = cases(args.specs)
    gradients = Gradients(prepare(args.data, args.work))
    known = on_ranks(1, lambda _: statistics(gradients), threads=2)[0]
    errors, speeds = {}, {}
    for case in chosen:
        seconds = stopwatch()
        errors[case.spec] = _errors(case, gradients)
        speeds[case.spec] = _speed(case, gradients, args.repetitions)
        say(f"benchmarks: {case.spec} in {seconds():.0f} s")
        write_results(
            args.work / "codecs.json",
            gradients=known,
            errors={spec: asdict(value) for spec, value in errors.items()},
            speed={spec: asdict(value) for spec, value in speeds.items()},
        )
    print(", ".join(f"{name} {value:.3g}" for name, value in known.items()), end="\n\n")
    _print_figures(chosen, errors, speeds)
    _print_speeds(chosen, speeds)
    _print_deviations(chosen, errors, speeds)


def _errors(case: Case, gradients: Gradients) -> Errors:
    if not case.multi_phase:
        work = partial(_codec_errors, case, gradients)
        return Errors(**on_ranks(1, lambda _: asdict(work()), threads=2)[0])
    one_shot = [on_ranks(size, partial(_one_shot, case, gradients))[0] for size in WORLD_SIZES]
    plain, feedback = (
        on_ranks(_SENDERS, partial(_cumulative, case, gradients, feedback))[0]
        for feedback in (False, True)
    )
    return phase_errors(one_shot, plain, feedback)


def _codec_errors(case: Case, gradients: Gradients) -> Errors:
    codec = case.method()
    assert isinstance(codec, Codec)
    return codec_errors(codec, gradients, case.magnitude)


def _one_shot(case: Case, gradients: Gradients, group: Any) -> float:
    method = case.method()
    assert isinstance(method, MultiPhaseMethod)
    return phase_one_shot(method, gradients, group)


def _cumulative(case: Case, gradients: Gradients, feedback: bool, group: Any) -> Sequence[float]:
    method = case.method()
    assert isinstance(method, MultiPhaseMethod)
    return phase_cumulative(method, gradients, feedback, group)


def _speed(case: Case, gradients: Gradients, repetitions: int) -> Speed:
    def work(_: Any) -> dict[str, Any]:
        method, x = case.method(), gradients.large
        if isinstance(method, Codec):
            return asdict(codec_speed(method, x, repetitions))
        return asdict(phase_speed(method, x, gradients.large_unit, repetitions))

    return Speed(**on_ranks(1, work)[0])


def _print_figures(chosen: list[Case], errors: dict[str, Errors], speeds: dict[str, Speed]) -> None:
    headings = [
        "codec",
        "bits/element",
        *(f"error, W={size}" for size in WORLD_SIZES),
        "24 steps",
        "with feedback",
        "encode, GB/s",
        "decode, GB/s",
        "extra collectives",
    ]
    rows = []
    for case in chosen:
        found = errors[case.spec]
        pairs = [(new, old) for _, new, old in _figures(case, found, speeds[case.spec])]
        cells = [_cell(new, old) for new, old in pairs]
        rows.append([case.spec, *cells, fixed(found.extra_collectives, 1)])
    title = "In brackets: the earlier figure, of other gradients and another implementation."
    print_table(title, headings, rows)


def _figures(
    case: Case, errors: Errors, speed: Speed
) -> list[tuple[str, float | None, float | None]]:
    """Return name, figure of this run and earlier figure."""
    earlier = case.error or (None,) * len(WORLD_SIZES)
    plain, feedback = case.cumulative or (None, None)
    return [
        ("bits per element", errors.bits, case.bits),
        *(
            (f"error at W={size}", new, old)
            for size, new, old in zip(WORLD_SIZES, errors.one_shot, earlier, strict=True)
        ),
        ("error after 24 steps", errors.cumulative, plain),
        ("the same with feedback", errors.cumulative_feedback, feedback),
        ("encode, GB/s", speed.encode, case.encode),
        ("decode, GB/s", speed.decode, case.decode),
    ]


def _cell(new: float | None, old: float | None) -> str:
    return _number(new) if old is None else f"{_number(new)} ({_number(old)})"


def _number(value: float | None) -> str:
    if value is None:
        return ABSENT
    return scientific(value) if 0 < abs(value) < 1e-4 or abs(value) >= 1e5 else figure(value)


def _print_speeds(chosen: list[Case], speeds: dict[str, Speed]) -> None:
    """Print shares of memcpy's rate, and the gain by a second thread."""
    shown = [case.spec for case in chosen if speeds[case.spec].shares]
    if not shown:
        return
    calls = [call for call in speeds[shown[0]].shares if call != "memcpy"]
    headings = ["codec", *calls, *(f"{call}, 2 threads" for call in calls)]
    rows = [
        [
            spec,
            *(fixed(speeds[spec].shares[call], 2) for call in calls),
            *(f"x {fixed(speeds[spec].second_thread[call], 2)}" for call in calls),
        ]
        for spec in shown
    ]
    title = "Bytes touched per second as a share of memcpy's, one thread; gain by a second one."
    print_table(title, headings, rows)


def _print_deviations(
    chosen: list[Case], errors: dict[str, Errors], speeds: dict[str, Speed]
) -> None:
    """Print figures that differ by more than a tenth from the earlier ones."""
    rows = []
    for case in chosen:
        for name, new, old in _figures(case, errors[case.spec], speeds[case.spec]):
            if new is None or old is None or abs(new / old - 1) <= _LARGEST_DEVIATION:
                continue
            change = f"{fixed(100 * (new / old - 1), 0)} %"
            rows.append([case.spec, name, _number(new), _number(old), change])
    headings = ["codec", "figure", "this run", "earlier", "deviation"]
    if rows:
        print_table("More than 10 % off the earlier figure.", headings, rows)


if __name__ == "__main__":
    main()
