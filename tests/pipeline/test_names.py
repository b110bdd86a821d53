"""No text of params.yaml is a command or a path of other files, whatever stages are cached."""

import re
import shutil
from pathlib import Path

import pytest
import yaml

from tests.pipeline.conftest import copy
from tests.pipeline.workspace import ROOT, copy_project, run

HOSTILE = [
    "$(touch${IFS}X)",
    "`touch X`",
    "';touch X;'",
    '";touch X;"',
    "a;touch X;a",
    "a\ntouch X\n",
    "a\u2028touch X\u2028",
    "--help;touch X",
    "\\';touch X;'",
    "../../data/mine",
]
STAGES = {"runs": "train@{}-0", "timings": "timing@{}", "rounds": "propose@{}"}


@pytest.fixture(scope="module")
def tokenized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both stages before all names are cached, as after any change of a later stage."""
    root = copy_project(tmp_path_factory.mktemp("tokenized") / "project")
    run(root, "dvc", "repro", "plans", "tokenize")
    return root


@pytest.fixture
def attacked(tokenized: Path, tmp_path: Path) -> Path:
    root = copy(tokenized, tmp_path / "project")
    # what the stages with names would wait for
    measured = "results.jsonl", "calibration.json", "hardware.json", "timings/one-rank.jsonl"
    for path in (*(f"results/{name}" for name in measured), "data/mine.jsonl"):
        (root / path).parent.mkdir(exist_ok=True, parents=True)
        (root / path).write_text("mine\n")
    return root


def rename(root: Path, section: str, name: str) -> None:
    """Give the first entry of a section a name of the attacker's."""
    tree = yaml.safe_load((root / "params.yaml").read_text())
    if section == "runs":
        tree["strategies"][name] = tree["strategies"][tree["runs"][0]]
        tree["runs"][0] = name
    else:
        tree[section] = {name: next(iter(tree[section].values()))}
    (root / "params.yaml").write_text(yaml.safe_dump(tree, allow_unicode=True))


def unharmed(root: Path) -> bool:
    return not (root / "X").exists() and (root / "data/mine.jsonl").read_text() == "mine\n"


@pytest.mark.parametrize("section", STAGES)
def test_dvc_refuses_a_hostile_name_before_it_is_used(attacked: Path, section: str) -> None:
    rename(attacked, section, HOSTILE[0])
    done = run(attacked, "dvc", "repro", STAGES[section].format(HOSTILE[0]), check=False)
    assert done.returncode != 0 and unharmed(attacked)
    assert "check: error: " in done.stdout and "string should match pattern" in done.stdout


@pytest.mark.parametrize("section", STAGES)
def test_dvc_refuses_it_without_the_stages_before(attacked: Path, section: str) -> None:
    rename(attacked, section, HOSTILE[0])
    stage = STAGES[section].format(HOSTILE[0])
    done = run(attacked, "dvc", "repro", "--single-item", stage, check=False)
    assert done.returncode != 0 and unharmed(attacked)
    assert "names: error: " in done.stdout


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("section", STAGES)
def test_no_hostile_name_is_executed(attacked: Path, tmp_path: Path, section: str) -> None:
    """Every name in every section, and with either option in one of two sections."""
    for number, name in enumerate(HOSTILE):
        root = copy(attacked, tmp_path / str(number))
        rename(root, section, name)
        alone = (number + list(STAGES).index(section)) % 2 == 0
        # with the name of the stage the user says what to remove
        options = ["--single-item"] * alone + [STAGES[section].format(name)]
        done = run(root, "timeout", "60", "dvc", "repro", *options, check=False)
        assert done.returncode != 0, f"{name!r}: {done.stdout}"
        assert not (root / "X").exists() if alone else unharmed(root), f"{name!r}: {done.stdout}"
        shutil.rmtree(root)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [HOSTILE[0], HOSTILE[5]])
@pytest.mark.parametrize("section", STAGES)
def test_no_hostile_name_is_executed_where_errors_are_ignored(
    attacked: Path, section: str, name: str
) -> None:
    """DVC goes on to stages after the failed check, and then removes outputs at any path."""
    rename(attacked, section, name)
    done = run(attacked, "timeout", "60", "dvc", "repro", "--ignore-errors", check=False)
    assert unharmed(attacked), done.stdout


@pytest.mark.long
@pytest.mark.parametrize("name", HOSTILE[:2])
def test_an_experiment_of_dvc_executes_no_name(attacked: Path, name: str) -> None:
    value = f"runs=['{name}']"
    done = run(attacked, "dvc", "exp", "run", "-S", value, "-S", "baseline=x", check=False)
    assert done.returncode != 0 and unharmed(attacked)


@pytest.mark.parametrize(
    "stage, allowed",
    [
        ("train@fsdp2-int8-0", True),
        ("../dvc.yaml:propose@1", True),
        ("", False),
        ("train@a b-0", False),
        ("x:train@a", False),
        ("train@$(touch X):train@a", False),
        ("train@a\n", False),
    ],
)
def test_a_stage_with_names_runs_only_under_a_plain_one(stage: str, allowed: bool) -> None:
    done = run(ROOT, "env", f"DVC_STAGE={stage}", "python", "-m", "stages.names", check=False)
    assert (done.returncode, len(done.stdout.splitlines())) == ((0, 0) if allowed else (2, 1))


def test_every_command_with_a_name_comes_after_the_check_of_names() -> None:
    stages = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"].values()
    for stage in stages:
        commands = stage.get("do", stage)["cmd"]
        if "${" in str(commands):
            assert commands[0] == "exec python -m stages.names"
            assert all(command.startswith("exec ") for command in commands[1:])
    rules = "".join(path.read_text() for path in (ROOT / "workflow/rules").glob("*.smk"))
    shell = "".join(line for line in rules.splitlines() if "python -m stages." in line)
    assert all(name.endswith(":q") for name in re.findall(r"{wildcards\.(.*?)}", shell))
