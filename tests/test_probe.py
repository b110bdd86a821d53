"""`shardlab probe`: figures that fit together, and mistakes in one line."""

import os
import re
import sys
from contextlib import redirect_stdout
from io import StringIO
from unittest.mock import patch

import pytest
import torch.distributed as dist
from transformers import GPT2LMHeadModel  # noqa: F401 - imported once, before ranks are forked

from shardlab.choose.probe_answer import STOCK, rank_replicas, replicas_of
from shardlab.cli import main
from shardlab.core.errors import UserError
from shardlab.predict.offers import replica_candidates
from shardlab.probe import ProbeSettings, probe
from shardlab.strategy.document import parse_strategy
from tests.ranks import on_ranks

NUMBER = r"([\d.,e+-]+)"


def workload(**changed):
    small = {"model": "tiny", "batch_size": 1, "sequence_length": 8, "vocabulary": 64}
    return ProbeSettings(**{**small, **changed})


def printed(group, strategies=None, **changed):
    text = StringIO()
    with redirect_stdout(text):
        probe(workload(**changed), strategies or {}, group)
    return text.getvalue()


def check_rates(block, ranks):
    """In one block of measured rates."""
    sizes = []
    for operation, factor in (("all-reduce", 2), ("all-to-all", 1)):
        pattern = (
            rf"  {operation} of {NUMBER} bytes {NUMBER} ms .*, algbw {NUMBER} MB/s, busbw {NUMBER}"
        )
        size, ms, algbw, busbw = (
            float(each.replace(",", "")) for each in re.findall(pattern, block)[0]
        )
        assert algbw == pytest.approx(size / ms / 1e3, rel=2e-3)
        assert busbw == pytest.approx(algbw * factor * (ranks - 1) / ranks, rel=2e-3)
        sizes.append(size)
    return sizes[0]


def check_table(block, codec, ranks, nodes=1):
    """In one block of advice."""
    names = [offer.name for offer in replica_candidates(codec, nodes)]
    figures = {
        name: [
            float(text)
            for text in re.findall(rf"  {name} +{NUMBER} +{NUMBER} % +{NUMBER}", block)[0]
        ]
        for name in names
    }
    coded = {STOCK: names[0], "int8": names[1], codec: names[-4]}
    offers = replicas_of({name: figures[row][0] for name, row in coded.items()}, nodes)
    for offer in offers:
        ratio, percent, gain = figures[offer.name]
        assert ratio == pytest.approx(offer.ratio, rel=2e-2)
        assert percent == pytest.approx(100 * ratio / (1 + ratio), abs=0.2)
        assert gain == pytest.approx(ranks / (1 + ratio), abs=0.02)
    first = rank_replicas(offers, ranks).first
    assert f"\n  without loss use {first.name}: " in block


@on_ranks(2)
def test_figures_fit_together(group):
    text = printed(group)
    if dist.get_rank(group) != 0:
        assert text == ""
        return
    assert "2 ranks, 2 on each node" in text and "Quality is not measured" in text
    parameters = int(re.findall(r"tiny: ([\d,]+) parameters", text)[0].replace(",", ""))
    measured, advice = text.split("\nall ranks: synchronisation")
    assert check_rates(measured, 2) == 4 * parameters
    check_table(advice, "int4", 2)


MINE = {
    "often": parse_strategy({"engine": "ddp", "gradients": {"codec": "topk", "warmup_steps": 5}}),
    "rarely": parse_strategy({"engine": "ddp", "sync": {"every": 16}}),
}


@on_ranks(2)
def test_strategies_of_the_user_have_rows_of_their_own(group):
    text = printed(group, MINE)
    if dist.get_rank(group) != 0:
        return
    measured, advice = text.split("\nall ranks: synchronisation")
    step = float(re.findall(rf"  computation of a step {NUMBER} ms", advice)[0])
    for name, every in (("often", 1), ("rarely", 16)):
        sent = float(re.findall(rf"  all-reduce by your {name} {NUMBER} ms", measured)[0])
        ratio, _, gain = map(
            float, re.findall(rf"  your {name} +{NUMBER} +{NUMBER} % +{NUMBER}", advice)[0]
        )
        assert ratio == pytest.approx(sent / step / every, rel=2e-2)
        assert gain == pytest.approx(2 / (1 + ratio), abs=0.02)


@pytest.mark.long
@on_ranks(4)
def test_links_inside_and_between_nodes_are_measured_apart(group):
    nodes = {"sharding": "hybrid_shard", "replicas": 2, "gradients": {"between_nodes": "bf16"}}
    asked = {"islands": parse_strategy(nodes), **MINE}
    with patch.dict(os.environ, LOCAL_WORLD_SIZE="2"):
        text = printed(group, asked, codec="int8")
    if dist.get_rank(group) != 0:
        return
    measured, everywhere, between = re.split(r"\n(?:all ranks|between nodes): synchr", text)
    whole, inside, across = re.split(r"\n(?:inside|between) nodes:", measured)
    size = check_rates(whole, 4)
    assert check_rates(inside, 2) == size and check_rates(across, 2) == size / 2
    check_table(everywhere, "int8", 4)
    check_table(between, "int8", 2, nodes=2)
    assert f"all-reduce of {size / 2:,.0f} bytes at the rate" in between
    assert "your islands" in between and "your often" not in between
    assert "your islands" not in everywhere and "your rarely" in everywhere


@on_ranks(2)
def test_what_cannot_be_measured_ends_all_ranks_in_one_line(group):
    rank = dist.get_rank(group)
    for changed, words in (
        (
            {"batch_size": 2**20, "sequence_length": 1024},
            "tiny: a step needs more than .* GB, and a rank has",
        ),
        ({"model": "/absent"}, "--vocabulary is for presets: /absent"),
        ({"model": "/absent", "vocabulary": None}, "'/absent', which is no folder or file here"),
        ({"batch_size": 1 + rank}, "ranks differ: batch_size is 1 on rank 0 and 2 on rank 1"),
        ({"model": ("tiny", "small")[rank]}, "model is of .* parameters on rank 0 and of .* on"),
    ):
        with pytest.raises(UserError, match=words) as caught:
            printed(group, **changed)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "environment", "words"),
    [
        ("tiny", {}, "torchrun --nproc-per-node 2 -m shardlab probe tiny"),
        ("tiny", {"RANK": "0", "WORLD_SIZE": "1"}, "1 rank has no other"),
        ("", {}, "required: MODEL"),
        (
            "tiny --sequence-length 1",
            {},
            "sequence_length: input should be greater than or equal to 2",
        ),
        ("tiny --codec int5", {}, "did you mean 'int"),
        ("tiny --codec none", {}, "pointless"),
        ("tiny --codec sign", {}, "'sign' votes"),
        ("tiny --codec powersgd", {}, "several phases"),
        ("tiny --strategy nope --params nope.yaml", {}, "no nope.yaml here"),
    ],
)
def test_mistakes_are_one_line(arguments, environment, words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["shardlab", "probe", *arguments.split()])
    for name in ("RANK", "WORLD_SIZE", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr().err
    assert ended.value.code == 2 and words in said and said.count("\n") == 1
