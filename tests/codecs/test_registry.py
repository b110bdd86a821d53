"""Codecs are found by name, and mistakes are answered with what is valid."""

from inspect import signature

import pytest
import torch

from shardlab.codecs import registry
from shardlab.codecs.base import Content
from shardlab.codecs.identity import Identity
from shardlab.codecs.multi_phase import MultiPhaseMethod
from shardlab.core.errors import UserError
from shardlab.strategy.codec_options import SPECS


def test_the_three_ways_to_name_a_codec_agree():
    by_text = registry.make_codec("int8:group=64")
    by_mapping = registry.make_codec({"name": "int8", "group": 64})
    assert by_text.group == by_mapping.group == 64
    assert registry.make_codec(by_text) is by_text


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("int9", ["int9", "int8"]),
        ("int8:grup=64", ["grup", "group"]),
        ("int8:group", ["group", "key=value"]),
        ("topk:density=2", ["density"]),
    ],
)
def test_a_wrong_name_or_option_is_named_with_the_mend(spec, words):
    with pytest.raises(UserError) as caught:
        registry.make_codec(spec)
    assert "\n" not in str(caught.value)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize("spec", ["powersgd:rank=2", "sketch", "gradiveq:slice=64,components=8"])
def test_methods_of_several_rounds_are_found_and_are_no_codecs(spec):
    method = registry.make_method(spec)
    assert isinstance(method, MultiPhaseMethod) and registry.make_method(method) is method
    with pytest.raises(UserError, match="several rounds"):
        registry.make_codec(spec)
    with pytest.raises(UserError, match="exists already"):
        registry.register(method.name, MultiPhaseMethod)


def test_a_codec_of_ones_own(monkeypatch):
    monkeypatch.setattr(registry, "_ADDED", {})

    class Halves(Identity):
        name = "halves"

        def __init__(self, digits: int = 3) -> None:
            self.digits = digits

        def payload_bytes(self, n):
            return 2 * n

        def content(self, n, payload):
            return Content(n, 0, 0)

        def encode(self, vector, key=None, out=None):
            return vector.half().view(torch.uint8)

        def decode_add(self, payload, out, alpha=1.0, key=None):
            out.add_(payload.view(torch.float16).float(), alpha=alpha)

    registry.register("halves", Halves)
    codec = registry.make_codec("halves:digits=2")
    assert codec.digits == 2
    assert codec.decode(codec.encode(torch.ones(4)), 4).tolist() == [1, 1, 1, 1]
    with pytest.raises(UserError, match="digitz"):
        registry.make_codec("halves:digitz=2")
    with pytest.raises(UserError, match="exists already"):
        registry.register("int8", Halves)


@pytest.mark.parametrize("name", SPECS)
def test_a_method_made_by_its_class_has_the_defaults_of_its_spec(name):
    made = {**registry._BUILT_IN, **registry._IN_ROUNDS}[name]
    by_class = {each.name: each.default for each in signature(made).parameters.values()}
    fields = {key: field for key, field in SPECS[name].model_fields.items() if key != "name"}
    assert by_class.keys() == fields.keys()
    for key, field in fields.items():
        assert field.is_required() or by_class[key] == field.default, key
