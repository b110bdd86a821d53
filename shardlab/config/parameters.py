"""Parameters of an experiment: reading, overrides, defaults, validation and cross-references."""

import json
import math
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml

from shardlab.config.codec_table import load_codecs
from shardlab.config.machine import LOOPBACK
from shardlab.config.schema import (
    ALL,
    MATRIX,
    Agent,
    Forecast,
    Params,
    Repetitions,
    RoundPlan,
    Train,
    each_timing,
)
from shardlab.config.strategy import Strategy
from shardlab.config.validation import check_fits
from shardlab.core.document import validate
from shardlab.core.errors import UserError, nearest, shorten

_T = TypeVar("_T", bound=Repetitions)
_Values = dict[str, Any]
"""validated sections by name"""


class Parameters:
    """The parameters in a file, possibly a part of them, with overrides from the command line.

    Args:
        path: YAML, or JSON in a file named so. A file may hold a part of the parameters: what is
            there must be right.
        overrides: `key=value` texts, keys dotted and values in YAML or JSON, applied before the
            checks.

    Raises:
        UserError: the first mistake anywhere in the file, in one line.
    """

    def __init__(self, path: str | Path = "params.yaml", overrides: Iterable[str] = ()) -> None:
        self._path = path
        overrides = list(overrides)
        self.arguments = [f"--params={path}", *(f"--set={each}" for each in overrides)]
        """of a stage that is to have these parameters"""
        tree = read_tree(path)
        try:
            for override in overrides:
                _override(tree, override)
            self._values = _validated(tree)
            _name_runs(self._values)
            _name_defaults(self._values)
            _check_references(self._values)
        except UserError as error:
            raise UserError(shorten(str(error))) from None

    def __call__(self, *keys: str) -> Any:
        """Return sections, or items of them such as `strategies.ddp`: one value, or a list of them.

        A stage names here just the keys that dvc.yaml and the rules declare for it. An absent
        section has its default.

        Raises:
            UserError: a key that is absent and has none.
        """
        values = [self._read(key) for key in keys]
        return values[0] if len(values) == 1 else values

    def _read(self, key: str) -> Any:
        section, _, item = key.partition(".")
        values: Any = self._values
        if section not in values:
            if section == "comparison" and "timings" in values:
                raise UserError(
                    "comparison: no timing has all runs of the matrix, with the ranks and the link "
                    "of train: add one to timings"
                )
            field = Params.model_fields[section]
            if not field.is_required():
                return field.get_default(call_default_factory=True)
        for part in filter(None, (section, item)):
            if part not in values:
                raise UserError(f"{key}: missing from {self._path}; {nearest(part, values)}")
            values = values[part]
        if section == "comparison":
            # not with the references that every stage checks: `--set train.link.rate=1gbit` and
            # the like for a single run leave the comparison as it is
            _check_comparison(values, self._values)
        return values

    def complete(self) -> Params:
        """Return all sections.

        Raises:
            UserError: a section without a default is absent, or sections do not fit together.
        """
        return Params.model_construct(**{name: self._read(name) for name in Params.model_fields})

    def all_strategies(self) -> dict[str, Strategy]:
        """Return the strategies of the matrix and those for timings alone."""
        return {**self._read("strategies"), **self._read("timed_strategies")}

    def agent_of(self, number: str) -> Agent:
        """Return the settings of the search for a round."""
        agent: Agent = self._read("agent")
        return agent.of(self._read(f"rounds.{number}"))


def read_tree(path: str | Path) -> dict[str, Any]:
    """Read a YAML file, or a JSON file that is named so.

    Raises:
        UserError: it is not UTF-8, neither of both formats, no mapping, or names a key twice.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        # YAML 1.1 differs from JSON: no tabs, and 1e-3 is text
        tree = _read_json(text) if Path(path).suffix == ".json" else yaml.load(text, _Loader)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; run from the folder that holds it") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 at byte {error.start}: save it as UTF-8") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{path}: not JSON: {error}") from None
    except yaml.YAMLError as error:
        raise UserError(f"{path}: not YAML: {shorten(str(error))}") from None
    except (UserError, ValueError) as error:  # a date that does not exist
        raise UserError(f"{path}: {shorten(str(error))}") from None
    if not isinstance(tree, dict):
        raise UserError(f"{path}: expected a mapping of sections")
    return tree


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses keys that are there twice, of which PyYAML takes the last."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for i, (key, _) in enumerate(node.value):
            if key.value in names[:i]:
                line = key.start_mark.line + 1
                raise UserError(f"line {line}: {key.value!r} is there a second time: remove one")
        return super().construct_mapping(node, deep)


def _read_json(text: str) -> Any:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        for name in names:
            if names.count(name) > 1:
                raise UserError(f"{name!r} is there twice in one mapping: remove one")
        return dict(pairs)

    return json.loads(text, object_pairs_hook=once)


def _check_finite(value: Any, key: str = "") -> None:
    """Refuse numbers that JSON cannot hold."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for name, part in items:
            _check_finite(part, f"{key}.{name}" if key else str(name))
    elif isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{key}: expected a finite number")


