"""The workflow is what Snakemake's linter asks for, and names the image of its jobs."""

from pathlib import Path

import pytest

from tests.pipeline.workspace import copy_project, environment, run

APPTAINER = """#!/bin/sh
# writes down the image, and runs the command of the job outside of it
case "$1" in --version) echo apptainer version 1.4.0; exit;; esac
until [ "${1%.sif}" != "$1" ]; do shift; done
test -f "$1" || exit 255
echo "$1" >> images
shift
exec "$@"
"""


def test_the_linter_finds_nothing(tmp_path: Path) -> None:
    root = copy_project(tmp_path / "project")
    said = run(root, "snakemake", "--lint").stdout
    assert "your workflow is in a good condition" in said


@pytest.mark.long
def test_jobs_run_in_the_image(tmp_path: Path) -> None:
    root = copy_project(tmp_path / "project")
    tool = tmp_path / "bin/apptainer"
    tool.parent.mkdir()
    tool.write_text(APPTAINER)
    tool.chmod(0o755)
    path = f"PATH={tool.parent}:{environment()['PATH']}"
    command = ("env", path, "snakemake", "--cores", "1", "--sdm", "apptainer", "--")
    assert run(root, *command, "data/corpus.json", check=False).returncode != 0, "there is no image"
    (root / "shardlab.sif").touch()
    run(root, *command, "data/corpus.json")
    assert {Path(line).name for line in (root / "images").read_text().split()} == {"shardlab.sif"}
    assert (root / "data/corpus.json").is_file()
