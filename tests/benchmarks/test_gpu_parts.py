"""Parts of the proof of a GPU: limits, verdicts, choice, and a dry run on the CPU."""

import json
import subprocess
import sys

import pytest

from benchmarks.gpu.__main__ import chosen, main
from benchmarks.gpu.figures import record, table_device, write_page
from benchmarks.gpu.parts import Part, correct_parts, measure_parts
from benchmarks.gpu.running import run_parts
from shardlab.core.errors import UserError
from shardlab.core.numbers import ABSENT
from tests.commands import ROOT

ENDLESS = "import time; print('began', flush=True); time.sleep(600)"
FAILING = "print('FAILED a::b - 1 is not 2'); print('1 failed in 3 s'); exit(1)"
MODES = {"correct": correct_parts("cuda"), "measure": measure_parts("figures")}


def part(name, code, limit_s=60.0, **environment):
    return Part(name, limit_s, ("-c", code), environment)


def run(*words, seconds=900):
    command = [sys.executable, "-m", "benchmarks.gpu", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds)


def test_a_part_passes_fails_or_is_late_and_says_why():
    shown = []
    parts = [
        part("late", ENDLESS, limit_s=5),
        part("passes", "import os; print('first'); print(os.environ['NUMBER'])", NUMBER="7"),
        part("fails", FAILING),
        part("crashes", "import os; os.kill(os.getpid(), 9)"),
    ]
    outcomes = run_parts(parts, 60, 2, shown.append)
    assert shown == outcomes
    assert {outcome.name: (outcome.verdict, outcome.text) for outcome in outcomes} == {
        "late": ("LATE", "began"),
        "passes": ("PASS", "7"),
        "fails": ("FAIL", "FAILED a::b - 1 is not 2"),
        "crashes": ("FAIL", "no output"),
    }
    assert outcomes[0].output != "" and outcomes[-1].name == "late"


def test_a_part_of_which_no_test_ran_is_skipped_and_says_why(tmp_path):
    tests = tmp_path / "test_parts.py"
    tests.write_text(
        "import pytest\n"
        "@pytest.mark.skip(reason='no sanitizer')\ndef test_absent(): pass\n"
        "def test_present(): pass\n"
    )

    def selected(name, words):
        return Part(name, 60, ("-m", "pytest", "-qra", "-c", "/dev/null", str(tests), "-k", words))

    parts = [selected("none", "absent"), selected("some", "absent or present")]
    outcomes = {o.name: o for o in run_parts(parts, 60, 1, lambda outcome: None)}
    assert {name: outcome.verdict for name, outcome in outcomes.items()} == {
        "none": "SKIP",
        "some": "PASS",
    }
    assert "no sanitizer" in outcomes["none"].text


def test_parts_that_have_no_time_left_are_skipped():
    parts = [part("endless", ENDLESS), part("never", ENDLESS)]
    outcomes = run_parts(parts, 1.5, 1, lambda outcome: None)
    assert [(o.name, o.verdict) for o in outcomes] == [("endless", "LATE"), ("never", "SKIP")]


def test_a_word_is_a_mode_a_part_or_the_beginning_of_names():
    def names(*words, skipped=(), device="cuda"):
        return [part.name for part in chosen(MODES, words, skipped, device)]

    assert names("shared:ddp") == ["shared:ddp"]
    assert names("larger:", "engine:ddp")[0] == "engine:ddp"
    assert names("measure", skipped=["larger:", "train:"]) == ["ceilings", "codec-rates"]
    assert names("correct") == [part.name for part in MODES["correct"]]
    assert {*names("correct")} - {*names("correct", device="cpu")} == {
        *("memory", "lanes", "waits", "recompiles", "two-gpus", "sanitizer")
    }
    for words in ([], ["no-such-part"]):
        with pytest.raises(UserError):
            names(*words)


def test_names_of_parts_are_unique():
    names = [part.name for parts in MODES.values() for part in parts]
    assert len(names) == len({*names})


def test_parts_name_tests_that_exist():
    parts = [*correct_parts("cpu"), *correct_parts("cuda")]
    words = {word for part in parts for word in part.arguments if "::" in word}
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *sorted(words)]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


def test_a_page_has_a_table_of_each_kind_of_rows(tmp_path):
    record(tmp_path, "Training", "ddp", {"step, ms": 12.5, "fits": "yes"})
    record(tmp_path, "Ceilings", "copy", {"rate": 3.0})
    record(tmp_path, "Training", "slide", {"step, ms": None})
    record(tmp_path, "Training", "ddp", {"step, ms": 11.5, "fits": "yes"})
    write_page(tmp_path)
    text = (tmp_path / "gpu.md").read_text()
    absent = f"| slide | {ABSENT} | {ABSENT} |\n"
    assert f"| ddp | 11.5 | yes |\n{absent}" in text and "12.5" not in text
    assert "## Ceilings" in text and "a dry run on the CPU" in text


@pytest.mark.parametrize(
    ("name", "gib", "device"),
    [
        ("NVIDIA H100 80GB HBM3", 79, "h100-80g"),
        ("NVIDIA H200", 140, "h200"),
        ("NVIDIA A100-SXM4-40GB", 39, "a100-40g"),
        ("NVIDIA A100-SXM4-80GB", 79, "a100-80g"),
        ("Tesla T4", 15, None),
    ],
)
def test_a_gpu_is_compared_with_its_own_plan(name, gib, device):
    assert table_device(name, gib * 2**30) == device


def test_a_device_that_is_not_there_is_refused_in_one_line(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["benchmarks.gpu", "correct", "--device", "gpu"])
    with pytest.raises(UserError, match=r"^--device gpu: .*--device cpu[^\n]*$"):
        main()


def test_a_dry_run_on_the_cpu_proves_and_measures(tmp_path):
    command = run("layer-adam", "larger:slide", "--device", "cpu", "--out", str(tmp_path))
    assert command.returncode == 0, command.stdout + command.stderr
    outcomes = json.loads((tmp_path / "parts.json").read_text())
    assert [outcome["verdict"] for outcome in outcomes] == ["PASS"] * 2
    assert "| slide | yes |" in (tmp_path / "gpu.md").read_text()


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_every_part_passes_on_the_cpu(tmp_path):
    """Limits are those of 16 cores: here none counts."""
    words = ("correct", "measure", "--device", "cpu", "--limit", "900", "--seconds", "1100")
    command = run(*words, "--at-once", "2", "--out", str(tmp_path), seconds=1150)
    print(command.stdout)
    assert command.returncode == 0, command.stdout + command.stderr
    verdicts = [
        outcome["verdict"] for outcome in json.loads((tmp_path / "correct.json").read_text())
    ]
    assert {*verdicts} == {"PASS"}
    assert (tmp_path / "gpu.md").exists()
