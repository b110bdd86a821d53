"""Files of results: one reader and one writer for all kinds."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Discriminator, Tag

from shardlab.core.document import validate
from shardlab.core.errors import UserError
from shardlab.core.files import read_json, read_json_lines, write_json_lines
from shardlab.results.result import SCHEMA_VERSION, Failure, Result, only
from shardlab.results.settings import Timing
from shardlab.results.timing_parts import parts
from shardlab.results.timing_result import NO_COMMUNICATION, TimingResult
from shardlab.results.train_result import TrainResult
from shardlab.results.tune_result import TuneResult

_BODIES: dict[str, type[Result]] = {
    "train": TrainResult,
    "timing": TimingResult,
    "race": TimingResult,
    "trial": TrainResult,
    "tune": TuneResult,
}


def _body(value: Any) -> Any:
    if isinstance(value, Result):
        return type(value).__name__
    if _failed(value):
        return "Failure"
    body = _BODIES.get(value.get("kind", "")) if isinstance(value, dict) else None
    return body and body.__name__


AnyResult = Annotated[
    Annotated[TrainResult, Tag("TrainResult")]
    | Annotated[TimingResult, Tag("TimingResult")]
    | Annotated[TuneResult, Tag("TuneResult")]
    | Annotated[Failure, Tag("Failure")],
    Discriminator(_body),
]
"""Result of any kind, for documents that hold results."""


def read_results(path: str | Path, fix: str) -> list[AnyResult]:
    """Read a file of results, of any kinds.

    Args:
        fix: what the user should do when the file is missing, damaged or of another version.

    Raises:
        UserError: the file is missing or of another version, or a line is not a result.
    """
    lines = read_json_lines(path, fix)
    try:
        return [parse_result(line, f"{path}:{number}") for number, line in enumerate(lines, 1)]
    except UserError as error:
        raise UserError(f"{error}: {fix}") from None


def parse_result(line: Any, where: str) -> AnyResult:
    """Return the result of a JSON value.

    Raises:
        UserError: it is not a result, or of another version.
    """
    if not isinstance(line, dict):
        raise UserError(f"{where}: not a result")
    if line.get("schema_version") != SCHEMA_VERSION:
        raise UserError(f"{where}: written by another version of shardlab")
    kind = line.get("kind")
    if kind not in _BODIES:
        raise UserError(f"{where}.kind: a result is one of {', '.join(_BODIES)} (found {kind!r})")
    body: Any = Failure if _failed(line) else _BODIES[kind]
    result: AnyResult = validate(body, line, where)
    return result


def write_results(path: str | Path, results: Sequence[Result]) -> None:
    """Write JSON lines that `read_results` reads."""
    write_json_lines(path, [result.model_dump(mode="json") for result in results])


def read_failure(path: str | Path, fix: str) -> Failure | None:
    """Return the failure that a stage wrote in place of figures; None where it wrote figures.

    Args:
        fix: what the user should do when the file is missing or damaged.

    Raises:
        UserError: the file is missing or damaged.
    """
    return Failure.from_file(path, fix) if _failed(read_json(path, fix)) else None


def _failed(value: Any) -> bool:
    return isinstance(value, dict) and "outcome" in value


def read_timing(folder: Path, name: str, timing: Timing) -> list[TimingResult | Failure]:
    """Read the runs of a timing and of the timings interleaved with it, in their order, and then
    the failures.

    Args:
        folder: folder that the timing stage writes to.
        timing: the timing by the parameters.

    Raises:
        UserError: the file is missing, or holds the runs of another timing.
    """
    path, fix = folder / f"{name}.jsonl", f"run shardlab timing {name}"
    results = read_results(path, fix)
    runs, failures = only(results, TimingResult), only(results, Failure)
    failed = {(failure.timing, failure.run) for failure in failures}
    expected = [
        (part, run)
        for part, runs_of_part in parts(timing, name).items()
        for run in (*runs_of_part.runs, NO_COMMUNICATION)
    ]
    timed = [run for run in expected if run not in failed]
    if [(run.timing, run.run) for run in runs] != timed or not failed <= {*expected}:
        raise UserError(f"{path}: has other runs than timings.{name}: {fix}")
    return [*runs, *failures]


def read_timings(folder: Path, timings: Mapping[str, Timing]) -> list[TimingResult | Failure]:
    """Read all timings with `read_timing`, sorted by name, since their order in the parameters has
    no meaning."""
    return [
        result for name in sorted(timings) for result in read_timing(folder, name, timings[name])
    ]
