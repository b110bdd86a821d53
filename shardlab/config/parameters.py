"""Parameters of an experiment: reading, overrides, defaults, validation and cross-references."""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import yaml

from shardlab.config.codec_table import load_codecs
from shardlab.config.machine import LOOPBACK
from shardlab.config.schema import (
    ALL,
    MATRIX,
    Agent,
    Params,
    Repetitions,
    RoundPlan,
    Timing,
    Train,
    each_timing,
)
from shardlab.config.strategy import Strategy
from shardlab.config.validation import check_fits
from shardlab.core.document import validate
from shardlab.core.errors import UserError, nearest, shorten

_ONE_OF = {
    "rounds": RoundPlan,
    "strategies": Strategy,
    "timed_strategies": Strategy,
    "timings": Timing,
}
"""sections that map names to values of one type"""


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
        self._tree = read_tree(path)
        try:
            for override in overrides:
                _override(self._tree, override)
            _name_runs(self._tree)
            _fill_names(self._tree)
            _check_tree(self._tree)
        except UserError as error:
            raise UserError(shorten(str(error))) from None

    def __call__(self, *keys: str) -> Any:
        """Return the validated values of dotted keys: one value, or a list of them.

        A stage names here just the keys that dvc.yaml and the rules declare for it. An absent
        section has its default.

        Raises:
            UserError: a key that is absent and has none.
        """
        values = [self._read(key) for key in keys]
        return values[0] if len(values) == 1 else values

    def _read(self, key: str) -> Any:
        node: Any = self._tree
        for part in key.split("."):
            if not isinstance(node, dict) or part not in node:
                if key == "comparison" and isinstance(self._tree.get("timings"), dict):
                    raise UserError(
                        "comparison: no timing has all runs of the matrix, with the ranks and the "
                        "link of train: add one to timings"
                    )
                if key in Params.model_fields and not Params.model_fields[key].is_required():
                    return Params.model_fields[key].get_default(call_default_factory=True)
                valid = list(node) if isinstance(node, dict) else []
                raise UserError(f"{key}: missing from {self._path}; {nearest(part, valid)}")
            node = node[part]
        section, *rest = key.split(".")
        annotation = _ONE_OF[section] if rest else None
        value = validate(annotation or _annotation(section), node, key)
        if key == "comparison":
            # not with the references that every stage checks: `--set train.link.rate=1gbit` and
            # the like for a single run leave the comparison as it is
            known = [each for each in ("strategies", "timings", "train") if each in self._tree]
            _check_comparison(value, {each: self._read(each) for each in known})
        return value

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


def _name_runs(tree: dict[str, Any]) -> None:
    """Put the names of strategies in place of the words for them, sorted: the order in the file
    changes no timing."""
    sections = [tree.get(key, {}) for key in ("strategies", "timed_strategies", "timings")]
    if not sections[0] or not all(isinstance(each, dict) for each in sections):
        return
    runs, timed, timings = sections
    named = {MATRIX: [*runs], ALL: [*runs, *timed]}
    for name, timing in timings.items():
        _name_runs_of(f"timings.{name}", timing, named)
        others = timing.get("interleaved") if isinstance(timing, dict) else None
        if isinstance(others, dict):
            for other, part in others.items():
                _name_runs_of(f"timings.{name}.interleaved.{other}", part, named)


def _name_runs_of(key: str, timing: Any, named: dict[str, list[str]]) -> None:
    word = timing.get("runs", MATRIX) if isinstance(timing, dict) else None
    if not isinstance(word, str):
        return
    if word not in named:
        raise UserError(
            f"{key}.runs: expected names of strategies, {MATRIX} or {ALL} (found {word!r})"
        )
    timing["runs"] = sorted(map(str, named[word]))


def _fill_names(tree: dict[str, Any]) -> None:
    """Put the names that defaults stand for into complete parameters: the baseline is where the
    search starts and what the forecast is fitted on; a timing of all runs of the matrix, on the
    ranks and link of `train`, is the one that is compared, by name the first of several.
    """
    runs, timings = tree.get("strategies"), tree.get("timings")
    if not (isinstance(runs, dict) and isinstance(timings, dict) and runs and timings):
        return
    if not isinstance(tree.get("baseline"), str):
        return
    if "comparison" not in tree and (found := _comparable(runs, timings, tree.get("train"))):
        tree["comparison"] = found[0]
    forecast, agent = (tree.setdefault(name, {}) for name in ("forecast", "agent"))
    if isinstance(forecast, dict) and isinstance(agent, dict):
        forecast.setdefault("timings", [tree.get("comparison", min(map(str, timings)))])
        forecast.setdefault("runs", [tree["baseline"]])
        agent.setdefault("start", tree["baseline"])


