"""Parameters of a search without the DAG, derived from those of the tree.

They are complete: every stage runs with them. The matrix is the start, whose training runs are the
reference of quality, and where there is a link those runs of the tree that only compress its
gradients: what they lose then is known of every engine. Two short timings of all engines that the
forecast fits by default, on loopback and on the link of the search, are what it is fitted on.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_args

from shardlab.config.link import Link
from shardlab.config.model_and_data import Model
from shardlab.config.parameters import Parameters
from shardlab.config.search import Agent
from shardlab.config.strategy import Strategy, parse_strategy
from shardlab.core.document import validate
from shardlab.core.errors import UserError, nearest
from shardlab.search.written import written

READ = (
    "agent",
    "codecs",
    "data",
    "forecast",
    "model",
    "seeds",
    "strategies",
    "tokenize",
    "train",
)
"""sections of the tree that a search is derived from"""
_ENGINES = ("ddp", "fsdp2", "manual", "slide")
_REPETITIONS = {"loopback": 20, "link": 10}
_BUDGET = 16
"""trials, over which the error of a search is spread: minutes or the stop-loss end it before"""


class Request(NamedTuple):
    """Request of the command line."""

    link: Link | None
    ranks: int
    model: str | None = None
    """a preset, or a folder with a config.json; None: the tree's model"""


def search_parameters(params: Parameters, request: Request) -> dict[str, Any]:
    """Return the parameters of a search as plain data.

    Raises:
        UserError: there is no such model, or the tree lacks a section.
    """
    given = dict(zip(READ, params(*READ), strict=True))
    agent, train, strategies = given["agent"], given["train"], given["strategies"]
    plain = {engine: parse_strategy({"engine": engine}) for engine in _ENGINES}
    start = strategies[agent.start]
    same = (engine for engine, strategy in plain.items() if strategy.hash() == start.hash())
    # a name that no engine has
    name = next(same, "start")
    # the rules try codecs of unknown quality last
    coded = {
        run: strategies[run]
        for run in strategies
        if request.link and run not in plain and _differs_in_codecs(strategies[run], start)
    }
    matrix = {name: start, **coded}
    timed = {each: strategy for each, strategy in plain.items() if each not in matrix}
    links = {"loopback": None} | ({"link": request.link} if request.link else {})
    timings = {
        each: {
            "runs": [name, *timed, *(coded if each == "loopback" else ())],
            "world_size": request.ranks,
            "link": _plain(link),
            "repetitions": _REPETITIONS[each],
        }
        for each, link in links.items()
    }
    forecast = {"timings": [*timings], "runs": [*plain]}
    return {
        "codecs": [*given["codecs"]],
        "inputs": {},  # whose contents no stage of a search compares
        "data": _plain(given["data"]),
        "tokenize": _plain(given["tokenize"].for_model(given["model"])),
        "model": _plain(_model(request.model, given["model"])),
        # quality does not depend on the link, so nothing trains on a slow one
        "train": _plain(train) | {"world_size": request.ranks, "link": None, "checkpoint": None},
        "strategies": _written(matrix),
        "timed_strategies": _written(timed),
        "seeds": given["seeds"],
        "baseline": name,
        "timings": timings,
        "comparison": "loopback",
        "forecast": _plain(given["forecast"]) | forecast,
        "quality": {},
        "agent": _plain(agent)
        | {
            "start": name,
            "link": _plain(request.link),
            "world_size": None,
            "searches": {},
            "model": _local(agent),
            "budget": _BUDGET,
            "budget_minutes": None,
        },
        "policies": {},
        "rounds": {str(number): {"after": _before(number)} for number in range(1, _BUDGET + 1)},
    }


def _written(strategies: Mapping[str, Strategy]) -> dict[str, Any]:
    return {name: written(strategy.canonical()) for name, strategy in strategies.items()}


def first_difference(one: Any, other: Any, key: str = "") -> str | None:
    """Return where two trees of plain data differ first, with both values; None if nowhere."""
    if not (isinstance(one, Mapping) and isinstance(other, Mapping)):
        return None if one == other else f"{key}: {one!r} there, {other!r} now"
    for name in (*one, *other):
        found = first_difference(one.get(name), other.get(name), f"{key}.{name}".lstrip("."))
        if found is not None:
            return found
    return None


def _differs_in_codecs(one: Strategy, start: Strategy) -> bool:
    """Return whether a strategy is the start with gradients compressed, and nothing else."""
    plain = start.canonical().gradients
    return (
        one.hash() != start.hash()
        and not one.gradients.plain()
        and one.model_copy(update={"gradients": plain}).hash()
        == start.model_copy(update={"gradients": plain}).hash()
    )


def _plain(document: Any) -> Any:
    return None if document is None else document.model_dump(mode="json")


def _local(agent: Agent) -> str | None:
    """Return the judge's model, by an absolute path if it is one."""
    if agent.judge == "local" and agent.model:
        return str(Path(agent.model).resolve())
    return agent.model


def _model(name: str | None, given: Model) -> Model:
    """Return the model of a name; paths are absolute, as the search works in another folder."""
    if name is None:
        # what is no path is a name on the Hugging Face hub
        paths = {"pretrained": given.pretrained, "config": given.config}
        found = {key: Path(path).resolve() for key, path in paths.items() if path}
        there = {key: str(path) for key, path in found.items() if path.exists()}
        return given.model_copy(update=there)
    presets = get_args(get_args(Model.model_fields["preset"].annotation)[0])
    if name in presets:
        return validate(Model, {"preset": name}, "--model")
    if not Path(name).exists():
        raise UserError(
            f"--model: {name!r} is no preset and no folder with a config.json; "
            f"{nearest(name, presets)}"
        )
    return Model(config=str(Path(name).resolve()))


def _before(number: int) -> str:
    if number == 1:
        return "results/results.jsonl"
    return f"results/rounds/{number - 1}/history.json"
