"""Stages that a change of params.yaml or of code repeats, in both tools."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardlab.config.parameters import Parameters
from shardlab.config.timing_record import machine_name
from stages.code import STAGES, digests
from stages.plans import plans
from tests.pipeline.workspace import ROOT, copy_project, run

Tree = dict[str, Any]
SMALL: Tree = yaml.safe_load((ROOT / "params/small.yaml").read_text())


def put(path: str, value: Any) -> Callable[[Tree], None]:
    *parents, leaf = path.split(".")

    def edit(tree: Tree) -> None:
        node = tree
        for part in parents:
            node = node.setdefault(part, {})
        node[leaf] = value

    return edit


def add_run(tree: Tree) -> None:
    tree["strategies"]["another"] = {"engine": "ddp", "bucket_mb": 1.0}


def add_round(tree: Tree) -> None:
    tree["rounds"]["2"] = {"after": "results/rounds/1/history.json"}


def reorder(tree: Tree) -> None:
    for key in ("strategies", "timings"):
        tree[key] = dict(reversed(tree[key].items()))


CHANGES: dict[str, tuple[Callable[[Tree], None], set[str]]] = {
    "a strategy that nothing names": (put("timed_strategies.spare", {"engine": "slide"}), set()),
    "another spelling of a strategy": (
        put("strategies.fsdp2", {"engine": "fsdp2", "wrap": "block", "param_dtype": "auto"}),
        set(),
    ),
    "another order": (reorder, {"report"}),
    "a default written out": (put("train.decay", "cosine"), set()),
    "checkpoints": (put("train.checkpoint", {"every": 4}), set()),
    "a time limit": (put("train.timeout_s", 90), set()),
    "the strategy of one run": (
        put("strategies.fsdp2-int8.gradients.codec", "int8:group=64"),
        {"train/fsdp2-int8", "timing/two-ranks", "timing/link-100mbit", "calibrate", "estimate"},
    ),
    "one more run": (
        add_run,
        {
            *("train/another", "timing/two-ranks", "calibrate", "estimate", "collect", "report"),
            *("forecast", "propose/1", "decide/1"),
        },
    ),
    "one more seed": (put("seeds", [0, 1, 2]), {"collect", "report", "trial/1"}),
    "one more round": (add_round, {"propose/2", "trial/2", "decide/2", "report"}),
    "steps": (put("train.steps", 20), {"train/*", "trial/1"}),
    "learning rate": (put("train.learning_rate", 0.002), {"train/*", "trial/1"}),
    "batch size": (
        put("train.batch_size", 2),
        {"train/*", "timing/*", "estimate", "trial/1", "propose/1"},
    ),
    "repetitions of one timing": (
        put("timings.two-ranks.repetitions", 9),
        {"timing/two-ranks", "collect", "forecast", "report", "propose/1", "decide/1"},
    ),
    "one more link in turns": (
        put("timings.two-ranks.interleaved.slow", {"link": {"rate": "50mbit"}}),
        {"timing/two-ranks", "collect", "forecast", "report", "propose/1", "decide/1"},
    ),
    "the model": (
        put("model.preset", "small"),
        {"train/*", "validate", "timing/*", "estimate", "trial/1", "propose/1"},
    ),
    "ranks that the forecast extrapolates to": (
        put("forecast.ranks", [8, 32]),
        {"forecast"},
    ),
    "the share of the validation split": (
        put("data.validation_share", 0.03),
        {"tokenize"},
    ),
    "the vocabulary": (put("tokenize.vocabulary", 600), {"tokenize"}),
    "a point of the curves": (put("quality.time_s", [2]), {"collect", "report"}),
    "the baseline": (put("baseline", "fsdp2-int8"), {"report"}),
    "modules of codecs": (
        put("codecs", ["user_codecs.ternary"]),
        {"train/*", "timing/*", "calibrate", "estimate", "trial/1"},
    ),
    "what the judge is offered": (
        put("agent.candidates", "action"),
        {"propose/1", "trial/1", "decide/1"},
    ),
    "a search that no round names": (put("agent.searches", {"slow": {"world_size": 2}}), set()),
}


def plans_of(tree: Tree, folder: Path) -> dict[str, str]:
    path = folder / "params.yaml"
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    return plans(Parameters(path))


def changed(change: str, folder: Path) -> set[str]:
    """Plans that differ; `STAGE/*` where all of a stage do."""
    before = plans_of(SMALL, folder)
    tree = copy.deepcopy(SMALL)
    CHANGES[change][0](tree)
    after = plans_of(tree, folder)
    names = {name for name, text in after.items() if before.get(name) != text}
    for stage in ("train", "timing"):
        every = {name for name in after if name.startswith(f"{stage}/")}
        if every <= names:
            names = names - every | {f"{stage}/*"}
    return names


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_alters_the_plans_of_stages_that_use_it(change: str, tmp_path: Path) -> None:
    assert changed(change, tmp_path) == CHANGES[change][1]


def test_another_machine_alters_the_digests_of_stages_that_measure_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = {stage: digests(stage) for stage in STAGES}
    host = {"cpu": "another", "cores": 8, "gpus": ["H100", "H100"]}
    name = machine_name(host, "2.13.0+cu130")
    assert name == "another, 8 cores, 2 H100, torch 2.13.0+cu130"
    monkeypatch.setattr("stages.code._machine", lambda: name)
    changed = {stage for stage in STAGES if digests(stage) != before[stage]}
    assert changed == {"timing", "calibrate", "trial"}


def test_a_change_of_code_alters_the_digests_of_stages_that_import_it(tmp_path: Path) -> None:
    root = copy_project(tmp_path / "project")

    def digests() -> dict[str, str]:
        run(root, "python", "-m", "stages.code")
        return {path.stem: path.read_text() for path in (root / "data/code").iterdir()}

    before = digests()
    (root / "shardlab/report/__pycache__").mkdir(exist_ok=True)
    for by_product in (
        *("report/__pycache__/tables.pyc", "kernels/library.so", "comm/.ledger.py.swp"),
        "comm/ledger.py~",
    ):
        (root / "shardlab" / by_product).write_text("another")
    assert digests() == before
    with (root / "shardlab/comm/ledger.py").open("a") as file:
        file.write("# another\n")
    after = digests()
    changed = {stage for stage in after if after[stage] != before.get(stage)}
    assert changed == {"train", "timing", "estimate", "trial"}