def _comparable(runs: dict[str, Any], timings: dict[str, Any], train: Any) -> list[str]:
    """Return the names of timings of all runs, on the ranks and link of `train`."""

    def place(part: dict[str, Any]) -> tuple[Any, Any]:
        return part.get("world_size", Train.model_fields["world_size"].default), part.get("link")

    parts: dict[str, Any] = {}
    for name, timing in timings.items():
        if isinstance(timing, dict):
            others = timing.get("interleaved")
            parts |= {name: timing} | (others if isinstance(others, dict) else {})
    here = place(train if isinstance(train, dict) else {})
    return sorted(
        name
        for name, part in parts.items()
        if isinstance(part, dict)
        and isinstance(part.get("runs"), list)
        and all(run in part["runs"] for run in runs)
        and place(part) == here
    )


def _annotation(section: str) -> Any:
    field = Params.model_fields[section]
    return Annotated[field.annotation, field]


def _check_tree(tree: dict[str, Any]) -> None:
    _check_finite(tree)
    values = {}
    # first, since strategies are validated by the codecs that are known by then
    if "codecs" in tree:
        load_codecs(validate(_annotation("codecs"), tree["codecs"], "codecs"))
    for key, value in tree.items():
        if key in Params.renamed:
            raise UserError(f"{key}: renamed: write {Params.renamed[key]}")
        if key not in Params.model_fields:
            raise UserError(f"{key}: unknown key; {nearest(str(key), Params.model_fields)}")
        values[key] = validate(_annotation(key), value, key)
    _check_references(values)


def _check_references(values: dict[str, Any]) -> None:
    """Check references from one key to another, where both are present."""

    def refuse(key: str, name: str, valid: list[str], kind: str) -> None:
        if name not in valid:
            raise UserError(f"{key}: {name!r} is no {kind}; {nearest(name, valid)}")

    runs, timed = values.get("strategies"), values.get("timed_strategies", {})
    if runs is not None:
        if "baseline" in values:
            refuse("baseline", values["baseline"], list(runs), "run")
        if "agent" in values:
            refuse("agent.start", values["agent"].start, list(runs), "run")
        for name in timed:
            if name in runs:
                raise UserError(f"timed_strategies.{name}: {name!r} is one of strategies, too")
    strategies = {**runs, **timed} if runs is not None else None
    timings = values.get("timings")
    _check_timings(timings or {}, strategies, values.get("train"))
    named = [] if timings is None else [*each_timing(timings)]
    if "comparison" in values and timings is not None:
        refuse("comparison", values["comparison"], named, "timing")
    if "forecast" in values:
        known = values["forecast"]
        for i, name in enumerate(known.timings if timings is not None else ()):
            refuse(f"forecast.timings.{i}", name, named, "timing")
        for i, name in enumerate(known.runs):
            if strategies is not None:
                refuse(f"forecast.runs.{i}", name, list(strategies), "strategy")
    if "tokenize" in values and "model" in values:
        values["tokenize"].for_model(values["model"])
    if "train" in values:
        for name, strategy in (runs or {}).items():
            _check_fits(f"strategies.{name}", strategy, values["train"])
    seeds = values.get("seeds", [])
    if len(set(seeds)) < len(seeds):
        raise UserError("seeds: a seed is named twice")
    _check_chain(list(values.get("rounds", {}).items()))
    if "rounds" in values and "agent" in values:
        for name, plan in values["rounds"].items():
            if plan.search not in (None, *values["agent"].searches):
                raise UserError(
                    f"rounds.{name}.search: {plan.search!r} is no search: add it to agent.searches"
                )


def _check_timings(
    timings: dict[str, Timing], strategies: dict[str, Strategy] | None, train: Train | None
) -> None:
    keys: dict[str, str] = {}
    for name, whole in timings.items():
        for part, timing in whole.parts(name).items():
            key = f"timings.{name}" + ("" if part == name else f".interleaved.{part}")
            if part in keys:
                raise UserError(f"{key}: {keys[part]} has the same name: choose another")
            keys[part] = key
            _check_timing(key, timing, strategies, train)


def _check_timing(
    key: str, timing: Repetitions, strategies: dict[str, Strategy] | None, train: Train | None
) -> None:
    for i, run in enumerate(timing.runs):
        if run in timing.runs[:i]:
            raise UserError(f"{key}.runs.{i}: {run!r} is named twice")
        if strategies is None:
            continue
        if run not in strategies:
            raise UserError(f"{key}.runs.{i}: {run!r} is no strategy; {nearest(run, strategies)}")
        if train is not None:
            there = train.model_copy(update={"world_size": timing.world_size})
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


def _check_chain(rounds: list[tuple[str, RoundPlan]]) -> None:
    before = "results/results.jsonl"
    searches = [plan.search for _, plan in rounds]
    for number, (name, plan) in enumerate(rounds, start=1):
        if name != str(number):
            raise UserError(f"rounds.{name}: expected round '{number}' here: count up from '1'")
        if plan.after != before:
            raise UserError(f"rounds.{name}.after: expected {before!r} (found {plan.after!r})")
        if plan.search in searches[: number - 1] and plan.search != searches[number - 2]:
            raise UserError(f"rounds.{name}.search: put the rounds of a search one after another")
        before = f"results/rounds/{name}/history.json"
