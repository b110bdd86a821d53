"""Snakefile and dvc.yaml describe one pipeline."""

from pathlib import Path

import pytest

from tests.pipeline.graphs import differences, dvc_jobs, snakemake_jobs, wanted
from tests.pipeline.workspace import ROOT, copy_project


@pytest.mark.long
def test_both_tools_describe_one_pipeline() -> None:
    dvc, snakemake = dvc_jobs(ROOT), snakemake_jobs(ROOT)
    assert differences(dvc, snakemake) == []
    # what the first rule does not ask for is not made again when somebody deletes it
    outputs = frozenset().union(*(job.outputs for job in snakemake.values()))
    recorded = {path for path in outputs if path.startswith("data/inputs/")}
    assert outputs - recorded == wanted(ROOT)
    assert len(dvc) < 100, "DVC needs a second per stage from about 100 stages on"


@pytest.mark.long
def test_a_drift_of_either_description_is_reported(tmp_path: Path) -> None:
    root = copy_project(tmp_path / "project")
    snakemake = snakemake_jobs(root)
    for old, new in (
        ("    - results/memory.json\n    - results/profile\n", "    - results/profile\n"),
        ("- data/code.yaml: [report]", "- data/code.yaml: [readme]"),
        ("[seeds, strategies, timings]", "[seeds, strategies]"),
        ("stages.validate ${key}", "stages.validate --x ${key}"),
    ):
        path = root / "dvc.yaml"
        assert old in path.read_text(), f"dvc.yaml no longer holds {old!r}"
        path.write_text(path.read_text().replace(old, new, 1))
    reported = "\n".join(differences(dvc_jobs(root), snakemake))
    for words in ("collect: inputs", "collect: parameters", "report: code", "only in dvc.yaml"):
        assert words in reported
