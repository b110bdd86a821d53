"""Codecs as text: types of option values, and round trips."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.core.errors import UserError
from shardlab.strategy.codec_options import TopKSpec
from shardlab.strategy.codec_table import codec_text, parse_codec, split_text
from shardlab.strategy.document import parse_strategy


@pytest.mark.parametrize(
    ("literal", "value"),
    [
        ("1e-3", 1e-3),
        ("2.5e5", 2.5e5),
        ("5.e-1", 0.5),
        ("0.01", 0.01),
        ("true", True),
        ("e4m3", "e4m3"),
        ("null", None),
    ],
)
def test_option_values_have_the_type_of_their_literal(literal, value):
    found = split_text(f"some:option={literal}")["option"]
    assert found == value and type(found) is type(value)


@given(st.floats(0, 1, exclude_min=True))
def test_text_round_trips(density):
    spec = TopKSpec(density=density)
    assert parse_strategy({"gradients": {"codec": codec_text(spec)}}).gradients.codec == spec


def test_a_codec_alone_stands_for_the_mapping_with_it():
    short = parse_strategy({"gradients": "int8:group=64", "weights": "int4"})
    assert short == parse_strategy(
        {"gradients": {"codec": "int8:group=64"}, "weights": {"codec": "int4"}}
    )


@pytest.mark.parametrize("value", [">128", "'", "2020-01-40", "[" * 3000])
def test_an_option_that_is_not_yaml_is_one_line(value):
    with pytest.raises(UserError, match="its value is not YAML"):
        split_text(f"int8:group={value}")


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("nc", "natural"),
        ("thresholdv", "threshold:threshold=0.001"),
        ("signsgd", "sign"),
        ("terngrad", "qsgd:levels=1"),
        ("dgc", "topk"),
        ("fp32", "none"),
        ("half", "fp16"),
    ],
)
def test_the_name_that_others_give_a_codec_is_answered_with_ours(name, ours):
    with pytest.raises(UserError) as refused:
        parse_strategy({"gradients": {"codec": name}})
    assert str(refused.value).endswith(f"unknown codec {name!r}; did you mean {ours!r}?")
    assert parse_strategy({"gradients": {"codec": ours}})


def test_bf16_is_written_as_before_it_had_an_option() -> None:
    plain = parse_codec("bf16")
    assert plain.model_dump(mode="json") == {"name": "bf16"} and codec_text(plain) == "bf16"
    assert parse_codec({"name": "bf16", "rounding": "nearest"}) == plain
    assert codec_text(parse_codec("bf16:rounding=stochastic")) == "bf16:rounding=stochastic"
