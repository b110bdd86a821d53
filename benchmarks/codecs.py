"""One table of all codecs: bytes, errors on real gradients, speed, beside earlier figures.

    python -m benchmarks.codecs [SPEC ...] [--codecs MODULE ...] [--data FOLDER] [--work FOLDER]
                                [--repetitions R]

Without SPEC all codecs of codecs.yaml. The tables go to stdout, all figures to codecs.json in the
work folder. What is measured how: `aggregation.py`, `speed.py`, `gradients.py` beside this file.
"""

import argparse
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
from benchmarks.children import on_ranks
from benchmarks.gradients import Gradients, add_arguments, prepare, statistics
from benchmarks.speed import Speed, codec_speed, phase_speed
from shardlab.codecs.base import Codec
from shardlab.codecs.multi_phase import MultiPhaseMethod
from shardlab.core.files import write_json
from shardlab.core.progress import say, stopwatch
from shardlab.environment.host import describe_host, git_revision
from shardlab.experiment.codec_modules import load_codecs
from shardlab.report.numbers import ABSENT, figure, fixed, scientific
from shardlab.report.tables import text_table

_LARGEST_DEVIATION = 0.1
_SENDERS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("specs", nargs="*", metavar="SPEC", help="default: all of codecs.yaml")
    parser.add_argument(
        "--codecs", nargs="*", default=[], metavar="MODULE", help="modules that register codecs"
    )
    parser.add_argument("--repetitions", type=int, default=8, help="of timing; the fastest counts")
    add_arguments(parser)
    args = parser.parse_args()
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
        result = {
            "host": describe_host(),
            "revision": git_revision(),
            "gradients": known,
            "errors": {spec: asdict(value) for spec, value in errors.items()},
            "speed": {spec: asdict(value) for spec, value in speeds.items()},
        }
        write_json(args.work / "codecs.json", result)
    print(", ".join(f"{name} {value:.3g}" for name, value in known.items()), end="\n\n")
    print(_main_table(chosen, errors, speeds))
    print(_speed_table(chosen, speeds))
    print(_deviations(chosen, errors, speeds))


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


def _main_table(chosen: list[Case], errors: dict[str, Errors], speeds: dict[str, Speed]) -> str:
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
    return f"{text_table(title, headings, rows).markdown()}\n{title}\n"


def _figures(
    case: Case, errors: Errors, speed: Speed
) -> list[tuple[str, float | None, float | None]]:
    """Name, figure of this run, earlier figure."""
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


def _speed_table(chosen: list[Case], speeds: dict[str, Speed]) -> str:
    """Shares of memcpy's rate, and what a second thread adds."""
    shown = [case.spec for case in chosen if speeds[case.spec].shares]
    if not shown:
        return ""
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
    return f"{text_table(title, headings, rows).markdown()}\n{title}\n"


def _deviations(chosen: list[Case], errors: dict[str, Errors], speeds: dict[str, Speed]) -> str:
    """Every figure that is more than a tenth off the earlier one."""
    rows = []
    for case in chosen:
        for name, new, old in _figures(case, errors[case.spec], speeds[case.spec]):
            if new is None or old is None or abs(new / old - 1) <= _LARGEST_DEVIATION:
                continue
            change = f"{fixed(100 * (new / old - 1), 0)} %"
            rows.append([case.spec, name, _number(new), _number(old), change])
    if not rows:
        return ""
    title = "More than 10 % off the earlier figure."
    table = text_table(title, ["codec", "figure", "this run", "earlier", "deviation"], rows)
    return f"{table.markdown()}\n{title}\n"


if __name__ == "__main__":
    main()
