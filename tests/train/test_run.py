"""Whole runs: output files, reproducibility, and the saved model."""

import math
import os
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from shardlab.core.errors import UserError
from shardlab.core.files import read_json_lines, write_json
from shardlab.core.ranges import format_ranges
from shardlab.data.tokens import open_split
from shardlab.kernels.cpu_placement import read_topology
from shardlab.models.settings import Model
from shardlab.results.train_result import TrainResult
from shardlab.strategy.document import parse_strategy
from shardlab.train.evaluation import evaluate
from shardlab.train.plans import RunPlan
from shardlab.train.run import train_run
from shardlab.train.settings import Train
from stages import validate
from stages.sections import Sections
from tests.families import config_of
from tests.measured_run import measure

TRAIN = Train(
    steps=6,
    batch_size=2,
    sequence_length=16,
    untimed_steps=2,
    warmup_steps=2,
    audit_steps=1,
    profiled_steps=2,
)
TINY = Model(preset="tiny")
INT8 = {"engine": "fsdp2", "gradients": {"codec": "int8", "error_feedback": True}}


def plan(data, strategy=None, train=TRAIN, model=TINY):
    return RunPlan("a-run", 1, parse_strategy(strategy or INT8), train, model, data)


def losses(folder: Path) -> list[float]:
    return [event["loss"] for event in read_json_lines(folder / "events.jsonl")]


@pytest.fixture(scope="module")
def measured(data, tmp_path_factory) -> tuple[TrainResult, Path]:
    folder = tmp_path_factory.mktemp("run")
    return measure(plan(data), folder), folder


def test_record_is_consistent(measured):
    record, folder = measured
    assert (record.run, record.seed, record.codec, record.error_feedback) == (
        "a-run",
        1,
        "int8",
        True,
    )
    assert record.steps == len(read_json_lines(folder / "events.jsonl")) == 6
    cpus = format_ranges(os.sched_getaffinity(0))
    assert len(record.placement) == 2
    if len(read_topology().nodes) == 1:
        assert all(line.startswith(f"CPUs {cpus} (control ") for line in record.placement)
    assert record.compression_ratio == pytest.approx(record.bytes_raw / record.bytes_wire)
    kinds = record.ledger.values()
    assert record.bytes_wire == pytest.approx(sum(kind["bytes_wire"] for kind in kinds))
    parts = record.compute_ms + record.exposed_comm_ms + record.exposed_copy_ms + record.idle_ms
    assert parts == pytest.approx(record.profiled_step_ms, rel=1e-6)
    passes = record.forward_ms + record.backward_ms + record.update_ms
    assert passes == pytest.approx(record.profiled_step_ms, rel=1e-6)
    assert {"root", "transformer.h.0", "other"} < record.comm_ms_by_unit.keys()
    waits = record.comm_skew_ms + record.comm_transfer_ms
    assert waits == pytest.approx(record.comm_ms_per_step, rel=1e-6)
    assert 0 < record.grad_rel_error < 0.1 and record.grad_cosine > 0.99
    assert record.residual_norm > 0
    assert record.val_ppl == pytest.approx(math.exp(record.val_loss))
    assert record.val_ppl < record.untrained_ppl
    # none where the ranks, forks of this process, use free blocks of its heap
    assert 0 <= record.memory_growth_bytes < record.memory_peak_bytes
    assert record.memory_reserved_bytes is None
    assert 0 < record.collective_ms < record.step_ms_mean
    assert record.effective_bandwidth_raw == pytest.approx(
        record.effective_bandwidth_wire * record.compression_ratio
    )
    assert 0 < record.flops_share < 1


def test_runs_are_reproducible(measured, data, tmp_path):
    _, folder = measured
    train_run(plan(data), tmp_path)
    assert losses(folder) == losses(tmp_path)
    weights = "final_model/model.safetensors"
    assert (folder / weights).read_bytes() == (tmp_path / weights).read_bytes()


def test_another_family_trains_alike_on_any_number_of_ranks(data, tmp_path):
    family = "llama-tied"
    config_of(family).save_pretrained(tmp_path / "config")
    model = Model(config=str(tmp_path / "config"))
    short = {"steps": 3, "audit_steps": 0, "profiled_steps": 1}
    for ranks in (1, 2):
        batch = {"batch_size": None, "global_batch_size": 4}
        train = TRAIN.model_copy(update={"world_size": ranks, **batch, **short})
        train_run(plan(data, {"engine": "fsdp2"}, train, model), tmp_path / str(ranks))
    assert losses(tmp_path / "1") == pytest.approx(losses(tmp_path / "2"), rel=1e-5)
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "2/final_model")
    assert type(trained.config) is type(config_of(family))
    assert trained.config.eos_token_id == open_split(data / "tokens", "train").end_of_text

    again = Model(pretrained=str(tmp_path / "2/final_model"))
    train_run(plan(data, {"engine": "fsdp2"}, train, again), tmp_path / "on")
    assert losses(tmp_path / "on")[0] < losses(tmp_path / "2")[0]


