"""Search without an experiment of one's own: its parameters, its folder, and its result as text.

The folder is an experiment like those of `make run PARAMS=FILE`: its `params.yaml` is derived from
that of the tree, and the files of the pipeline are links. The matrix is the start, whose training
runs are the reference of quality, and where there is a link those runs of the tree that only
compress its gradients: what they lose then is known of every engine. Two short timings of all
engines, on loopback and on the link of the search, are what the forecast is fitted on.
"""

import os
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_args

import yaml

from shardlab.config.codec_table import codec_text
from shardlab.config.engine_traits import ENGINES
from shardlab.config.experiment import Params
from shardlab.config.machine import Link
from shardlab.config.model_and_data import Model
from shardlab.config.parameters import Parameters
from shardlab.config.strategy import CanonicalStrategy, Strategy, parse_strategy
from shardlab.config.timing_record import TimedRun
from shardlab.core.document import Document, validate
from shardlab.core.errors import UserError, nearest
from shardlab.core.files import write_text
from shardlab.search.history import History
from shardlab.search.records import Measured

_REPETITIONS = {"loopback": 20, "link": 10}
_PIPELINE = (
    *("Snakefile", "csrc", "profiles", "shardlab", "stages", "user_codecs", "workflow"),
    ".shardlab.lock",  # two experiments at once would disturb each other's timings
)
_PATHS = ("data", "inputs", "model", "tokenize")
"""sections whose values may be paths"""
_HEADINGS = ("step, ms", "of the start's step", "perplexity", "predicted", "from", "  strategy")


class Request(NamedTuple):
    """Request of the command line."""

    link: Link | None
    ranks: int
    rounds: int
    """at most"""
    model: str | None = None
    """a preset, or a folder with a config.json; None: the tree's model"""


def search_parameters(params: Parameters, request: Request) -> dict[str, Any]:
    """Return the parameters of a search as plain data.

    Raises:
        UserError: there is no such model, or the tree lacks a section.
    """
    tree = {name: _plain(params(name)) for name in Params.model_fields}
    agent, strategies = params("agent"), params("strategies")
    plain = {engine: parse_strategy({"engine": engine}) for engine in ENGINES}
    start = strategies[agent.start]
    same = [engine for engine, strategy in plain.items() if strategy.hash() == start.hash()]
    name = same[0] if same else "start"  # a name that no engine has
    # the rules try codecs of unknown quality last
    coded = {
        run: strategy
        for run, strategy in strategies.items()
        if request.link and run not in plain and _differs_in_codecs(strategy, start)
    }
    matrix: dict[str, Strategy] = {name: start, **coded}
    timed = {engine: strategy for engine, strategy in plain.items() if engine not in matrix}
    links = {"loopback": None} | ({"link": request.link} if request.link else {})
    timings = {
        timing: {
            "runs": [name, *timed, *(coded if timing == "loopback" else ())],
            "world_size": request.ranks,
            "link": _plain(link),
            "repetitions": _REPETITIONS[timing],
        }
        for timing, link in links.items()
    }
    searched = {"start": name, "link": _plain(request.link), "world_size": None, "searches": {}}
    before = ["results/results.jsonl"]
    before += [f"results/rounds/{number}/history.json" for number in range(1, request.rounds)]
    return _absolute(
        {
            **tree,
            **{key: {} for key in ("policies", "quality") if key in tree},
            "model": _plain(_model(request.model, params("model"))),
            # quality does not depend on the link, so nothing trains on a slow one
            "train": tree["train"]
            | {"world_size": request.ranks, "link": None, "checkpoint": None},
            "strategies": _plain(matrix),
            "timed_strategies": _plain(timed),
            "baseline": name,
            "timings": timings,
            "comparison": "loopback",
            "forecast": tree["forecast"] | {"timings": [*timings], "runs": [*plain]},
            "agent": tree["agent"] | searched | {"budget": request.rounds, "budget_minutes": None},
            "rounds": {str(number): {"after": path} for number, path in enumerate(before, 1)},
        }
    )


def write_folder(folder: Path, tree: Mapping[str, Any]) -> None:
    """Write the parameters of a search, and links to the files of the pipeline in this folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in _PIPELINE:
        link = folder / name
        if not link.is_symlink():
            link.symlink_to(os.path.relpath(name, folder))
    text = yaml.safe_dump(dict(tree), sort_keys=False)
    path = folder / "params.yaml"
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        write_text(path, text)


def _plain(value: Any) -> Any:
    """Return plain data."""
    match value:
        case Strategy():
            return written(value.canonical())
        case Document():
            return value.model_dump(mode="json")
        case Mapping():
            return {key: _plain(item) for key, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
    return value


def _absolute(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters with absolute paths of what is there: the folder is another one."""

    def resolved(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: resolved(item) for key, item in value.items()}
        # what is no path is a word, or a name on the Hugging Face hub
        there = isinstance(value, str) and "/" in value and Path(value).exists()
        return str(Path(value).resolve()) if there else value

    return {key: resolved(value) if key in _PATHS else value for key, value in tree.items()}


