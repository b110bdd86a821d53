"""The workflow is what Snakemake's linter asks for, and names the image of its jobs."""

from pathlib import Path

from tests.pipeline.workspace import copy_project, run


def test_the_linter_finds_nothing(tmp_path: Path) -> None:
    root = copy_project(tmp_path / "project")
    said = run(root, "snakemake", "--lint").stdout
    assert "your workflow is in a good condition" in said