def _override(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals:
        raise UserError(f"--set {override}: expected key=value, for example train.steps=10")
    *parents, leaf = key.split(".")
    node = tree
    for part in parents:
        node = node.setdefault(part, {})
        if not isinstance(node, dict):
            raise UserError(f"--set {key}: {part!r} is a value, not a section")
    try:
        node[leaf] = json.loads(text)
    except ValueError:
        try:
            node[leaf] = yaml.safe_load(text)
        except (yaml.YAMLError, ValueError):
            raise UserError(f"--set {key}: {text!r} is neither YAML nor JSON") from None


def _validated(tree: dict[str, Any]) -> _Values:
    """Return the sections that are there, each validated for itself."""
    _check_finite(tree)
    # first, since strategies are validated by the codecs that are known by then
    if "codecs" in tree:
        load_codecs(_section("codecs", tree["codecs"]))
    return {key: _section(key, value) for key, value in tree.items()}


def _section(key: str, value: Any) -> Any:
    if key not in Params.model_fields:
        raise UserError(f"{key}: unknown key; {nearest(str(key), Params.model_fields)}")
    field = Params.model_fields[key]
    return validate(Annotated[field.annotation, field], value, key)


def _name_runs(values: _Values) -> None:
    """Put the names of strategies in place of the words for them, sorted: the order in the file
    changes no timing."""
    if not {"strategies", "timings"} <= values.keys():
        return
    runs = sorted(values["strategies"])
    words = {MATRIX: runs, ALL: sorted([*runs, *values.get("timed_strategies", ())])}

    def named(timing: _T) -> _T:
        names = words[timing.runs] if isinstance(timing.runs, str) else timing.runs
        return timing.model_copy(update={"runs": tuple(names)})

    for name, timing in values["timings"].items():
        others = {other: named(part) for other, part in timing.interleaved.items()}
        values["timings"][name] = named(timing).model_copy(update={"interleaved": others})


def _name_defaults(values: _Values) -> None:
    """Put the names that defaults stand for into complete parameters: the baseline is where the
    search starts and what the forecast is fitted on; a timing of all runs of the matrix, on the
    ranks and link of `train`, is the one that is compared, by name the first of several.
    """
    if not {"strategies", "timings", "baseline"} <= values.keys():
        return
    baseline, train = values["baseline"], values.get("train", Train())
    comparable = sorted(
        name
        for name, timing in each_timing(values["timings"]).items()
        if {*values["strategies"]} <= {*timing.runs}
        and (timing.world_size, timing.link) == (train.world_size, train.link)
    )
    if comparable:
        values.setdefault("comparison", comparable[0])
    first = values.get("comparison", min(values["timings"]))
    forecast, agent = values.get("forecast", Forecast()), values.get("agent", Agent())
    named = {"timings": forecast.timings or (first,), "runs": forecast.runs or (baseline,)}
    values["forecast"] = forecast.model_copy(update=named)
    if "start" not in agent.model_fields_set:
        agent = agent.model_copy(update={"start": baseline})
    values["agent"] = agent


def _check_references(values: _Values) -> None:
    """Check references from one key to another, where both are present."""
    if "strategies" in values:
        _check_strategies(values)
    if "timings" in values:
        _check_timings(values)
    if "tokenize" in values and "model" in values:
        values["tokenize"].for_model(values["model"])
    seeds = values.get("seeds", [])
    if len(set(seeds)) < len(seeds):
        raise UserError("seeds: a seed is named twice")
    _check_rounds(values.get("rounds", {}), values.get("agent", Agent()))


def _check_name(key: str, name: str, valid: Collection[str], kind: str) -> None:
    if name not in valid:
        raise UserError(f"{key}: {name!r} is no {kind}; {nearest(name, valid)}")


def _check_strategies(values: _Values) -> None:
    runs, timed = values["strategies"], values.get("timed_strategies", {})
    if "baseline" in values:
        _check_name("baseline", values["baseline"], runs, "run")
    if "agent" in values:
        _check_name("agent.start", values["agent"].start, runs, "run")
    for name in timed:
        if name in runs:
            raise UserError(f"timed_strategies.{name}: {name!r} is one of strategies, too")
    for i, name in enumerate(values["forecast"].runs if "forecast" in values else ()):
        _check_name(f"forecast.runs.{i}", name, {**runs, **timed}, "strategy")
    if "train" in values:
        for name, strategy in runs.items():
            _check_fits(f"strategies.{name}", strategy, values["train"])


def _check_timings(values: _Values) -> None:
    keys: dict[str, str] = {}
    for name, whole in values["timings"].items():
        for part, timing in whole.parts(name).items():
            key = f"timings.{name}" + ("" if part == name else f".interleaved.{part}")
            if part in keys:
                raise UserError(f"{key}: {keys[part]} has the same name: choose another")
            keys[part] = key
            if "strategies" in values:
                _check_timing(key, timing, values)
    if "comparison" in values:
        _check_name("comparison", values["comparison"], keys, "timing")
    for i, name in enumerate(values["forecast"].timings if "forecast" in values else ()):
        _check_name(f"forecast.timings.{i}", name, keys, "timing")


def _check_timing(key: str, timing: Repetitions, values: _Values) -> None:
    strategies = {**values["strategies"], **values.get("timed_strategies", {})}
    for i, run in enumerate(timing.runs):
        if run in timing.runs[:i]:
            raise UserError(f"{key}.runs.{i}: {run!r} is named twice")
        _check_name(f"{key}.runs.{i}", run, strategies, "strategy")
        if "train" in values:
            there = values["train"].model_copy(update={"world_size": timing.world_size})
            _check_fits(f"{key}.runs.{i}", strategies[run], there)


def _check_comparison(name: str, values: dict[str, Any]) -> None:
    """Check that a timing has the runs of the matrix, on the ranks and link of their training."""
    if "timings" not in values:
        return
    key, timing = f"timings.{name}", each_timing(values["timings"])[name]
    for run in values.get("strategies", []):
        if run not in timing.runs:
            raise UserError(
                f"comparison: {key} lacks {run!r} of the matrix: remove {key}.runs, or add it there"
            )
    if "train" not in values:
        return
    train = values["train"]
    if timing.world_size != train.world_size:
        raise UserError(
            f"comparison: {key} has {timing.world_size} ranks, train {train.world_size}: "
            f"set {key}.world_size to {train.world_size}"
        )
    if timing.link != train.link:
        there, here = (link.name if link else LOOPBACK for link in (timing.link, train.link))
        raise UserError(
            f"comparison: the link of {key} is {there}, that of train {here}: "
            f"give {key}.link the value of train.link"
        )


def _check_fits(key: str, strategy: Strategy, train: Train) -> None:
    try:
        check_fits(strategy, train.world_size, train.batch_size * train.accumulation)
    except UserError as error:
        raise UserError(f"{key}: {error}") from None


def _check_rounds(rounds: dict[str, RoundPlan], agent: Agent) -> None:
    before = "results/results.jsonl"
    searches = [plan.search for plan in rounds.values()]
    for number, (name, plan) in enumerate(rounds.items(), start=1):
        if name != str(number):
            raise UserError(f"rounds.{name}: expected round '{number}' here: count up from '1'")
        if plan.after != before:
            raise UserError(f"rounds.{name}.after: expected {before!r} (found {plan.after!r})")
        if plan.search not in (None, *agent.searches):
            raise UserError(
                f"rounds.{name}.search: {plan.search!r} is no search: add it to agent.searches"
            )
        if plan.search in searches[: number - 1] and plan.search != searches[number - 2]:
            raise UserError(f"rounds.{name}.search: put the rounds of a search one after another")
        before = f"results/rounds/{name}/history.json"
