"""Both tools make everything, then nothing; after a change, just what depends on it."""

import json
import re
from pathlib import Path

import pytest
import yaml

from tests.pipeline.conftest import copy
from tests.pipeline.graphs import pending, snakemake_jobs
from tests.pipeline.workspace import copy_project, run, set_params, stage_outputs

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

UP_TO_DATE = "Data and pipelines are up to date."


def executed(output: str) -> set[str]:
    """Stages, less `exec python -m shardlab `, that `dvc repro` ran."""
    return set(re.findall(r"^> exec python -m shardlab (.*)$", output, re.MULTILINE))


def every(root: Path, *names: str) -> set[str]:
    """Commands of all jobs of these rules."""
    jobs = snakemake_jobs(root).values()
    return {j.command.removeprefix("exec python -m shardlab ") for j in jobs if j.name in names}


def test_snakemake_is_up_to_date_after_a_run(finished: Path) -> None:
    assert pending(finished) == set()
    assert "Nothing to be done" in run(finished, "snakemake", "--cores", "2").stdout


def test_dvc_accepts_results_of_snakemake(recorded: Path) -> None:
    assert run(recorded, "dvc", "status").stdout.strip() == UP_TO_DATE
    assert executed(run(recorded, "dvc", "repro").stdout) == set()
    assert pending(recorded) == set()


def test_dvc_makes_everything_from_nothing(tmp_path: Path) -> None:
    root = copy_project(tmp_path / "project")
    said = run(root, "dvc", "repro").stdout
    jobs = snakemake_jobs(root)
    assert executed(said) == {command.removeprefix("exec python -m shardlab ") for command in jobs}
    # the last stage counts those before it
    assert re.search(rf"^all +{len(jobs) - 1} .*\nreport: results/report/report.html$", said, re.M)
    assert UP_TO_DATE in run(root, "dvc", "repro").stdout
    run(root, "snakemake", "--touch", "-F", "--cores", "1", "all")
    assert pending(root) == set()
    assert run(root, "dvc", "status").stdout.strip() == UP_TO_DATE


def test_git_sees_small_results_only(recorded: Path) -> None:
    """And DVC adds no .gitignore of its own: the one of the project names all that it caches."""
    seen = run(recorded, "git", "status", "--porcelain", "--untracked-files=all").stdout
    paths = {line[3:] for line in seen.splitlines()}
    assert all(re.match(r"dvc\.lock|results/", path) for path in paths), paths
    kinds = {Path(path).suffix for path in paths if path.startswith("results/")}
    assert kinds == {".json", ".jsonl", ".csv", ".md"}
    assert not any(path.endswith("events.jsonl") for path in paths)
    # the lock grows with stages and their folders of code, whatever the results are
    sizes = {path: (recorded / path).stat().st_size for path in paths - {"dvc.lock"}}
    assert max(sizes.values()) < 100_000, sizes


