"""No text of params.yaml is a command or a path of other files, whatever stages are cached."""

import re
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
STAGES = {
    "strategies": "train@{}-0",
    "timings": "timing@{}",
    "rounds": "propose@{}",
    "inputs": "content@{}",
}


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
    first = next(iter(tree[section].values()), "data/mine.jsonl")
    others = tree["strategies"] if section == "strategies" else {}
    tree[section] = {name: first, **others}
    (root / "params.yaml").write_text(yaml.safe_dump(tree, allow_unicode=True))


def unharmed(root: Path) -> bool:
    return not (root / "X").exists() and (root / "data/mine.jsonl").read_text() == "mine\n"


@pytest.mark.long
@pytest.mark.parametrize("section", STAGES)
def test_dvc_refuses_a_hostile_name_before_it_is_used(attacked: Path, section: str) -> None:
    rename(attacked, section, HOSTILE[0])
    done = run(attacked, "dvc", "repro", STAGES[section].format(HOSTILE[0]), check=False)
    assert done.returncode != 0 and unharmed(attacked)
    assert "plans: error: " in done.stdout and "string should match pattern" in done.stdout


@pytest.mark.parametrize("section", STAGES)
def test_dvc_refuses_it_without_the_stages_before(attacked: Path, section: str) -> None:
    """No plan has this name."""
    rename(attacked, section, HOSTILE[0])
    stage = STAGES[section].format(HOSTILE[0])
    done = run(attacked, "dvc", "repro", "--single-item", stage, check=False)
    assert done.returncode != 0 and unharmed(attacked)
    assert "Running stage" not in done.stdout


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", range(len(HOSTILE)))
def test_no_hostile_name_is_executed(attacked: Path, number: int) -> None:
    """In one of the sections, which have names of one type: see the tests above."""
    name, section = HOSTILE[number], [*STAGES][number % len(STAGES)]
    rename(attacked, section, name)
    for alone in (False, True):
        # with the name of the stage the user says what to remove
        options = ["--single-item"] * alone + [STAGES[section].format(name)]
        done = run(attacked, "timeout", "60", "dvc", "repro", *options, check=False)
        assert done.returncode != 0, done.stdout
        assert not (attacked / "X").exists() if alone else unharmed(attacked), done.stdout


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("section", "name"),
    [*zip(STAGES, (HOSTILE[0], HOSTILE[5], HOSTILE[9], HOSTILE[1]), strict=True)],
)
def test_no_hostile_name_is_executed_where_errors_are_ignored(
    attacked: Path, section: str, name: str
) -> None:
    """DVC goes on to stages after the failed check, and then removes outputs at any path."""
    rename(attacked, section, name)
    done = run(attacked, "timeout", "60", "dvc", "repro", "--ignore-errors", check=False)
    assert unharmed(attacked), done.stdout


@pytest.mark.long
def test_an_experiment_of_dvc_executes_no_name(attacked: Path) -> None:
    value = f"inputs={{{HOSTILE[0]}: data/mine.jsonl}}"
    done = run(attacked, "dvc", "exp", "run", "-S", value, "-S", "baseline=x", check=False)
    assert done.returncode != 0 and unharmed(attacked)


def test_every_stage_with_a_name_needs_a_file_with_this_name() -> None:
    """Which only a stage before it writes, for names that the schema allows."""
    stages = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"].values()
    named = [each.get("do", each) for each in stages if "matrix" in each or "foreach" in each]
    assert len(named) > 5
    for stage in named:
        [name] = {*re.findall(r"\$\{(?:item\.run|key)\}", stage["cmd"])}
        assert any(name in dep for dep in stage["deps"])
        assert stage["cmd"].startswith("exec python -m stages.")
    rules = "".join(path.read_text() for path in (ROOT / "workflow/rules").glob("*.smk"))
    shell = "".join(line for line in rules.splitlines() if "python -m stages." in line)
    assert all(name.endswith(":q") for name in re.findall(r"{wildcards\.(.*?)}", shell))
