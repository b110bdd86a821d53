"""Codecs are made from one table, and mistakes are answered with what is valid."""

import re
from inspect import signature
from typing import Literal
from unittest.mock import patch

import pytest
import torch

from shardlab.codecs.base import Codec
from shardlab.codecs.identity import Identity
from shardlab.codecs.multi_phase import MultiPhaseMethod
from shardlab.codecs.registry import make_codec, make_method
from shardlab.core.errors import UserError
from shardlab.strategy.codec_options import CodecSpec, Int8Spec
from shardlab.strategy.codec_table import BUILT_IN, CODECS, parse_codec, register

every_name = pytest.mark.parametrize("name", BUILT_IN)


class Halves(Identity):
    name = "halves"
    linear = False

    def __init__(self, digits: int = 3) -> None:
        self.digits = digits

    def payload_bytes(self, n):
        return 2 * n

    def encode(self, vector, key=None, out=None):
        return vector.half().view(torch.uint8)

    def decode_add(self, payload, out, alpha=1.0, key=None):
        out.add_(payload.view(torch.float16).float(), alpha=alpha)


class HalvesSpec(CodecSpec):
    """Rounded to float16."""

    name: Literal["halves"] = "halves"
    digits: int = 3


@pytest.fixture
def no_other():
    """Codecs that a test registers are forgotten after it."""
    with patch.dict(CODECS):
        yield


def test_the_three_ways_to_name_a_codec_agree():
    by_text = make_codec("int8:group=64")
    by_mapping = make_codec({"name": "int8", "group": 64})
    assert by_text.group == by_mapping.group == make_codec(Int8Spec(group=64)).group == 64


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("int9", ["int9", "did you mean 'int4' or 'int8'?"]),
        ("xyz", ["xyz", "valid: bf16, ", "import its module first (params.yaml: `codecs`)"]),
        ("int8:grup=64", ["grup", "group"]),
        ("int8:group", ["group", "key=value"]),
        ("topk:density=2", ["density"]),
        (3, ["a codec is its name"]),
    ],
)
def test_a_wrong_name_or_option_is_named_with_the_fix(spec, words):
    with pytest.raises(UserError) as caught:
        make_codec(spec)
    assert "\n" not in str(caught.value)
    assert all(word in str(caught.value) for word in words)


@every_name
def test_a_specification_and_its_class_agree_in_traits_and_defaults(name):
    spec = BUILT_IN[name]
    method = make_method(next(iter(spec.examples)))
    assert method.name == name
    assert spec.multi_phase == isinstance(method, MultiPhaseMethod)
    summable = parse_codec(next(iter(spec.examples))).summable
    assert summable == (isinstance(method, Codec) and method.linear)
    by_class = {
        parameter.name: parameter.default
        for parameter in signature(type(method)).parameters.values()
    }
    fields = {key: field for key, field in spec.model_fields.items() if key != "name"}
    assert by_class.keys() == fields.keys()
    for key, field in fields.items():
        assert field.is_required() or by_class[key] == field.default, key


@pytest.mark.parametrize("spec", ["powersgd:rank=2", "sketch", "gradiveq:slice=64,components=8"])
def test_methods_of_several_phases_are_found_and_are_no_codecs(spec):
    method = make_method(spec)
    assert isinstance(method, MultiPhaseMethod)
    with pytest.raises(UserError, match="several phases"):
        make_codec(spec)


def test_a_specification_makes_a_codec_without_being_registered():
    class Own(HalvesSpec):
        factory = Halves

    codec = make_codec(Own(digits=2))
    assert (codec.name, codec.digits) == ("halves", 2)
    with pytest.raises(UserError, match="set factory in HalvesSpec"):
        make_codec(HalvesSpec())


@pytest.mark.parametrize("factory", [Halves, f"{__name__}:Halves"])
def test_a_registered_codec(no_other, factory):
    register("halves", HalvesSpec, factory)
    codec = make_codec("halves:digits=2")
    assert codec.digits == 2
    assert codec.decode(codec.encode(torch.ones(4)), 4).tolist() == [1, 1, 1, 1]
    with pytest.raises(UserError, match="digitz"):
        make_codec("halves:digitz=2")


@pytest.mark.parametrize(
    ("name", "spec", "words"),
    [
        ("int8", HalvesSpec, "exists already: choose another name"),
        ("powersgd", HalvesSpec, "exists already: choose another name"),
        ("My Codec", HalvesSpec, "lower-case letters"),
        ("halves", Halves, "derived from shardlab.CodecSpec"),
        ("quarters", HalvesSpec, 'HalvesSpec needs the field name: Literal["quarters"]'),
    ],
)
def test_a_registration_that_cannot_be_is_refused(no_other, name, spec, words):
    with pytest.raises(UserError, match=re.escape(words)):
        register(name, spec, Halves)


@pytest.mark.parametrize(
    ("factory", "words"),
    [(Identity, "its factory must take the options"), (lambda digits: 3, "must make a shardlab")],
)
def test_a_factory_that_does_not_fit_is_refused(no_other, factory, words):
    register("halves", HalvesSpec, factory)
    with pytest.raises(UserError, match=words):
        make_codec("halves")