def test_a_fresh_clone_pulls_all_results(workspace: Path, tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    user = ["-c", "user.name=test", "-c", "user.email=test@localhost"]
    run(workspace, "git", "add", "--all")
    run(workspace, "git", *user, "commit", "-qm", "results")
    run(tmp_path, "git", "clone", "-q", str(workspace), str(clone))
    assert (clone / "results/results.jsonl").exists()
    # Snakemake knows nothing of results that came by git
    assert len(pending(clone)) == len(snakemake_jobs(clone))
    for root, command in (workspace, "push"), (clone, "pull"):
        run(root, "dvc", "remote", "add", "--local", "-d", "shared", str(tmp_path / "remote"))
        run(root, "dvc", command)
    assert run(clone, "dvc", "status").stdout.strip() == UP_TO_DATE
    model = "results/train/fsdp2/seed0/final_model/model.safetensors"
    assert (clone / model).read_bytes() == (workspace / model).read_bytes()


def test_a_codecs_parameter_repeats_its_run_and_what_follows(workspace: Path) -> None:
    before = (workspace / "params.yaml").read_text()
    set_params(workspace, **{"strategies__fsdp2-int8__gradients__codec": "int8:group=64"})
    of_run = {f"{stage} fsdp2-int8" for stage in ("profile", "validate")}
    of_run |= {"train --run fsdp2-int8 --seed 0"}
    of_strategies = ["timing", "calibrate", "estimate", "params"]
    after = ["collect", "forecast", "propose", "trial", "decide", "report"]
    rest = every(workspace, *of_strategies, *after)
    assert pending(workspace) == of_run | rest
    trained = ("dvc", "repro", "train@fsdp2-0", "train@fsdp2-int8-0")
    ran = executed(run(workspace, *trained).stdout)
    assert ran == {"params", "train --run fsdp2-int8 --seed 0"}
    # and back: DVC remembers what every stage wrote
    (workspace / "params.yaml").write_text(before)
    assert executed(run(workspace, *trained).stdout) == set()
    # and there again: of what it ran itself, too
    set_params(workspace, **{"strategies__fsdp2-int8__gradients__codec": "int8:group=64"})
    assert executed(run(workspace, *trained).stdout) == set()


def test_one_more_round_runs_alone(workspace: Path) -> None:
    first = json.loads((workspace / "results/rounds/1/history.json").read_text())
    rounds = yaml.safe_load((workspace / "params.yaml").read_text())["rounds"]
    rounds["2"] = {"after": "results/rounds/1/history.json"}
    set_params(workspace, rounds=rounds)
    new = {"params", "propose 2", "trial 2", "decide 2", "report"}
    assert pending(workspace) == new
    ran = executed(run(workspace, "dvc", "repro").stdout)
    assert ran == new
    second = json.loads((workspace / "results/rounds/2/history.json").read_text())
    assert second["rounds"][:-1] == first["rounds"]
    run(workspace, "snakemake", "--touch", "-F", "--cores", "1", "all")
    assert pending(workspace) == set()


def test_a_change_of_the_report_repeats_the_report_alone(workspace: Path) -> None:
    with (workspace / "shardlab/report/tables.py").open("a") as file:
        file.write("\nANOTHER = 1\n")
    assert pending(workspace) == {"params", "report"}
    assert executed(run(workspace, "dvc", "repro").stdout) == {"params", "report"}


def test_restored_results_are_not_made_again(workspace: Path) -> None:
    model = workspace / "results/train/fsdp2/seed0/final_model/model.safetensors"
    kept = model.read_bytes()
    model.unlink()
    assert "train --run fsdp2 --seed 0" in pending(workspace)
    run(workspace, "dvc", "checkout")
    assert model.read_bytes() == kept
    assert pending(workspace) == set()


def test_on_a_cluster_the_machine_is_the_partition(finished: Path, tmp_path: Path) -> None:
    """Whichever machine Snakemake starts on."""
    root = copy(finished, tmp_path / "project")
    command = ["taskset", "-c", "0", "snakemake", "--cores", "1", "--default-resources"]
    run(root, *command[3:], "slurm_partition=one", "--touch", "-F")
    assert "Nothing to be done" in run(root, *command, "slurm_partition=one", "-n").stdout
    assert "rule timing:" in run(root, *command, "slurm_partition=two", "-n").stdout


def test_the_tools_show_the_results(workspace: Path) -> None:
    metrics = json.loads(run(workspace, "dvc", "metrics", "show", "--json").stdout)
    shown = metrics[""]["data"]["results/report/summary.json"]["data"]
    summary = json.loads((workspace / "results/report/summary.json").read_text())
    for figures in summary["runs"].values():
        # a single seed has no intervals, and DVC leaves out what is null
        del figures["ppl_ratio_low"], figures["ppl_ratio_high"]
    assert shown == summary

    run(workspace, "dvc", "plots", "show")
    page = (workspace / "dvc_plots/index.html").read_text()
    assert all(f"{name}.png" in page for name in ("loss", "crossover", "bytes_quality"))
    drawn = "Training loss, mean over seeds", "Step time of the comparison", "Bytes on the wire"
    assert all(title in page for title in drawn)

    graph = run(workspace, "dvc", "dag", "--mermaid").stdout
    assert "train@fsdp2-0" in graph
    assert "report" in graph

    run(workspace, "snakemake", "--report", "page.html")
    page = (workspace / "page.html").read_text()
    assert all(name in page for name in ("headline.md", "comparison.csv", "loss.svg"))


def test_another_experiment_has_a_folder_of_its_own(tmp_path: Path) -> None:
    root = copy_project(tmp_path / "project")
    (root / "mine").mkdir()
    (root / "params.yaml").rename(root / "mine/tiny.yaml")
    run(root, "make", "experiments/tiny", "PARAMS=mine/tiny.yaml")
    folder = root / "experiments/tiny"
    run(folder, "snakemake", "--cores", "1", "--", "data/corpus.json")
    corpus = (folder / "data/corpus.json").read_bytes()
    done = executed(run(folder, "dvc", "repro", "prepare").stdout)
    assert done == {"params", "prepare"}
    assert (folder / "data/corpus.json").read_bytes() == corpus
    assert [path.name for path in (root / ".dvc").iterdir() if path.name == "cache"] == ["cache"]
    assert stage_outputs(root) == []
    assert (folder / ".shardlab.lock").samefile(root / ".shardlab.lock")
    lost = run(
        root, "make", "run", "PARAMS=mine/lost.yaml", "--old-file=.venv/.project", check=False
    )
    assert lost.returncode == 2 and "no such file: mine/lost.yaml" in lost.stdout
