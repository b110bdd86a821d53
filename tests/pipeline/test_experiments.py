"""Folders of experiments whose small results are committed."""

import re
import subprocess
from pathlib import Path

import pytest

from shardlab.core.errors import UserError
from stages.folder import make_folder
from tests.pipeline.workspace import ROOT, copy_project, run

PUBLISHED = ("62m", "codecs", "fsdp", "islands", "judge")
SMALL = [
    "README.md",
    "results/answers/0123abcd.json",
    "results/report/headline.md",
    "results/report/plots/svg/loss.svg",
    "results/report/summary.json",
    "results/report/tables.md",
    "results/results.jsonl",
    "results/rounds/1/trial.json",
    "results/timings/two-ranks.jsonl",
    "results/tune/stock.jsonl",
]
LEFT_OUT = [
    ".dvc/config",
    "Snakefile",
    "data/tokens/train.bin",
    "params.yaml",
    "logs/params.log",
    "results/report/plots/png/loss.png",
    "results/report/report.html",
    "results/rounds/1/runs/arm/seed0/events.jsonl",
    "results/train/fsdp2/seed0/final_model/model.safetensors",
    "shardlab",
]


@pytest.mark.parametrize("name", PUBLISHED)
def test_git_keeps_the_small_results_alone(name: str) -> None:
    """Of other experiments it keeps nothing."""
    folder = f"experiments/{name}"
    paths = [f"{of}/{path}" for of in (folder, "experiments/mine") for path in SMALL + LEFT_OUT]
    command = ["git", "check-ignore", "--no-index", *paths]
    ignored = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.split()
    assert [path for path in paths if path not in ignored] == [f"{folder}/{p}" for p in SMALL]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_experiment_is_linked_and_names_its_parameters(name: str) -> None:
    page = (ROOT / "experiments" / name / "README.md").read_text()
    assert f"make run PARAMS=params/{name}.yaml" in page and (ROOT / f"params/{name}.yaml").exists()
    results = (ROOT / "experiments/README.md").read_text()
    assert f"({name}/README.md)" in results
    assert f"`make run PARAMS=params/{name}.yaml`" in results
    for link in re.findall(r"\]\(([^)#]+)\)", page):
        assert (ROOT / "experiments" / name / link).resolve().exists(), link


def test_a_folder_shares_the_pipeline_and_changes_only_when_parameters_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("Snakefile").write_text("a pipeline")
    folder = Path("experiments/mine")
    path = folder / "params.yaml"
    make_folder("seeds: [0]", folder, Path())
    assert (folder / "Snakefile").read_text() == "a pipeline"
    assert (folder / ".dvc/config").read_text().endswith(" dir = ../../../.dvc/cache\n")
    written_at = path.stat().st_mtime_ns
    make_folder("seeds: [0]", folder, Path())
    assert path.stat().st_mtime_ns == written_at
    make_folder("seeds: [1]", folder, Path())
    assert path.read_text() == "seeds: [1]"


def test_a_folder_is_of_one_file_of_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder, one, other = Path("experiments/one"), Path("params/one.yaml"), Path("one.yaml")
    Path("params").mkdir()
    for path in (one, other):
        path.write_text("seeds: [0]")
    make_folder(one, folder, Path())
    assert (folder / "params.yaml").readlink() == Path("../../params/one.yaml")
    with pytest.raises(UserError, match=r"experiments/one is of .*/params/one\.yaml: rename one\."):
        make_folder(other, folder, Path())
    one.rename("params/renamed.yaml")
    make_folder(other, folder, Path())
    assert (folder / "params.yaml").samefile(other)


@pytest.mark.long
def test_a_clone_goes_on_in_the_folder_of_committed_results(tmp_path: Path) -> None:
    """Links are not committed: `make` writes them, and leaves the page as it is."""
    root = copy_project(tmp_path / "project")
    folder = root / "experiments/quick"
    (folder / "results").mkdir(parents=True)
    page = "# A page\n"
    (folder / "README.md").write_text(page)
    (folder / "results/results.jsonl").write_text("{}\n")
    (root / "params").mkdir()
    (root / "params.yaml").rename(root / "params/quick.yaml")
    for _ in range(2):
        # -o: the environment is there
        run(root, "make", "-o", ".venv/.project", "experiments/quick", "PARAMS=params/quick.yaml")
    assert (folder / "README.md").read_text() == page
    run(folder, "snakemake", "--cores", "1", "--", "data/corpus.json")
    assert (folder / "data/corpus.json").exists()
    assert "collect" in run(folder, "snakemake", "-n", "--cores", "1").stdout
