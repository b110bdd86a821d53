"""Stages whose keys of data/params.yaml a change of params.yaml alters: both tools repeat them."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardlab.config.parameters import Parameters
from stages.params import parameter_keys
from tests.pipeline.workspace import ROOT

Tree = dict[str, Any]
QUICK: Tree = yaml.safe_load((ROOT / "params/quick.yaml").read_text())
QUICK |= {
    "tune": {"target_loss": 6.0, "learning_rates": [0.003], "micro_batches": {1: 1, 2: 1}},
    "methods": {
        "stock": {"strategies": ["fsdp2"]},
        "alone": {"strategies": ["fsdp2"], "world_size": 1},
    },
}
STAGES: Tree = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]


def put(path: str, value: Any) -> Callable[[Tree], None]:
    *parents, leaf = path.split(".")

    def edit(tree: Tree) -> None:
        node = tree
        for part in parents:
            node = node.setdefault(part, {})
        node[leaf] = value

    return edit


def reorder(tree: Tree) -> None:
    for key in ("strategies", "timings"):
        tree[key] = dict(reversed(tree[key].items()))


def drop_last(tree: Tree) -> None:
    tree["strategies"].popitem()


ALL_TIMED = {"collect", "forecast", "report", "propose/1", "decide/1"}
CHANGES: dict[str, tuple[Callable[[Tree], None], set[str]]] = {
    "a strategy that nothing names": (
        put("timed_strategies.spare", {"engine": "slide"}),
        {"report"},
    ),
    "another spelling of a strategy": (
        put("strategies.fsdp2", {"engine": "fsdp2", "wrap": "block", "param_dtype": "auto"}),
        set(),
    ),
    "another order": (reorder, set()),
    "a default written out": (put("train.decay", "cosine"), set()),
    "checkpoints": (put("train.checkpoint", {"every": 4}), set()),
    "a time limit": (put("train.timeout_s", 90), set()),
    "the strategy of one run": (
        put("strategies.fsdp2-int8.gradients.codec", "int8:group=64"),
        {"train/fsdp2-int8", "timing/*", "calibrate", "estimate", *ALL_TIMED},
    ),
    "one run less": (
        drop_last,
        {"timing/*", "calibrate", "estimate", *ALL_TIMED},
    ),
    "one more seed": (
        put("seeds", [0, 1]),
        {"tune/*", "profile/*", "validate/*", "collect", "report", "trial/1", "propose/1"},
    ),
    "one more round": (
        put("rounds.2", {"after": "results/rounds/1/history.json"}),
        {"propose/2", "trial/2", "decide/2", "report"},
    ),
    "a curve of validation losses": (
        put("train.validation", {"every": 2}),
        {"train/*", "trial/1", "propose/1"},
    ),
    "steps": (
        put("train.steps", 20),
        {"train/*", "tune/*", "trial/1", "propose/1", "report"},
    ),
    "batch size": (
        put("train.batch_size", 2),
        {"train/*", "tune/*", "timing/*", "estimate", "trial/1", "propose/1"},
    ),
    "repetitions of one timing": (
        put("timings.two-ranks.repetitions", 9),
        {"timing/two-ranks", *ALL_TIMED},
    ),
    "the model": (
        put("model", {"preset": "small"}),
        {"train/*", "tune/*", "validate/*", "timing/*", "estimate", "trial/1", "propose/1"},
    ),
    "the loss that methods reach": (put("tune.target_loss", 5.0), {"tune/*", "report"}),
    "one more method": (
        put("methods.more", {"strategies": ["fsdp2-int8"]}),
        {"tune/more", "report"},
    ),
    "the strategy that a method trains": (
        put("methods.stock.strategies", ["fsdp2-int8"]),
        {"tune/stock", "report"},
    ),
    "ranks that the forecast extrapolates to": (put("forecast.ranks", [8, 32]), {"forecast"}),
    "the share of the validation split": (put("data.validation_share", 0.03), {"tokenize"}),
    "a codec that the search may propose": (
        put("forecast.space.gradients", [{"codec": "int4"}]),
        {"calibrate", "propose/1"},
    ),
    "CPU threads of a rank": (
        put("train.threads", 2),
        {"train/*", "tune/*", "validate/*", "timing/*", "calibrate", "trial/1", "propose/1"},
    ),
    "the tokenizer": (put("tokenize", {"tokenizer": "gpt2"}), {"tokenize"}),
    "a point of the curves": (put("quality.time_s", [2]), {"report"}),
    "the baseline": (put("baseline", "fsdp2-int8"), {"report"}),
    "what the judge is offered": (
        put("agent.candidates", "config"),
        {"propose/1", "trial/1", "decide/1", "report"},
    ),
    "a search that no round names": (put("agent.searches", {"slow": {"world_size": 2}}), set()),
}


def dependencies(tree: Tree) -> dict[str, list[Any]]:
    """Values that stages depend on by dvc.yaml; those with items as STAGE/ITEM."""
    return {name: values for name, values in _dependencies(tree) if values}


def _dependencies(tree: Tree) -> Iterator[tuple[str, list[Any]]]:
    for stage, described in STAGES.items():
        section = (described.get("foreach") or described.get("matrix", {}).get("run", ""))[2:-1]
        each = described.get("do", described).get("params", [])
        keys = [
            k for part in each if isinstance(part, dict) for k in part.get("data/params.yaml", ())
        ]
        for item in tree[section] if section else [""]:
            names = [key.replace("${item.run}", item).replace("${key}", item) for key in keys]
            yield f"{stage}/{item}".rstrip("/"), [_value(tree, name) for name in names]


def _value(tree: Any, key: str) -> Any:
    for part in key.split("."):
        tree = tree[part]
    return tree


def written(tree: Tree, folder: Path) -> Tree:
    path = folder / "params.yaml"
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    return parameter_keys(Parameters(path).complete())


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_alters_the_keys_of_stages_that_use_it(change: str, tmp_path: Path) -> None:
    edit, expected = CHANGES[change]
    # what defaults to the baseline is not to change with it
    tree = copy.deepcopy(QUICK)
    tree["agent"]["start"] = tree["baseline"]
    tree["forecast"] |= {"runs": ["fsdp2"]}
    before = dependencies(written(tree, tmp_path))
    edit(tree)
    after = dependencies(written(tree, tmp_path))
    changed = {name for name, values in after.items() if before.get(name) != values}
    for stage in {name.split("/")[0] for name in changed}:
        every = {name for name in after if name.startswith(f"{stage}/")}
        if len(every) > 1 and every <= changed:
            changed = changed - every | {f"{stage}/*"}
    assert changed == expected
