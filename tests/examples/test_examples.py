"""The example scripts run as they are, on two ranks, and compression is a few lines of each."""

import ast
import json
import re
import runpy

import pytest
import transformers  # noqa: F401 - imported once, before a command is forked

from tests.commands import Command
from tests.examples.scripts import ROOT, on_two_ranks, scalars

NEEDED = {
    "fsdp2": "transformers",
    "accelerate_fsdp2": "accelerate",
    "fabric_fsdp2": "lightning_fabric",
}


@pytest.mark.long
@pytest.mark.parametrize("name", NEEDED)
def test_an_example_trains_and_prints_what_it_saved(name, tmp_path):
    pytest.importorskip(NEEDED[name])
    options = [] if name == "fsdp2" else ["--logs", str(tmp_path / "logs")]
    said = on_two_ranks(tmp_path, f"examples/{name}.py", *options).splitlines()
    losses = [float(line.split()[-1]) for line in said if line.startswith("step ")]
    assert len(losses) == 20 and losses[-1] < 0.9 * losses[0]
    [summary] = [json.loads(line) for line in said if line.startswith("{")]
    for kind in ("gradients", "weights"):
        assert summary[kind]["collectives"] >= 60
        assert summary[kind]["compression_ratio"] > 3.5
        assert summary[kind]["bytes_wire"] * 3.5 < summary[kind]["bytes_raw"]
    if options:
        shown = scalars(tmp_path / "logs")
        assert len(shown["loss"]) == len(shown["comm/bytes_sent"]) == 20
        sent = sum(summary[kind]["bytes_wire"] for kind in ("gradients", "weights"))
        assert shown["comm/bytes_sent"][19] == pytest.approx(sent, rel=1e-6)


@pytest.mark.long
@pytest.mark.parametrize(("options", "saved"), [([], "3.8"), (["--sync-every", "8"], "3.")])
def test_a_trainer_loads_its_best_model_and_prints_what_it_saved(options, saved, tmp_path):
    pytest.importorskip("accelerate")
    said = on_two_ranks(tmp_path, "examples/trainer_ddp.py", *options)
    losses = [float(loss) for loss in re.findall(r"'eval_loss': '?([0-9.]+)", said)]
    [best] = re.findall(r"loss of the best model ([0-9.]+)", said)
    # after steps 8 and 16, and that of the best
    assert len(losses) >= 3 and float(best) == pytest.approx(min(losses), abs=1e-3)
    assert losses[1] < losses[0] and "last equal" not in said
    assert f"% saved: gradients {saved}" in said
    assert ("in place of" in said) == bool(options)


@pytest.mark.long
def test_ranks_of_nanogpt_send_something_in_every_eighth_step_alone(tmp_path):
    said = on_two_ranks(tmp_path, "examples/nanogpt_ddp.py").splitlines()
    losses = [float(line.split()[-1]) for line in said if line.startswith("step ")]
    assert len(losses) == 40 and losses[-1] < 0.5 * losses[0]
    [summary] = [json.loads(line) for line in said if line.startswith("{")]
    gradients, parameters = summary["gradients"], 110592
    # two ranks send each element once in each of five exchanges, and the training ends with one
    assert gradients["bytes_raw"] == 5 * 4 * parameters
    assert gradients["compression_ratio"] > 7


@pytest.mark.parametrize("name", NEEDED)
def test_compression_takes_four_lines_and_a_tracker_one(name):
    lines = (ROOT / "examples" / f"{name}.py").read_text().splitlines()
    marked = [line for line in lines if line.endswith("  # <- shardlab")]
    assert len(marked) == 4 + (name != "fsdp2")
    rest = ast.parse("\n".join(line for line in lines if line not in marked))
    names = {node.id for node in ast.walk(rest) if isinstance(node, ast.Name)}
    assert not names & {"shardlab", "gradients", "handle"}


def test_activations_on_disk_change_no_loss(tmp_path):
    script = str(ROOT / "examples/sliding_checkpoint.py")
    run = Command(tmp_path, lambda: runpy.run_path(script, run_name="__main__"))
    assert run.wait(240) == 0, run.said()
    assert run.said().count("loss") == 10
