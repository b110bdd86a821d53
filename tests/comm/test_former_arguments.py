"""A call of `attach` as it was once is answered by the call to write."""

import ast
import re

import pytest
from torch import nn

import shardlab
from shardlab.core.errors import UserError
from tests.comm.wrapped_models import ddp, fsdp2
from tests.ranks import on_ranks

MODEL = nn.Linear(1, 1)


@pytest.mark.parametrize(
    ("codecs", "former", "new"),
    [
        (["int8"], {"error_feedback": True}, "{'codec': 'int8', 'error_feedback': True}"),
        ([], {"gradients": "int8", "residual": "bf16"}, "{'codec': 'int8', 'residual': 'bf16'}"),
        ([], {"between_nodes": "int8"}, "{'between_nodes': 'int8'}"),
        ([], {"exclude": "*.bias"}, "{'exclude': ['*.bias']}"),
        ([], {"warmup_steps": 3, "decay": 0.9}, "{'decay': 0.9, 'warmup_steps': 3}"),
    ],
)
def test_options_of_gradients(codecs, former, new):
    with pytest.raises(UserError, match=re.escape(f"attach(model, gradients={new})")):
        shardlab.attach(MODEL, *codecs, **former)


@pytest.mark.parametrize(
    ("codecs", "former", "new"),
    [
        (
            ["int4", "int8"],
            {"weights_minimum_size": 0},
            "gradients={'codec': 'int4'}, weights={'codec': 'int8', 'minimum_size': 0}",
        ),
        (["none"], {"sync_every": 8}, "sync={'every': 8}"),
        (
            ["int8"],
            {"sync_every": 8, "outer": {"codec": "int4"}, "warmup_steps": 2},
            "gradients={'codec': 'int8', 'warmup_steps': 2}, sync={'every': 8, 'codec': 'int4'}",
        ),
    ],
)
def test_options_of_weights_and_of_synchronisation(codecs, former, new):
    with pytest.raises(UserError, match=re.escape(f"write attach(model, {new})")):
        shardlab.attach(MODEL, *codecs, **former)


@pytest.mark.parametrize(
    ("arguments", "former", "new"),
    [
        (
            {"gradients": {"codec": "int8", "decay": 0.9}},
            {"error_feedback": True},
            "gradients={'codec': 'int8', 'decay': 0.9, 'error_feedback': True}",
        ),
        (
            {"gradients": shardlab.Compression(warmup_steps=3)},
            {"minimum_size": 0},
            "gradients={'warmup_steps': 3, 'minimum_size': 0}",
        ),
        (
            {"weights": {"codec": "int8"}},
            {"weights_minimum_size": 0},
            "weights={'codec': 'int8', 'minimum_size': 0}",
        ),
        (
            {"sync": {"every": 8}},
            {"outer": {"momentum": 0.5}},
            "sync={'every': 8, 'momentum': 0.5}",
        ),
        (
            {"sync": shardlab.Sync(every=8)},
            {"outer": {"momentum": 0.5}},
            "sync={'every': 8, 'momentum': 0.5}",
        ),
    ],
)
def test_former_arguments_beside_new_forms_keep_what_these_say(arguments, former, new):
    with pytest.raises(UserError, match=re.escape(f"write attach(model, {new})")):
        shardlab.attach(MODEL, **arguments, **former)


@on_ranks(2)
def test_what_is_to_be_written_is_taken(group):
    for wrap, former in (
        (fsdp2, {"error_feedback": True, "exclude": "*.bias", "weights_minimum_size": 0}),
        (ddp, {"sync_every": 4, "outer": {"codec": "int4"}, "warmup_steps": 3}),
    ):
        codec = "int8" if wrap is fsdp2 else "none"
        with pytest.raises(UserError) as refused:
            shardlab.attach(wrap(group), codec, **former)
        call = ast.parse(str(refused.value).partition("write ")[2]).body[0].value
        new = {argument.arg: ast.literal_eval(argument.value) for argument in call.keywords}
        shardlab.attach(wrap(group), **new)


def test_what_never_was_is_an_error_of_python():
    with pytest.raises(TypeError, match="unexpected keyword argument 'gradient'"):
        shardlab.attach(MODEL, gradient="int8")
