"""Validation losses between steps are those of the saved model, and change nothing of training."""

from pathlib import Path
from typing import Any

import pytest

from shardlab.core.errors import StorageError
from shardlab.core.files import read_json, read_json_lines
from shardlab.data.tokens import FirstTokens, open_split
from shardlab.models.settings import Model
from shardlab.strategy.document import parse_strategy
from shardlab.train.evaluation import evaluate, load_model, validate_run
from shardlab.train.plans import RunPlan
from shardlab.train.run import train_run
from shardlab.train.settings import Checkpoint, Train, ValidationCurve

TRAIN: dict[str, Any] = {
    "steps": 6,
    "batch_size": 2,
    "sequence_length": 16,
    "untimed_steps": 2,
    "warmup_steps": 2,
    "audit_steps": 0,
    "profiled_steps": 1,
}
FEEDBACK = {"gradients": {"codec": "int8", "error_feedback": True}}
RARE = {"every": 3, "codec": "int4", "error_feedback": True}
EXACT = (
    *("step", "loss", "gradient_norm", "learning_rate", "applied", "bytes_wire"),
    *("residual_norm", "clipped_steps", "skipped_steps"),
)
ALL = ValidationCurve(every=3)
long = pytest.mark.long


def plan(data: Path, strategy: dict[str, Any], dropout: float = 0.0, **train: Any) -> RunPlan:
    settings, model = Train(**{**TRAIN, **train}), Model(preset="tiny", dropout=dropout)
    return RunPlan("a-run", 1, parse_strategy(strategy), settings, model, data)


def events_of(plan: RunPlan, folder: Path, **options: Any) -> list[dict[str, Any]]:
    train_run(plan, folder, **options)
    events: list[dict[str, Any]] = read_json_lines(folder / "events.jsonl")
    return events


def weights(folder: Path) -> bytes:
    return (folder / "final_model/model.safetensors").read_bytes()


def test_a_model_that_drops_in_training_drops_nothing_in_an_evaluation(
    data: Path, tmp_path: Path
) -> None:
    curved = plan(data, {"engine": "ddp"}, dropout=0.3, validation=ALL)
    events = events_of(curved, tmp_path / "curve")
    without = events_of(plan(data, {"engine": "ddp"}, dropout=0.3), tmp_path / "without")
    assert [event["loss"] for event in events] == [event["loss"] for event in without]
    quality = evaluate(
        load_model(tmp_path / "curve/final_model"),
        open_split(data / "tokens", "validation"),
        16,
        32,
    )
    assert events[-1]["val_loss"] == pytest.approx(quality.loss, rel=1e-6)


@pytest.mark.parametrize(
    "strategy",
    [
        {"engine": "ddp", **FEEDBACK},
        pytest.param({"engine": "ddp", "sync": {**RARE, "warmup_steps": 3}}, marks=long),
        pytest.param({"engine": "fsdp1", **FEEDBACK}, marks=long),
        pytest.param({"engine": "fsdp1", "use_orig_params": True}, marks=long),
        {"engine": "fsdp2", **FEEDBACK},
        pytest.param({"engine": "fsdp2", "sharding": "no_shard", "sync": RARE}, marks=long),
        pytest.param({"engine": "manual", **FEEDBACK, "weights": {"codec": "int8"}}, marks=long),
        pytest.param({"engine": "manual", "sharding": "no_shard", "sync": RARE}, marks=long),
        {"engine": "slide", **FEEDBACK},
        pytest.param({"engine": "slide", "grad_sync": "gpu_reduce"}, marks=long),
    ],
    ids=str,
)
def test_a_curve_ends_at_the_saved_model_and_training_is_the_same_without_it(
    data: Path, tmp_path: Path, strategy: dict[str, Any]
) -> None:
    without = events_of(plan(data, strategy), tmp_path / "without")
    curved = plan(data, strategy, validation=ALL)
    events = events_of(curved, tmp_path / "curve")
    assert [[event[key] for key in EXACT] for event in events] == [
        [event[key] for key in EXACT] for event in without
    ]
    assert weights(tmp_path / "curve") == weights(tmp_path / "without")
    assert not any("val_loss" in event for event in without)
    assert [event["step"] for event in events if "val_loss" in event] == [2, 5]
    output = tmp_path / "validation.json"
    validate_run(tmp_path / "curve/final_model", output, curved.train, curved.model, 1, data)
    assert events[-1]["val_loss"] == read_json(output)["val_loss"] < events[2]["val_loss"]


def test_copies_that_train_alone_give_the_loss_of_what_they_agree_on(
    data: Path, tmp_path: Path
) -> None:
    curved = plan(data, {"engine": "ddp", "sync": RARE}, validation=ValidationCurve(every=1))
    losses = [event["val_loss"] for event in events_of(curved, tmp_path / "run")]
    assert losses[0] == losses[1] and losses[2] == losses[3] == losses[4]
    assert losses[1] > losses[2] > losses[5]


def test_a_curve_of_some_sequences_is_of_the_first_ones(data: Path, tmp_path: Path) -> None:
    few = ValidationCurve(every=6, sequences=5)
    events = events_of(plan(data, {"engine": "ddp"}, validation=few), tmp_path)
    split = open_split(data / "tokens", "validation")
    model = load_model(tmp_path / "final_model")
    quality = evaluate(model, FirstTokens(split, 5 * 16 + 1), 16, 2)
    assert (quality.tokens, quality.bits_per_byte) == (5 * 16, None)
    assert events[-1]["val_loss"] == pytest.approx(quality.loss, rel=1e-6)
    everything, more = (evaluate(model, text, 16, 2) for text in (split, FirstTokens(split, 10**9)))
    assert more.loss == everything.loss != quality.loss


@pytest.mark.long
def test_a_run_that_resumes_has_the_whole_curve(data: Path, tmp_path: Path) -> None:
    strategy = {"engine": "fsdp2", **FEEDBACK}
    straight = events_of(plan(data, strategy, validation=ALL), tmp_path / "straight")
    saved = plan(data, strategy, validation=ALL, checkpoint=Checkpoint(every=4))
    (tmp_path / "run").mkdir()
    (tmp_path / "run/final_model").touch()
    with pytest.raises(StorageError, match="final_model: cannot be written"):
        train_run(saved, tmp_path / "run", checkpoints=tmp_path / "checkpoints")
    (tmp_path / "run/final_model").unlink()
    resumed = events_of(saved, tmp_path / "run", checkpoints=tmp_path / "checkpoints")
    # ranks compare their first message once more
    exact = [*(key for key in EXACT if key != "bytes_wire"), "val_loss"]
    assert [[event.get(key) for key in exact] for event in resumed] == [
        [event.get(key) for key in exact] for event in straight
    ]
