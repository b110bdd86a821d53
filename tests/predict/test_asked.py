"""Strategies of a user in a plan: they are predicted as its own, and refused in one line."""

import json
import shutil
from functools import partial

import pytest

from shardlab.choose.plan_answer import Plan
from shardlab.cli import main
from shardlab.core.errors import UserError
from shardlab.predict.asked import (
    admitted,
    asked_candidate,
    changes_training,
    sent_by_replicas,
    unprobed,
)
from shardlab.strategy.document import parse_strategy
from tests.commands import ROOT

ARGUMENTS = ["plan", "gpt2", "--nodes", "2x1", "--device", "l4", "--link", "1gbit"]
ARGUMENTS += ["--sequence-length", "256"]


def rows(capsys, *arguments):
    """The outcomes of a plan by name."""
    main([*ARGUMENTS, *arguments, "--json"])
    plan = Plan.model_validate(json.loads(capsys.readouterr().out), strict=False)
    return {outcome.name: outcome for outcome in plan.strategies}


@pytest.mark.parametrize(
    ("text", "own"),
    [
        ("{engine: ddp}", "ddp"),
        ("{engine: slide}", "slide"),
        ("{gradients: {codec: int8}, weights: {codec: int8}}", "fsdp2, int8 both ways"),
        ("{engine: ddp, sync: {every: 32, codec: int4}}", "ddp, int4 every 32 steps"),
    ],
)
def test_a_row_of_a_plan_asked_for_is_the_same_row(text, own, capsys):
    planned = rows(capsys, "--strategy", text)
    (name,) = (name for name in planned if name.startswith("your "))
    assert planned[name] == planned[own].model_copy(update={"name": name})


def test_what_a_document_says_is_kept_and_the_plan_chooses_what_is_left(capsys):
    text = "{engine: ddp, accumulation: 2, activation_checkpointing: full}"
    *_, asked = rows(capsys, "--strategy", text).values()
    assert (asked.micro_batches, asked.checkpointing) == (2, "full")
    *_, asked = rows(capsys, "--strategy", "{engine: ddp, accumulation: 4}").values()
    assert (asked.micro_batches, asked.checkpointing) == (4, "none")


def test_names_are_those_of_a_file_and_all_leaves_out_what_no_plan_predicts(tmp_path, capsys):
    shutil.copy(ROOT / "params/quick.yaml", tmp_path / "mine.yaml")
    file = ["--params", str(tmp_path / "mine.yaml")]
    named = rows(capsys, "--strategy", "fsdp2-int8", *file)
    asked = named["your fsdp2-int8"]
    assert asked.lossy and "gradients" in asked.attach
    with (tmp_path / "mine.yaml").open("a") as text:
        text.write("\ntimed_strategies: {sparse: {engine: ddp, gradients: {codec: topk}}}\n")
    main([*ARGUMENTS, "--strategy", "all", *file])
    said = capsys.readouterr()
    assert "your fsdp2-int8*" in said.out and "sparse" not in said.out
    assert said.err.startswith("plan: without sparse: a plan knows what int8, ")


