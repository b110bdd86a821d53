"""Modules of users under `codecs` in params.yaml register codecs before strategies are read."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import Command

SPEC = """
from typing import Literal
import shardlab

class MineSpec(shardlab.CodecSpec):
    name: Literal["{name}"] = "{name}"
    digits: int = 3

shardlab.register("{name}", MineSpec, "user_codecs.later:Mine")
"""
STRATEGIES = {"mine": {"gradients": {"codec": "mine:digits=2", "error_feedback": True}}}
READ = """
import sys
from shardlab.core.errors import UserError
from shardlab.config.parameters import Parameters
try:
    params = Parameters("params.json", sys.argv[1:])
except UserError as error:
    sys.exit(str(error))
print(*(strategy.hash() for strategy in params("strategies").values()), "torch" in sys.modules)
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "user_codecs").mkdir()
    return tmp_path


def read(project: Path, tree: dict, *overrides: str) -> str:
    """Reads parameters in a process of its own: what is registered stays registered."""
    (project / "params.json").write_text(json.dumps(tree))

    def call() -> None:
        os.chdir(project)
        sys.path.insert(0, str(project))  # before the project of the tests
        sys.argv = ["read", *overrides]
        exec(READ, {})

    command = Command(project / f"command{len(list(project.iterdir()))}", call)
    assert command.wait() in (0, 1)
    return command.said()


def test_a_strategy_with_a_registered_codec_has_a_stable_hash(project):
    (project / "user_codecs/mine.py").write_text(SPEC.format(name="mine"))
    (project / "user_codecs/other.py").write_text(SPEC.format(name="other"))
    expected = "0cd2d393dd73d50f"
    for modules in (
        ["user_codecs.mine"],
        ["user_codecs/mine.py", "user_codecs.other"],
        ["user_codecs.other", "user_codecs.mine", "user_codecs.mine"],
    ):
        # the order of keys in the file is of no matter either
        done = read(project, {"strategies": STRATEGIES, "codecs": modules})
        assert done.split()[0] == expected, done
    done = read(project, {"strategies": STRATEGIES}, 'codecs=["user_codecs.mine"]')
    assert done.split()[0] == expected, done


def test_a_strategy_with_a_registered_codec_needs_no_torch(project):
    (project / "user_codecs/mine.py").write_text(SPEC.format(name="mine"))
    tree = {"strategies": STRATEGIES, "codecs": ["user_codecs.mine"]}
    (project / "params.json").write_text(json.dumps(tree))
    command = [sys.executable, "-c", READ]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("0cd2d393dd73d50f False\n", "")


@pytest.mark.parametrize(
    ("module", "text", "listed", "words"),
    [
        ("mine", SPEC, [], "strategies.mine.gradients.codec: unknown codec 'mine'; "),
        ("mine", SPEC, "user_codecs.mine", "codecs: "),
        ("mine", SPEC, ["user_codecs.mint"], "did you mean 'user_codecs.mine'?"),
        ("mine", "", ["user_codecs.mine"], "codecs.0: user_codecs.mine registers no codec: call"),
        ("mine", "import absent", ["user_codecs.mine"], "No module named 'absent'"),
        ("mine", "1/0", ["user_codecs.mine"], "ZeroDivisionError: division by zero"),
        ("mine", SPEC.replace("{name}", "int8"), ["user_codecs.mine"], "'int8' exists already"),
        ("../elsewhere", SPEC, ["elsewhere"], "elsewhere lies outside user_codecs/"),
        (None, "", ["mine"], "no module 'mine'; create user_codecs/NAME.py"),
    ],
)
def test_a_module_that_cannot_serve_is_refused_in_one_line(project, module, text, listed, words):
    if module:
        path = (project / "user_codecs" / module).with_suffix(".py")
        path.write_text(text.format(name="mine"))
    done = read(project, {"strategies": STRATEGIES, "codecs": listed})
    assert words in done and done.count("\n") == 1, done
