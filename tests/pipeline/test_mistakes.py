"""Mistakes of the user are one line, and good files are kept."""

import json
import shutil
import sys
from functools import partial
from pathlib import Path

import pytest

from shardlab.core.errors import UserError
from stages import estimate, prepare, propose, timing, tokenize, train, trial, validate
from stages.sections import Sections
from tests.pipeline.workspace import ROOT, copy_project, run, set_params, stage_outputs


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return copy_project(tmp_path / "project")


MISTAKES = [
    ({"train__stepz": 5}, "train.stepz: unknown key; did you mean 'steps'?"),
    (
        {"baseline": "fsdp", "timings__two-ranks__runs": ["fsdp2", "ddp"]},
        "baseline: 'fsdp' is no run; did you mean 'fsdp2'?\n"
        "timings.two-ranks.runs.1: 'ddp' is no strategy; did you mean 'fsdp2'?",
    ),
]


@pytest.mark.parametrize("changes, message", MISTAKES)
def test_snakemake_reports_invalid_params(
    project: Path, changes: dict[str, object], message: str
) -> None:
    set_params(project, **changes)
    done = run(project, "snakemake", "--cores", "1", check=False)
    assert done.returncode != 0
    assert [line for line in done.stdout.splitlines() if "profile profiles/" not in line] == [
        f"params.yaml: {line}" for line in message.split("\n")
    ]
    assert stage_outputs(project) == []


@pytest.mark.parametrize("changes, message", MISTAKES[:1])
def test_every_stage_reports_invalid_params(
    project: Path, changes: dict[str, object], message: str
) -> None:
    """Of keys that are not its own too, so under DVC nothing runs either."""
    set_params(project, **changes)
    done = run(project, "python", "-m", "shardlab", "prepare", check=False)
    assert (done.returncode, done.stdout) == (2, f"prepare: error: {message}\n")
    assert stage_outputs(project) == []


def test_under_dvc_a_failed_stage_shows_its_log(project: Path) -> None:
    set_params(project, train__stepz=5)
    error = f"params: error: {MISTAKES[0][1]}\n"
    said = run(project, "dvc", "repro", "tokenize", check=False).stdout
    assert f"\n{error}log: logs/params.log\n" in said
    assert (project / "logs/params.log").read_text().endswith(error)
    assert stage_outputs(project) == []


def test_a_missing_section_is_named(project: Path) -> None:
    path = project / "params.yaml"
    path.write_text(path.read_text().replace("baseline:", "# baseline:"))
    done = run(project, "snakemake", "-n", check=False)
    assert done.returncode != 0
    assert "baseline: missing from params.yaml" in done.stdout


@pytest.mark.long
def test_parameters_that_would_not_reach_the_stages_are_refused(project: Path) -> None:
    done = run(project, "snakemake", "-n", "--config", "baseline=fsdp2-int8", check=False)
    assert done.returncode != 0
    assert "or change params.yaml" in done.stdout
    (project / "elsewhere").mkdir()
    done = run(project, "snakemake", "-n", "--directory", "elsewhere", check=False)
    assert done.returncode != 0
    assert done.stdout.splitlines()[-1].startswith(f"{project}/elsewhere: no folder of experiments")


@pytest.mark.long
def test_jobs_run_by_the_python_of_snakemake(project: Path) -> None:
    """In an environment that is not activated."""
    snakemake = str(Path(sys.executable).with_name("snakemake"))
    run(project, "env", "PATH=/usr/bin:/bin", snakemake, "--cores", "1", "data/source.json")


@pytest.mark.long
def test_bad_source_keeps_the_good_corpus(tmp_path: Path) -> None:
    root = copy_project(tmp_path / "project")
    set_params(root, data={"source": "json", "path": "mine.json"}, inputs={"mine": "mine.json"})
    words = [{"id": str(i), "title": f"t{i}", "text": "some words " * 30} for i in range(20)]
    (root / "mine.json").write_text(json.dumps(words))
    run(root, "snakemake", "--cores", "1", "--", "data/corpus.json")
    good = {name: (root / "data" / name).read_bytes() for name in ("corpus.json", "source.json")}
    cut = len(json.dumps(words[:7])) + 20
    (root / "mine.json").write_text(json.dumps(words)[:cut])
    again = ["snakemake", "--cores", "1", "--", "data/corpus.json"]
    refused = run(root, *again, check=False)
    assert refused.returncode != 0
    assert "mine.json: record 8: " in refused.stdout
    assert good == {name: (root / "data" / name).read_bytes() for name in good}


def test_logs_neither_fail_a_stage_nor_hide_its_error(project: Path) -> None:
    (project / "logs").touch()
    done = run(project, "python", "-m", "shardlab", "prepare")
    assert done.stdout.count("\n") == 2 and "logs/prepare.log: no log: [Errno" in done.stdout
    assert (project / "data/source.json").is_file()
    done = run(
        project, "python", "-m", "shardlab", "prepare", "--set", "data.documents=0", check=False
    )
    log, error = done.stdout.splitlines()
    assert done.returncode == 2
    assert error.startswith("prepare: error: data.documents: ")
    assert log.startswith("logs/prepare.log: no log: [Errno")


def test_runs_too_short_for_their_codec_are_named(project: Path) -> None:
    """12 steps at a density of 5 %, and three exchanges at 10 %."""
    codec = "strategies.fsdp2-int8.gradients.codec=topk:density=0.05"
    rare = "strategies.rare={engine: ddp, sync: {every: 4, codec: 'topk:density=0.1'}}"
    said = run(project, "python", "-m", "shardlab", "params", "--set", codec, "--set", rare).stdout
    short, rarely, valid = said.splitlines()
    assert "warning: fsdp2-int8: topk:density=0.05 sends at most 60 % of the gradients" in short
    assert "warning: rare: topk:density=0.1 sends at most 30 % of the outer gradients" in rarely
    assert "valid" in valid


def test_data_of_other_parameters_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stage that was typed with --set has made them."""
    shutil.copy(ROOT / "params/quick.yaml", tmp_path / "params.yaml")
    monkeypatch.chdir(tmp_path)
    fewer = "data.documents=120"
    prepare.main(Sections(overrides=[fewer]))
    for stage in (tokenize.main, partial(train.main, run="fsdp2"), partial(trial.main, number="1")):
        with pytest.raises(UserError, match=r"source\.json: made with data\.documents 120"):
            stage(Sections())
    tokenize.main(Sections(overrides=[fewer]))
    smaller = Sections(overrides=[fewer, "tokenize.vocabulary=300"])
    for stage in (
        partial(train.main, run="fsdp2"),
        partial(timing.main, name="two-ranks"),
        partial(validate.main, run="fsdp2"),
        estimate.main,
        partial(propose.main, number="1"),
        partial(trial.main, number="1"),
    ):
        with pytest.raises(UserError, match=r"manifest\.json: made with tokenize\.vocab"):
            stage(smaller)


def test_results_of_other_parameters_have_a_folder_of_their_own(project: Path) -> None:
    shutil.copy(project / "params.yaml", project / "other.yaml")
    command = ["python", "-m", "shardlab", "prepare", "--params"]
    done = run(project, *command, "other.yaml", check=False)
    assert done.returncode == 2
    assert "make experiments/other PARAMS=other.yaml makes a folder" in done.stdout
    assert not (project / "data/source.json").exists()
    run(project, *command, "./params.yaml")