def _differs_in_codecs(strategy: Strategy, start: Strategy) -> bool:
    """Return whether a strategy is the start with gradients compressed, and nothing else."""
    plain = start.canonical().gradients
    return (
        strategy.hash() != start.hash()
        and not strategy.gradients.plain()
        and strategy.model_copy(update={"gradients": plain}).hash()
        == start.model_copy(update={"gradients": plain}).hash()
    )


def _model(name: str | None, default: Model) -> Model:
    """Return the model of a name: a preset, or a folder with a config.json."""
    if name is None:
        return default
    presets = get_args(get_args(Model.model_fields["preset"].annotation)[0])
    if name in presets:
        return validate(Model, {"preset": name}, "--model")
    if not Path(name).exists():
        raise UserError(
            f"--model: {name!r} is no preset and no folder with a config.json; "
            f"{nearest(name, presets)}"
        )
    return Model(config=str(Path(name).resolve()))


def written(strategy: CanonicalStrategy) -> dict[str, Any]:
    """Return a strategy as a user writes it: engine, and the settings that its meaning needs."""
    document = strategy.model_dump(mode="json")
    gradients, weights = strategy.gradients, strategy.weights
    document["gradients"]["codec"] = codec_text(gradients.codec)
    if gradients.between_nodes is not None:
        document["gradients"]["between_nodes"] = codec_text(gradients.between_nodes)
    if weights is not None:
        document["weights"]["codec"] = codec_text(weights.codec)
    _shorten(document, document, strategy.hash())
    return {"engine": strategy.engine} | document


def _shorten(part: dict[str, Any], document: dict[str, Any], meaning: str) -> None:
    """Remove the settings of a part without which the document has the same hash."""
    for key in [*part]:
        value = part.pop(key)
        if _hash(document) == meaning:
            continue
        part[key] = value
        if isinstance(value, dict):
            _shorten(value, document, meaning)


def _hash(document: dict[str, Any]) -> str | None:
    try:
        return parse_strategy(document).hash()
    except UserError:
        return None


def result_text(history: History, timed: Iterable[TimedRun], name: str, reason: str) -> str:
    """Return the ranking of what was raced or timed, and the strategy that is held as an entry of
    params.yaml.

    Args:
        timed: runs of the timings.
        name: of the entry.
        reason: why there are no more rounds.
    """
    load, why = history.workload, "the fastest that was shown to be so, at a tolerated perplexity"
    if history.rounds and not history.rounds[-1].fits:
        why = "the start: nothing was found within the memory limit"
    entry = {"strategies": {name: written(history.held.strategy)}}
    return "\n".join(
        [
            f"{load.model}, {load.world_size} ranks, link {load.link}: {len(history.races)} races",
            f"ended: {reason}",
            "",
            ranking_text(history, timed),
            "",
            "Steps (95 % interval) and perplexities are over those of the start; predicted: ms.",
            f"* held: {why}",
            "",
            "# for params.yaml",
            yaml.safe_dump(entry, sort_keys=False).rstrip(),
        ]
    )


def ranking_text(history: History, timed: Iterable[TimedRun]) -> str:
    """Return a table of what was raced or timed on the link of the search, the shortest step first.

    Ratios to the start rank, since a machine is not equally fast in all races. What failed comes
    last.
    """
    # a race is named `round-1`, its source `round 1`
    runs = [(race.name.replace("-", " "), run) for race in history.races for run in race.runs]
    runs += [(f"timing {run.timing}", run) for run in timed]
    steps = {(source, run.strategy_hash): statistics.median(run.step_ms) for source, run in runs}
    compared = [arm for decision in history.rounds for arm in decision.compared]
    predicted = {arm.hash: arm.predicted_ms for arm in reversed(compared)}  # before the first race

    def order(row: Measured) -> tuple[bool, float, str]:
        step, failure = row.step(history.workload), row.failure(history.workload)
        return failure is not None, step.ratio if step else 0.0, row.hash

    rows = [_HEADINGS]
    for row in sorted(history.tried.values(), key=order):
        step, failure = row.step(history.workload), row.failure(history.workload)
        quality = history.quality(row.strategy)
        source = step.source if step else failure.source if failure else ""
        ratio = f"{step.ratio:.3f} ({step.low:.3f} to {step.high:.3f})" if step else ""
        cells = (
            _number(steps.get((source, row.hash)), 1),
            "1" if row.hash == history.start else failure.outcome if failure else ratio,
            _number(quality.ratio if quality and quality.sure else None, 3),
            _number(predicted.get(row.hash), 1),
            source,
            f"{'*' if row.hash == history.incumbent else ' '} {row.strategy.label()}",
        )
        rows.append(cells)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1]
    lines = ["  ".join([*map(str.rjust, row[:-1], widths), row[-1]]) for row in rows]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
