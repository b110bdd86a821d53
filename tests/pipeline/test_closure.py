"""A stage depends on just the code that it imports and the parameters that it reads."""

import subprocess
import sys

import grimp
import pytest
import yaml

from stages.code import STAGES, paths
from tests.pipeline.closure import (
    complaints,
    import_graph,
    plans_read,
    wasted_share,
)
from tests.pipeline.workspace import ROOT

DECLARED = {stage: paths(stage) for stage in STAGES}
DESCRIBED = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return import_graph()


def test_every_command_is_a_stage() -> None:
    modules = {path.stem for path in (ROOT / "stages").glob("*.py")}
    # search runs other stages, in a folder of its own; chat writes nothing
    helpers = {"__init__", "common", "outside", "summary"}
    assert modules - helpers - {"chat", "search"} == set(DESCRIBED)
    assert modules >= STAGES.keys() == DESCRIBED.keys() - {"code"}  # which reads all of it


@pytest.mark.parametrize("stage", DECLARED)
def test_a_stage_declares_just_what_it_imports(graph: grimp.ImportGraph, stage: str) -> None:
    assert complaints(graph, ROOT, stage, DECLARED[stage]) == []


@pytest.mark.parametrize("stage", DECLARED)
def test_a_stage_declares_little_that_it_does_not_import(
    graph: grimp.ImportGraph, stage: str
) -> None:
    """An edit of a file that a stage does not import repeats the stage all the same."""
    allowed = 0.03 if stage == "train" else 0.05
    assert wasted_share(graph, ROOT, stage, DECLARED[stage]) <= allowed


@pytest.mark.parametrize("lost", DECLARED["train"])
def test_missing_dependency_is_reported(graph: grimp.ImportGraph, lost: str) -> None:
    rest = [path for path in DECLARED["train"] if path != lost]
    assert any(lost in line for line in complaints(graph, ROOT, "train", rest))


def test_needless_dependency_is_reported(graph: grimp.ImportGraph) -> None:
    declared = [*DECLARED["collect"], "shardlab/comm"]
    assert complaints(graph, ROOT, "collect", declared) == [
        "collect: declared for nothing: shardlab/comm"
    ]


def test_new_import_is_a_dependency_of_every_stage() -> None:
    """A package that core starts to import becomes a dependency of every stage."""
    graph = import_graph()
    graph.add_import(importer="shardlab.core.errors", imported="shardlab.models.presets")
    found = complaints(graph, ROOT, "readme", DECLARED["readme"])
    assert "readme: not declared: shardlab/models/presets.py" in found


def test_stages_that_run_codecs_depend_on_those_of_the_user() -> None:
    found = {stage for stage, code in DECLARED.items() if "user_codecs" in code}
    assert found == {"train", "timing", "calibrate", "estimate", "trial"}


def test_import_of_shardlab_loads_no_module() -> None:
    """`import shardlab`, which every stage does, is no dependency on shardlab.comm."""
    script = "import sys, shardlab; print([m for m in sys.modules if m.startswith('shardlab.')])"
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert run.stdout == "[]\n", run.stderr


@pytest.mark.parametrize("stage", sorted(STAGES.keys() - {"plans"}))
def test_a_stage_declares_the_plan_that_it_reads(stage: str) -> None:
    described = DESCRIBED[stage].get("do", DESCRIBED[stage])["deps"]
    declared = {dep.split("/")[2] for dep in described if dep.startswith("data/plans/")}
    read = plans_read((ROOT / "stages" / f"{stage}.py").read_text())
    assert {name.removesuffix(".json") for name in declared} == read