@pytest.mark.parametrize("engine", ["ddp", pytest.param("fsdp2", marks=pytest.mark.long)])
def test_copies_that_rarely_exchange_parameters_end_as_one_model(engine, data, tmp_path):
    sharding = {} if engine == "ddp" else {"sharding": "no_shard"}
    every_step = measure(plan(data, {"engine": engine, **sharding}), tmp_path / "every-step")
    sync = {"every": 3, "codec": "int4", "error_feedback": True}
    rare = measure(plan(data, {"engine": engine, **sharding, "sync": sync}), tmp_path / "rare")
    # exchanges after steps 3 and 6, of whose first one untimed steps are a part
    assert rare.bytes_raw == pytest.approx(every_step.bytes_raw / 3, rel=1e-3)
    assert 0 < rare.bytes_wire < every_step.bytes_wire / 10
    # the first one compares options, too
    assert rare.bytes_peak == pytest.approx(3 * rare.bytes_wire, rel=1e-3)
    assert every_step.bytes_peak == pytest.approx(every_step.bytes_wire)
    assert rare.val_loss == pytest.approx(every_step.val_loss, rel=0.05)
    assert every_step.val_ppl != rare.val_ppl < rare.untrained_ppl / 2


def test_the_saved_model_is_a_hugging_face_model(measured, data):
    _, folder = measured
    model = AutoModelForCausalLM.from_pretrained(folder / "final_model")
    tokenizer = AutoTokenizer.from_pretrained(folder / "final_model")
    split = open_split(data / "tokens", "validation")
    assert tokenizer.eos_token_id == split.end_of_text == model.config.eos_token_id
    ids = tokenizer("Some words.", return_tensors="pt").input_ids
    assert torch.isfinite(model(ids).logits).all()


def test_a_uniform_model_has_the_perplexity_of_its_vocabulary(data):
    class Uniform(nn.Module):
        def forward(self, input_ids):
            logits = torch.zeros(*input_ids.shape, 300)
            return type("Output", (), {"logits": logits})

    split = open_split(data / "tokens", "validation")
    quality = evaluate(Uniform(), split, 16, 4)
    assert quality.tokens == len(split) - 1
    assert quality.perplexity == pytest.approx(300, rel=1e-4)
    bits = quality.tokens * math.log2(300) / split.text_bytes
    assert quality.bits_per_byte == pytest.approx(bits, rel=1e-4)


def test_a_model_that_sees_later_tokens_has_no_perplexity(data):
    class Encoder(nn.Module):
        def forward(self, input_ids):
            seen = torch.nn.functional.one_hot(input_ids, 300).float()
            return type("Output", (), {"logits": seen + 0.01 * seen.mean(1, keepdim=True)})

    with pytest.raises(UserError, match="Encoder sees the tokens that it predicts"):
        evaluate(Encoder(), open_split(data / "tokens", "validation"), 16, 4)


def test_damaged_data_ends_a_run_before_its_first_step(data, tmp_path):
    copy = shutil.copytree(data, tmp_path / "data")
    for name, stage in (("source.json", "prepare"), ("tokens/manifest.json", "tokenize")):
        cut(copy / name)
        with pytest.raises(UserError, match=rf"{name}: damaged.*shardlab {stage}"):
            train_run(plan(copy), tmp_path / "run")
        shutil.copy(data / name, copy / name)
    assert not (tmp_path / "run").exists()


def test_a_damaged_final_model_is_one_line(data, measured, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").symlink_to(data)
    folder = tmp_path / "results/train/a-run/seed1"
    shutil.copytree(measured[1], folder)
    cut(folder / "final_model/model.safetensors")
    params = {"train": TRAIN.model_dump(mode="json"), "seeds": [1]}
    write_json("params.yaml", params | {"model": {"preset": "tiny"}})
    with pytest.raises(UserError, match=r"final_model: not a model: .*: train the run again"):
        validate.main(Sections(), "a-run")
    assert not (tmp_path / "results/validate").exists()


def cut(path):
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
