"""An envelope tells every flipped bit, and every payload that is not what was awaited."""

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardlab.codecs.registry import make_codec
from shardlab.codecs.wire import (
    Contents,
    PayloadError,
    describe,
    message_bytes,
    seal,
    unseal,
)

CONTENTS = Contents("int8:group=64", 100, "layer>1", 3)


def sealed(size, contents=CONTENTS):
    message = torch.randint(0, 256, (message_bytes(size) + 5,), dtype=torch.uint8)
    payload = message[8 : 8 + size].clone()
    return seal(message, size, contents), payload


@given(size=st.integers(0, 600))
def test_a_payload_comes_out_as_it_went_in(size):
    message, payload = sealed(size)
    assert message.numel() == message_bytes(size) == 8 + (size + 7) // 8 * 8
    assert not message[8 + size :].any()
    assert torch.equal(unseal(message, size, CONTENTS, 0), payload)


@given(size=st.integers(1, 600), data=st.data())
def test_one_flipped_bit_is_noticed(size, data):
    message, _ = sealed(size)
    place = data.draw(st.integers(0, message.numel() - 1))
    message[place] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(PayloadError, match=r"rank 5 .*int8:group=64.*'layer>1'"):
        unseal(message, size, CONTENTS, 5)


def test_bytes_that_changed_places_are_noticed():
    message, _ = sealed(600)
    first, second = message[8:264].clone(), message[264:520].clone()
    message[8:264], message[264:520] = second, first
    with pytest.raises(PayloadError, match="damaged"):
        unseal(message, 600, CONTENTS, 0)


@pytest.mark.parametrize(
    "other",
    [
        CONTENTS._replace(codec="int8:group=128"),
        CONTENTS._replace(elements=99),
        CONTENTS._replace(unit="layer>0"),
        CONTENTS._replace(step=4),
    ],
)
def test_a_payload_of_something_else_is_foreign(other):
    message, _ = sealed(40, other)
    with pytest.raises(PayloadError, match=r"rank 2 is not what .*" + re.escape(str(CONTENTS))):
        unseal(message, 40, CONTENTS, 2)


def test_a_codec_is_described_by_its_options():
    assert describe(make_codec("int8:group=64")) == "int8:format=int8,group=64"
    assert describe(make_codec("natural")) == "natural:format=natural,group=1024"
    assert describe(make_codec("none")) == "none"
    assert describe(make_codec("topk:density=0.1")).startswith("topk:density=0.1")


def test_the_header_is_what_the_format_says():
    """Computed as docs/wire-formats.md puts it, without the library."""
    import hashlib

    message, payload = sealed(300)
    text = b"int8:group=64\x00100\x00layer>1\x003"
    assert bytes(message[:4].tolist()) == hashlib.blake2b(text, digest_size=4).digest()
    padded = bytes(payload.tolist()) + bytes(4)
    words = [int.from_bytes(padded[i : i + 8], "little") for i in range(0, len(padded), 8)]
    rows = -(-len(words) // 32)
    a = sum(words)
    b = sum((rows - j // 32) * word for j, word in enumerate(words))
    c = (a + 2 * 0x9E3779B97F4A7C15 * b) % 2**64
    check = (c >> 32) ^ (c % 2**32)
    assert bytes(message[4:8].tolist()) == check.to_bytes(4, "little")