def test_a_warm_up_is_over_in_a_plan(capsys):
    text = "{engine: ddp, sync: {every: 32, codec: int4%s}, gradients: {codec: int8}}"
    plain = "{engine: ddp, sync: {every: 32, codec: int4}}"
    warmed = text.replace("%s", ", warmup_steps: 100")
    *_, first, second = rows(capsys, "--strategy", plain, "--strategy", warmed).values()
    assert first.step_s == second.step_s and "warmup_steps" in second.attach


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{compile: true}", "a plan knows nothing of compile: remove it"),
        ("{offload: true}", "a plan knows nothing of offload"),
        ("{overrides: [{layers: 0, param_dtype: fp32}]}", "one setting for all layers"),
        ("{wrap: root}", "single blocks"),
        ("{param_dtype: fp32}", "give --param-dtype fp32"),
        ("{gradients: {codec: topk}}", "and not topk: take one of them"),
        ("{engine: ddp, sync: {every: 8, codec: efsign}}", "and not efsign: take one of them"),
        ("{accumulation: 3}", "3 micro-batches do not divide the 8 samples"),
        ("{sharding: hybrid_shard, replicas: 3}", "3 copies do not divide 2 ranks"),
        ("{engine: slide, sync: {every: 8}}", "sync does not apply to engine 'slide'"),
        ("{engine: fsdp3}", "--strategy.engine: "),
        ("{engine", "neither YAML nor JSON"),
        ("fsdp2, int8", "or write a document, such as '{engine: fsdp2"),
    ],
)
def test_what_no_plan_predicts_is_one_line(text, words, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as ended:
        main([*ARGUMENTS, "--strategy", text])
    said = capsys.readouterr()
    assert ended.value.code == 2 and said.out == ""
    assert said.err.count("\n") == 1 and words in said.err


def test_a_name_without_a_file_of_parameters_says_where_to_name_it(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main([*ARGUMENTS, "--strategy", "mine"])
    assert (
        "--strategy mine: no params.yaml here: name the file by --params" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("document", "lossy"),
    [
        ({"engine": "manual"}, False),
        ({"gradients": {"route": "exchange"}}, False),
        ({"gradients": {"codec": "bf16"}}, True),
        ({"gradients": {"between_nodes": "int8"}}, True),
        ({"weights": {"codec": "int8"}}, True),
        ({"weights": {"codec": "none"}}, False),
        ({"reduce_dtype": "bf16"}, True),
        ({"engine": "slide", "moment_dtype": "bf16"}, True),
        ({"engine": "ddp", "sync": {"every": 2}}, True),
    ],
)
def test_what_changes_training_has_a_star(document, lossy):
    strategy = parse_strategy(document)
    assert changes_training(strategy.canonical()) == lossy
    assert asked_candidate("a", strategy, "bf16").lossy == lossy


@pytest.mark.parametrize(
    ("document", "ranks", "nodes", "words"),
    [
        ({"engine": "fsdp2"}, 4, 1, "take engine: ddp; shardlab timing measures others"),
        ({"engine": "slide"}, 4, 2, "or sharding: hybrid_shard with replicas: 2; shardlab"),
        ({"sharding": "hybrid_shard", "replicas": 2}, 8, 4, "hybrid_shard with replicas: 4; "),
        ({"engine": "ddp", "gradients": {"codec": "powersgd"}}, 2, 1, "matrices for powersgd"),
    ],
)
def test_what_no_replicas_send_no_probe_measures(document, ranks, nodes, words):
    strategies = {"mine": parse_strategy(document), "other": parse_strategy({"engine": "ddp"})}
    reasons = partial(unprobed, world_size=ranks, nodes=nodes)
    with pytest.raises(UserError, match=rf"^--strategy mine: .*{words}") as caught:
        admitted(strategies, reasons, skip=False)
    assert "\n" not in str(caught.value)
    taken, (line,) = admitted(strategies, reasons, skip=True)
    assert [*taken] == ["your other"] and line.startswith("without mine: ") and words in line


@pytest.mark.parametrize(
    ("document", "ranks", "nodes"),
    [
        ({"engine": "ddp"}, 2, 1),
        ({"sharding": "no_shard"}, 4, 2),
        ({"sharding": "hybrid_shard", "replicas": 2}, 4, 2),
    ],
)
def test_replicas_are_ranks_or_nodes(document, ranks, nodes):
    assert unprobed(parse_strategy(document), ranks, nodes) is None


def test_replicas_that_synchronise_rarely_send_outer_gradients():
    strategy = parse_strategy(
        {
            "engine": "ddp",
            "gradients": {"codec": "int8"},
            "sync": {"every": 8, "codec": "int4", "error_feedback": True, "warmup_steps": 10},
        }
    )
    sent = sent_by_replicas(strategy.canonical())
    assert (sent.codec.name, sent.error_feedback, sent.warmup_steps) == ("int4", True, 0)
