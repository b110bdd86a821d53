"""Lines of a script have arguments that `shardlab.attach` takes."""

import ast
import inspect

import pytest
from shardlab.strategy.attach_lines import attach_lines

import shardlab
from shardlab.codecs.registry import spec_of
from shardlab.strategy.document import parse_strategy
from tests.record_factory import STRATEGIES


@pytest.mark.parametrize(
    "document",
    [
        *({"engine": engine} for engine in ("ddp", "fsdp1", "fsdp2", "manual", "slide")),
        {"engine": "slide", "param_transfer": "shard", "grad_sync": "gpu_reduce"},
    ],
)
def test_a_strategy_without_codecs_has_none(document):
    assert attach_lines(parse_strategy(document).canonical()) is None


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        (STRATEGIES["fsdp2-exchange"], 'route="exchange"'),
        (STRATEGIES["fsdp2-int4"], 'gradients="int4:group=128", error_feedback=True'),
        (
            {
                "engine": "fsdp2",
                "gradients": {"codec": "int8", "between_nodes": "int4", "exclude": ["*.bias"]},
                "weights": {"codec": "int8:group=64", "minimum_size": 8},
            },
            'gradients="int8:group=128", between_nodes="int4:group=128", exclude=[\'*.bias\'], '
            'weights="int8:group=64", weights_minimum_size=8',
        ),
        (
            {"engine": "ddp", "sync": {"every": 8, "codec": "int4", "error_feedback": True}},
            "sync_every=8, outer={'codec': 'int4:group=128', 'error_feedback': True}, "
            "optimizer=optimizer",
        ),
        (
            {"sharding": "hybrid_shard", "replicas": 2, "gradients": {"between_nodes": "int8"}},
            'between_nodes="int8:group=128"',
        ),
        ({"engine": "ddp", "sync": {"every": 32}}, "sync_every=32, optimizer=optimizer"),
    ],
)
def test_arguments_are_those_of_attach(document, expected):
    line, *end = attach_lines(parse_strategy(document).canonical()).splitlines()
    assert line == f"handle = shardlab.attach(model, {expected})"
    assert end == ["handle.synchronize()  # after the last step"] * ("sync" in document)
    call = ast.parse(line).body[0].value
    given = {each.arg: each.value for each in call.keywords}
    assert ast.unparse(given.pop("optimizer", ast.Name("optimizer"))) == "optimizer"
    values = {name: ast.literal_eval(value) for name, value in given.items()}
    inspect.signature(shardlab.attach).bind("model", **values)
    for key in ("gradients", "weights", "between_nodes"):
        assert spec_of(values.get(key, "none"))
