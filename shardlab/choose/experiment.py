"""Search with generated parameters (`shardlab search`), and its result as text.

The folder of the search is an experiment: its `params.yaml` is derived from the `params.yaml` of
the tree, and the files of the pipeline are links. The matrix holds the start, whose training runs
are the baseline of quality. With a link it also holds the runs of the tree that differ from the
start only in compressed gradients: their loss of quality is then known for every engine. The
forecast is fitted on two short timings of all engines, on loopback and on the link of the search.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic_core import to_jsonable_python

from shardlab.choose.history import History
from shardlab.core.document import validate
from shardlab.core.errors import UserError, nearest
from shardlab.core.link import Link
from shardlab.core.numbers import plural
from shardlab.models.settings import PRESETS, Model
from shardlab.results.table import StrategyResults
from shardlab.strategy.document import Strategy, parse_strategy
from shardlab.strategy.engine_traits import ENGINES

_REPETITIONS = {"loopback": 20, "link": 10}
_PATHS = ("data", "inputs", "model", "tokenize")
"""Sections with values that may be paths."""
_HEADINGS = ("of the start's step", "perplexity", "from", "  strategy")


def search_parameters(
    sections: Mapping[str, Any],
    link: Link | None,
    ranks: int,
    rounds: int,
    model: str | None = None,
) -> dict[str, Any]:
    """Return the parameters of a search as plain data.

    Args:
        sections: all parameters of the tree, by name.
        rounds: maximum number of rounds.
        model: preset, or folder with a config.json; None: the tree's model.

    Raises:
        UserError: the model does not exist.
    """
    tree = dict(sections)
    agent, strategies = tree["agent"], tree["strategies"]
    start = strategies[agent.start]
    plain = {engine: parse_strategy({"engine": engine}) for engine in ENGINES}
    equal = [engine for engine, strategy in plain.items() if strategy.hash() == start.hash()]
    name = equal[0] if equal else "start"  # a name that no engine has
    # trained, since the judge by rules tries codecs of unknown quality last
    compressed = {
        run: strategy
        for run, strategy in strategies.items()
        if link and run not in plain and _differs_in_codecs(strategy, start)
    }
    matrix: dict[str, Strategy] = {name: start, **compressed}
    timed = {engine: strategy for engine, strategy in plain.items() if engine not in matrix}
    links = {"loopback": None} | ({"link": link} if link else {})
    timings = {
        timing: {
            "runs": [name, *timed, *(compressed if timing == "loopback" else ())],
            "world_size": ranks,
            "link": emulated,
            "repetitions": _REPETITIONS[timing],
        }
        for timing, emulated in links.items()
    }
    inputs = ["results/results.jsonl"]
    inputs += [f"results/rounds/{number}/history.json" for number in range(1, rounds)]
    searched: dict[str, Any] = {
        "start": name,
        "link": link,
        "world_size": None,
        "searches": {},
        "budget": rounds,
    }
    tree |= {
        "model": _model(model, tree["model"]),
        # quality does not depend on the link, so training runs without the slow one
        "train": dict(tree["train"]) | {"world_size": ranks, "link": None, "checkpoint": None},
        "strategies": _written(matrix),
        "timed_strategies": _written(timed),
        "baseline": name,
        "timings": timings,
        "comparison": "loopback",
        "quality": {},
        "tune": None,
        "methods": {},
        "forecast": dict(tree["forecast"]) | {"timings": [*timings], "runs": [*plain]},
        "agent": dict(agent) | searched | {"budget_minutes": None},
        "rounds": {str(number): {"after": path} for number, path in enumerate(inputs, 1)},
    }
    plain_data = to_jsonable_python(tree)
    return {key: _absolute(value) if key in _PATHS else value for key, value in plain_data.items()}


def _absolute(value: Any) -> Any:
    """Return parameters with absolute paths, since the search runs in another folder."""
    if isinstance(value, dict):
        return {key: _absolute(item) for key, item in value.items()}
    # a value that is not a path is a word, or a name on the Hugging Face hub
    is_path = isinstance(value, str) and "/" in value and Path(value).exists()
    return str(Path(value).resolve()) if is_path else value


def _differs_in_codecs(strategy: Strategy, start: Strategy) -> bool:
    """Return whether a strategy is the start with compressed gradients."""
    plain = start.canonical().gradients
    return (
        strategy.hash() != start.hash()
        and not strategy.gradients.plain()
        and strategy.model_copy(update={"gradients": plain}).hash()
        == start.model_copy(update={"gradients": plain}).hash()
    )


def _model(name: str | None, default: Model) -> Model:
    """Return the model with a name: a preset, or a folder with a config.json."""
    if name is None:
        return default
    if name in PRESETS:
        return validate(Model, {"preset": name}, "--model")
    if not Path(name).exists():
        raise UserError(
            f"--model: {name!r} is neither a preset nor a folder with a config.json; "
            f"{nearest(name, PRESETS)}"
        )
    return Model(config=str(Path(name).resolve()))


def _written(strategies: Mapping[Any, Strategy]) -> dict[str, Any]:
    return {name: strategy.canonical().written() for name, strategy in strategies.items()}


def result_text(history: History, folder: Path, reason: str) -> str:
    """Return the ranking of the strategies that were raced or timed, and the incumbent as an entry
    of params.yaml.

    Args:
        folder: folder of the search, which gives the entry its name.
        reason: why there are no more rounds.
    """
    load, why = history.workload, "shown to be the fastest at a tolerated perplexity"
    if history.rounds and not history.rounds[-1].fits:
        why = "the start: no strategy was found within the memory limit"
    return "\n".join(
        [
            f"{load.model}, {load.world_size} ranks, link {load.link}: "
            f"{plural(len(history.races), 'race')}",
            f"ended: {reason}",
            "",
            ranking_text(history),
            "",
            "Steps (95 % interval) and perplexities are ratios to the start's.",
            f"* incumbent: {why}",
            *(
                [f"its training runs: {folder / runs}"]
                if (runs := history.incumbent_results.folder)
                else []
            ),
            "",
            "# for params.yaml",
            history.incumbent_results.strategy.entry(folder.name),
        ]
    )


def ranking_text(history: History) -> str:
    """Return a table of the strategies that were raced or timed on the link of the search.

    The shortest step comes first, as a ratio to the start's, since a machine is not equally fast in
    all races. Failures come last.
    """

    def order(row: StrategyResults) -> tuple[bool, float, str]:
        step, failure = row.step(history.workload), row.failure(history.workload)
        return failure is not None, step.ratio if step else 0.0, row.hash

    rows, quality_of = [_HEADINGS], history.quality
    for row in sorted(history.tried.values(), key=order):
        step, failure = row.step(history.workload), row.failure(history.workload)
        quality = quality_of(row.strategy)
        ratio = f"{step.ratio:.3f} ({step.interval})" if step else ""
        cells = (
            "1" if row.hash == history.start else failure.outcome if failure else ratio,
            f"{quality.ratio:.3f}" if quality and quality.sure else "-",
            step.source if step else failure.source if failure else "",
            f"{'*' if row.hash == history.incumbent else ' '} {row.strategy.label()}",
        )
        rows.append(cells)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1]
    lines = ["  ".join([*map(str.rjust, row[:-1], widths), row[-1]]) for row in rows]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])
