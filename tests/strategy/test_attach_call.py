"""What is printed to be pasted is one mapping, which YAML and Python read alike."""

import ast

import pytest
import yaml

from shardlab.strategy.document import parse_strategy
from tests.record_factory import STRATEGIES


@pytest.mark.parametrize(
    "document",
    [
        *({"engine": engine} for engine in ("ddp", "fsdp1", "fsdp2", "manual", "slide")),
        {"engine": "slide", "param_transfer": "shard", "grad_sync": "gpu_reduce"},
        {"engine": "slide", "grad_sync": "gpu_reduce"},
    ],
)
def test_a_strategy_without_codecs_needs_no_call(document):
    assert parse_strategy(document).canonical().attach_call() is None


CALLS = [
    (STRATEGIES["fsdp2-exchange"], "gradients={'codec': 'none', 'route': 'exchange'}"),
    (
        STRATEGIES["fsdp2-int4"],
        "gradients={'codec': 'int4:group=128', 'error_feedback': True}",
    ),
    (
        {
            "engine": "fsdp2",
            "gradients": {"codec": "int8", "between_nodes": "int4", "exclude": ["*.bias"]},
            "weights": {"codec": "int8:group=64", "minimum_size": 8},
        },
        "gradients={'codec': 'int8:group=128', 'exclude': ['*.bias'], 'between_nodes': "
        "'int4:group=128'}, weights={'codec': 'int8:group=64', 'minimum_size': 8}",
    ),
    (
        {"engine": "ddp", "sync": {"every": 8, "codec": "int4", "error_feedback": True}},
        "sync={'every': 8, 'codec': 'int4:group=128', 'error_feedback': True}, optimizer=optimizer",
    ),
    (
        {"sharding": "hybrid_shard", "replicas": 2, "gradients": {"between_nodes": "int8"}},
        "gradients={'codec': 'none', 'between_nodes': 'int8:group=128'}",
    ),
    ({"engine": "ddp", "sync": {"every": 32}}, "sync={'every': 32}, optimizer=optimizer"),
    ({"engine": "manual", "gradients": "int4"}, "gradients={'codec': 'int4:group=128'}"),
]


@pytest.mark.parametrize(("document", "expected"), CALLS)
def test_the_call_has_what_the_strategy_sets(document, expected):
    line, *end = parse_strategy(document).canonical().attach_call().splitlines()
    assert line == f"handle = shardlab.attach(model, {expected})"
    assert end == ["handle.synchronize()  # after the last step"] * ("sync" in document)


@pytest.mark.parametrize("document", [document for document, _ in CALLS])
def test_yaml_and_python_read_the_same_mapping(document):
    strategy = parse_strategy(document).canonical()
    written, arguments = strategy.written(), {}
    assert yaml.safe_load(repr(written)) == written
    assert parse_strategy(written).hash() == strategy.hash()
    for argument in ast.parse(strategy.attach_call().splitlines()[0]).body[0].value.keywords:
        if argument.arg != "optimizer":
            text = ast.unparse(argument.value)
            arguments[argument.arg] = yaml.safe_load(text)
            assert ast.literal_eval(text) == arguments[argument.arg]
    assert arguments.items() <= written.items()
