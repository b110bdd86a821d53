"""The command line: its table, its help, and what it says of packages that are missing."""

import json
import os
import shlex
import signal
import subprocess
import sys
from importlib import import_module
from inspect import signature

import pytest

import shardlab
from shardlab.cli import COMMANDS, STAGES, main, parse
from shardlab.models.shapes import gpt2_config
from tests.commands import ROOT, typed
from tests.pipeline.test_light_install import packages

ALONE = """
import sys

for name in ({absent}):
    sys.modules[name] = None  # as if it were not installed
from shardlab.cli import main

main(sys.argv[1:])
"""


def without(absent, *arguments):
    """The command in a process in which packages are missing."""
    script = ALONE.format(absent="".join(f"{name!r}, " for name in absent))
    return subprocess.run(
        [sys.executable, "-c", script, *arguments], cwd=ROOT, capture_output=True, text=True
    )


def test_the_help_names_every_command_and_needs_no_package():
    done = without(["torch", "numpy", "pydantic", "yaml", "pandas", "transformers"], "--help")
    assert (done.returncode, done.stderr) == (0, "")
    said = " ".join(done.stdout.split())
    for name, command in COMMANDS.items():
        assert f" {name} {command.help}" in said


def test_the_version_needs_no_package():
    done = without(["torch", "numpy", "pydantic", "transformers"], "--version")
    assert (done.returncode, done.stdout) == (0, f"shardlab {shardlab.__version__}\n")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_an_example_in_its_help(name, capsys):
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert ended.value.code == 0 and said.startswith(f"usage: shardlab {name} ")
    assert said.endswith(f"shardlab {name} {COMMANDS[name].example}".rstrip())


def test_help_of_a_plan_needs_no_torch():
    done = without(["torch", "transformers", "pandas", "scipy"], "plan", "--help")
    assert done.returncode == 0 and "llama-3-8b" in done.stdout, done.stderr


@pytest.mark.parametrize("name", STAGES)
def test_every_stage_takes_the_options_of_its_command(name):
    """Its function has the parameters, then the options of the command."""
    options = parse(name, shlex.split(STAGES[name].example))
    function = import_module(f"stages.{name}").main
    signature(function).bind(
        None, **{k: v for k, v in options.items() if k not in ("params", "overrides")}
    )


@pytest.mark.parametrize(
    "short, full",
    [
        (
            "--batch 2 --seq 64 --dtype bf16",
            "--batch-size 2 --sequence-length 64 --param-dtype bf16",
        ),
        ("--checkpointing full", "--activation-checkpointing full"),
    ],
)
def test_short_flags_are_aliases_of_the_keys_of_params(short, full):
    plan = ["tiny", "--device", "l4"]
    assert parse("plan", [*plan, *short.split()]) == parse("plan", [*plan, *full.split()])


@pytest.mark.parametrize(
    "arguments, error",
    [
        (["trian"], "shardlab: error: no command 'trian'; did you mean 'train' or 'trial'?"),
        (["train", "--run", "a", "b"], "train: error: unrecognized arguments: b; see shardlab t"),
        (["train", "--run", "a", "--seed", "x"], "train: error: argument --seed: invalid int val"),
        (
            ["search", "--rank", "2"],
            "search: error: the following arguments are required: --link; s",
        ),
        (["attach"], "attach: error: the following arguments are required: --demo; see shardlab a"),
        (["attach", "--demo", "--gradients", "int9"], "attach: error: codec: unknown codec 'int9'"),
        (["run"], "run: error: params.yaml: no such file: shardlab init DIR writes one"),
    ],
)
def test_mistakes_are_one_line(arguments, error, tmp_path):
    command = typed(tmp_path / "command", tmp_path, "shardlab", *arguments)
    assert command.wait() == 2
    (line,) = command.said().splitlines()
    assert line.startswith(error)


@pytest.mark.parametrize(
    "name, arguments, package, extra",
    [
        ("report", [], "pandas", "lab"),
        pytest.param("chat", ["any"], "transformers", "hf", marks=pytest.mark.long),
    ],
)
def test_a_missing_package_is_one_line_with_its_extra(name, arguments, package, extra):
    done = without([package], name, *arguments)
    assert done.returncode == 2
    expected = f"{name}: error: {package} is missing: pip install 'shardlab[{extra}]'\n"
    assert done.stderr == expected


PLAN = ["-m", "shardlab", "plan", "--device", "l4", "--sequence-length", "64"]


def test_who_reads_the_output_may_stop():
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, *PLAN, "tiny"]
    done = subprocess.run(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


def test_letters_that_the_terminal_lacks_are_escaped(tmp_path):
    (tmp_path / "\u65e5").write_text(json.dumps(gpt2_config(2, 64, 4)))
    command = [sys.executable, *PLAN, str(tmp_path / "\u65e5")]
    latin = os.environ | {"PYTHONIOENCODING": "latin-1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, env=latin)
    assert b"\\u65e5: " in done.stdout and done.stderr == b""


def test_bash_completes_the_names(capsys):
    with pytest.raises(SystemExit):
        main(["--completion"])
    script = f"{capsys.readouterr().out}complete -p shardlab"
    shown = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert " ".join(COMMANDS) in shown.stdout


@pytest.mark.long
def test_the_demonstration_compares_what_was_sent_in_a_light_install():
    absent = [name for extra in ("hf", "lab") for name in packages(extra)]
    done = without(absent, "attach", "--demo")
    assert done.returncode == 0, done.stderr
    plain, sent, coded, saved, *_ = done.stdout.splitlines()
    assert plain.startswith("gradients none: 2 ranks") and "nothing saved" in sent
    assert coded.startswith("gradients int8: 2 ranks") and "% saved: gradients 3." in saved
    losses = [float(line.rpartition(" ")[2]) for line in (plain, coded)]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
