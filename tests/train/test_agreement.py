"""Ranks that were given different parameters, code or tokens are refused before they train."""

import os
import re
import shutil
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch.distributed as dist

from shardlab.core.errors import UserError
from shardlab.data.tokens import MANIFEST
from shardlab.models.settings import Model
from shardlab.results.settings import Repetitions
from shardlab.strategy.document import parse_strategy
from shardlab.train.agreement import open_training_tokens, refuse_differences
from shardlab.train.plans import RunPlan, TimingPlan
from shardlab.train.settings import Train
from tests.ranks import on_ranks

TRAIN, MODEL = Train(steps=2, untimed_steps=1, warmup_steps=1), Model(preset="tiny")
FSDP2, INT8 = (
    parse_strategy({"engine": "fsdp2"}),
    parse_strategy({"engine": "fsdp2", "gradients": {"codec": "int8"}}),
)


def trained(**changes):
    return {"train": TRAIN.model_copy(update=changes)}


OTHERS = [
    (trained(learning_rate=0.5), "train.learning_rate is 0.0"),
    (trained(batch_size=5), r"train.batch_size is \d+ on rank 0 and 5 on rank 1:"),
    (trained(clip=7.0), "train.clip is .* on rank 0 and 7.0 on rank 1:"),
    (trained(steps=3), "train.steps is 2 on rank 0 and 3 on rank 1:"),
    ({"seed": 1}, "seed is 0 on rank 0 and 1 on rank 1:"),
    ({"strategy": INT8}, "strategy.*gradients.*int8.* on rank 1"),
    ({"model": Model(preset="small")}, 'model.preset is "tiny" on rank 0 and "small" on rank 1'),
]


def refusal(plan, group) -> str:
    with pytest.raises(UserError) as error:
        refuse_differences(plan, group)
    assert "\n" not in str(error.value)
    return str(error.value)


@on_ranks(2)
def test_another_parameter_on_a_rank_is_named(group, data):
    first = RunPlan("a-run", 0, FSDP2, TRAIN, MODEL, data)
    last = dist.get_rank(group) == 1
    for changes, expected in OTHERS:
        said = refusal(replace(first, **changes) if last else first, group)
        assert re.match(f"ranks differ: {expected}", said), said
    runs = Repetitions(runs=("a",))
    timing = TimingPlan("a-timing", runs, {"a": INT8 if last else FSDP2}, TRAIN, MODEL, data)
    assert "ranks differ: strategies.a." in refusal(timing, group)
    # CPUs belong to a node
    refuse_differences(replace(first, **trained(placement=(str(dist.get_rank(group)),))), group)


@pytest.mark.fresh_ranks
@on_ranks(2)
def test_other_code_and_tokens_on_a_rank_are_named(group, data, tmp_path):
    here = tmp_path / str(dist.get_rank(group))
    codecs, own = here / "user_codecs", here / "data"
    codecs.mkdir(parents=True)
    os.chdir(here)
    plan = RunPlan("a-run", 0, FSDP2, TRAIN, MODEL, own)
    shutil.copytree(data, own)
    refuse_differences(plan, group)
    (codecs / "ternary.py").write_text(f"SCALE = {dist.get_rank(group)}\n")
    assert 'ranks differ: user_codecs/ternary.py is "' in refusal(plan, group)
    (codecs / "ternary.py").unlink()
    (own / "tokens" / MANIFEST).write_text(f"{dist.get_rank(group)}")
    assert f'ranks differ: data/tokens/{MANIFEST} is "' in refusal(plan, group)


@on_ranks(2)
def test_each_node_verifies_all_of_its_own_tokens(group, data, tmp_path):
    own = tmp_path / str(dist.get_rank(group))
    shutil.copytree(data, own)
    with patch.dict(os.environ, {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}):
        assert len(open_training_tokens(own)) > 0
        for shard in (own / "tokens").glob("train*.bin"):
            content = bytearray(shard.read_bytes())
            content[10] ^= 1
            shard.write_bytes(content)
            with pytest.raises(UserError, match=f"{shard.name}: damaged"):
                open_training_tokens(own)
