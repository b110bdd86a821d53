"""Snakefile and dvc.yaml describe one pipeline."""

import re
from pathlib import Path

import networkx
import pytest
import yaml

from shardlab.strategy.document import parse_strategy
from tests.pipeline.graphs import differences, dvc_jobs, snakemake_jobs, wanted
from tests.pipeline.workspace import ROOT, copy_project, run


@pytest.mark.long
def test_both_tools_describe_one_pipeline() -> None:
    dvc, snakemake = dvc_jobs(ROOT), snakemake_jobs(ROOT)
    assert differences(dvc, snakemake) == []
    # what the first rule does not ask for is not made again when somebody deletes it
    outputs = frozenset().union(*(job.outputs for job in snakemake.values()))
    recorded = {path for path in outputs if path.startswith("data/inputs/")}
    assert outputs - recorded == wanted(ROOT)
    assert len(dvc) < 100, "DVC needs a second per stage from about 100 stages on"


METHODS = {"stock": {"strategies": ["fsdp2"]}, "alone": {"strategies": ["rare"], "world_size": 1}}
RARE = {"engine": "ddp"}
TUNE = {"target_loss": 6.0, "learning_rates": [0.003], "micro_batches": {1: 1, 2: 1}}


@pytest.mark.long
def test_both_tools_tune_each_method(tmp_path: Path) -> None:
    root = copy_project(
        tmp_path / "project",
        tune=TUNE,
        methods=METHODS,
        timed_strategies={"rare": RARE},
    )
    dvc, snakemake = dvc_jobs(root), snakemake_jobs(root)
    assert differences(dvc, snakemake) == []
    tuned = [job for job in snakemake.values() if job.name == "tune"]
    (alone,) = (job for job in tuned if job.command.endswith("alone"))
    assert alone.parameters["methods.alone"]["strategy"] == parse_strategy(RARE).hash()
    results = {"results/tune/stock.jsonl", "results/tune/alone.jsonl"}
    assert frozenset().union(*(job.outputs for job in tuned)) == results
    assert results <= wanted(root)


@pytest.mark.long
def test_a_drift_of_either_description_is_reported(tmp_path: Path) -> None:
    root = copy_project(tmp_path / "project")
    snakemake = snakemake_jobs(root)
    for old, new in (
        ("    - results/memory.json\n    - results/profile\n", "    - results/profile\n"),
        ("- data/code.yaml: [report]", "- data/code.yaml: [collect]"),
        ("[seeds, strategies, timings]", "[seeds, strategies]"),
        ("shardlab validate ${key}", "shardlab validate --x ${key}"),
    ):
        path = root / "dvc.yaml"
        assert old in path.read_text(), f"dvc.yaml no longer holds {old!r}"
        path.write_text(path.read_text().replace(old, new, 1))
    reported = "\n".join(differences(dvc_jobs(root), snakemake))
    for words in ("collect: inputs", "collect: parameters", "report: code", "only in dvc.yaml"):
        assert words in reported


@pytest.mark.long
def test_the_lock_has_no_stage_that_dvc_yaml_lacks() -> None:
    """DVC never removes one: what it held would stand for results that nothing makes."""
    named = run(ROOT, "dvc", "stage", "list", "--name-only", "--all").stdout.split()
    locked = yaml.safe_load((ROOT / "dvc.lock").read_text())["stages"]
    assert locked and locked.keys() - {*named} == set()


@pytest.mark.long
def test_the_figure_of_the_stages_is_that_of_dvc(tmp_path: Path) -> None:
    """Without the edges that follow from others, and with the next round of the search apart."""
    after = {"1": "results/results.jsonl", "2": "results/rounds/1/history.json"}
    searched = {number: {"after": path} for number, path in after.items()}
    root = copy_project(tmp_path / "project", "params.yaml", rounds=searched)
    drawn = run(root, "dvc", "dag", "--collapse-foreach-matrix", "--mermaid").stdout
    names = dict(re.findall(r'(node\d+)\["(\w+)"\]', drawn))
    found = re.findall(r"(node\d+)-->(node\d+)", drawn)
    edges = {(names[first], names[last]) for first, last in found}
    rounds = {("decide", "decide"), ("decide", "propose")}
    assert rounds < edges
    least = networkx.transitive_reduction(networkx.DiGraph(edges - rounds))
    page = (ROOT / "docs/architecture.md").read_text()
    figure = page.partition("## Stages")[2].partition("## ")[0]
    arrows = re.findall(r"^    ([\w &]+) --> ([\w &]+)$", figure, re.MULTILINE)
    shown = {(a, b) for one, other in arrows for a in one.split(" & ") for b in other.split(" & ")}
    assert shown == set(least.edges)
    assert "decide -. next round .-> propose" in figure
