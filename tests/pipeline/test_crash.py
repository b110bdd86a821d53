"""A run that crashes is a record, and the report of the others is made, by both tools."""

import json
from pathlib import Path

import pytest
import yaml

from tests.pipeline.graphs import pending
from tests.pipeline.workspace import copy_project, run, set_params

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

CODECS = '''
"""A codec that always fails, and one whose ranks are killed in training while a file exists."""

import os
import signal
import sys
from pathlib import Path
from typing import Literal

import shardlab
from user_codecs.ternary import Ternary, TernarySpec


class BrokenSpec(TernarySpec):
    examples = ("broken",)
    name: Literal["broken"] = "broken"


class KilledSpec(TernarySpec):
    examples = ("killed",)
    name: Literal["killed"] = "killed"


class Broken(Ternary):
    name = "broken"

    def quantize(self, rows, chance):
        raise ArithmeticError("wrong on purpose")


class Killed(Ternary):
    name = "killed"

    def quantize(self, rows, chance):
        if "train" in sys.orig_argv and Path("kill").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        return super().quantize(rows, chance)


shardlab.register("broken", BrokenSpec, Broken)
shardlab.register("killed", KilledSpec, Killed)
'''
FAULTY = ("broken", "killed")
BROKEN = "ArithmeticError: wrong on purpose"
METRICS = "results/train/killed/seed0/metrics.json"


@pytest.fixture(scope="module")
def crashed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    root = copy_project(tmp_path_factory.mktemp("crash") / "project")
    (root / "user_codecs/faulty.py").write_text(CODECS)
    strategies = yaml.safe_load((root / "params.yaml").read_text())["strategies"]
    faulty = {name: {"engine": "fsdp2", "gradients": {"codec": name}} for name in FAULTY}
    set_params(root, codecs=["user_codecs.faulty"], strategies=strategies | faulty)
    (root / "kill").touch()
    return root, run(root, "snakemake", "--cores", "2").stdout


def headline(root: Path) -> str:
    return (root / "results/report/headline.md").read_text()


def test_snakemake_reports_the_others_and_names_what_crashed(crashed: tuple[Path, str]) -> None:
    root, said = crashed
    assert pending(root) == set()
    first, table = headline(root).split("\n\n", 1)
    assert first.startswith("Crashed, and left out: ")
    assert "broken in training, seed 0: " in first and "broken in timing two-ranks: " in first
    assert BROKEN in first and "killed in training, seed 0: rank" in first
    assert "SIGKILL" in first and "logs/train/killed/0.log" in first
    assert "killed in timing" not in first
    assert "| fsdp2-int8 |" in table
    assert not any(f"| {name} |" in table for name in FAULTY)
    # where the job ends and in the summary; the whole error is in the log
    assert "crashed: killed seed 0: " in said and "rm -r results/train/killed/seed0" in said
    assert said.count("crashed: codec broken:group=128 in calibrate: ") == 2
    assert "in quantize" in (root / "logs/train/broken/0.log").read_text()


def test_what_crashed_is_trained_again_alone(crashed: tuple[Path, str]) -> None:
    root, _ = crashed
    run(root, "dvc", "commit", "--force")
    (root / "kill").unlink()
    delete = ("rm", "-r", "results/train/killed/seed0")
    run(root, *delete)
    measuring = ("train", "timing", "calibrate", "estimate")
    repeated = {"train --run killed --seed 0"}
    assert {job for job in pending(root) if job.startswith(measuring)} == repeated
    run(root, "snakemake", "--cores", "2", METRICS)
    assert "outcome" not in json.loads((root / METRICS).read_text())
    # the cache of DVC brings back what is deleted
    run(root, *delete)
    run(root, "dvc", "repro", "train@killed-0")
    assert "outcome" in json.loads((root / METRICS).read_text())
    run(root, "dvc", "repro", "--force", "--single-item", "train@killed-0")
    ran = run(root, "dvc", "repro").stdout
    assert "> exec python -m shardlab validate killed" in ran
    assert not any(f"> exec python -m shardlab {stage}" in ran for stage in measuring)
    assert "killed" not in headline(root).split("\n\n", 1)[0]
    assert "| killed |" in headline(root) and "broken in training" in headline(root)
