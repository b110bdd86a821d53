"""Laws of the envelope: it detects every flipped bit and every payload of other contents."""

import hashlib
import re

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from tests.devices.late_device import late_cpu

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
def test_one_flipped_bit_is_detected(size, data):
    message, _ = sealed(size)
    place = data.draw(st.integers(0, message.numel() - 1))
    message[place] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(PayloadError, match=r"rank 5 .*int8:group=64.*'layer>1'"):
        unseal(message, size, CONTENTS, 5)


@given(size=st.integers(0, 600), data=st.data())
def test_random_bytes_are_refused_or_change_nothing(size, data):
    """From any place on, headers of this version and of these contents included."""
    message, payload = sealed(size)
    start = data.draw(st.integers(0, message.numel() - 1))
    noise = data.draw(st.binary(min_size=1, max_size=message.numel() - start))
    hostile = message.clone()
    hostile[start : start + len(noise)] = torch.tensor(list(noise), dtype=torch.uint8)
    if torch.equal(hostile, message):
        assert torch.equal(unseal(hostile, size, CONTENTS, 0), payload)
    else:
        with pytest.raises(PayloadError, match="rank 5 ") as error:
            unseal(hostile, size, CONTENTS, 5)
        assert "\n" not in str(error.value)


def test_bytes_that_changed_places_are_detected():
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
def test_a_payload_of_other_contents_is_refused(other):
    message, _ = sealed(40, other)
    with pytest.raises(PayloadError, match=r"rank 2 is not the one .*" + re.escape(str(CONTENTS))):
        unseal(message, 40, CONTENTS, 2)


def test_a_codec_is_described_by_its_options():
    assert describe(make_codec("int8:group=64")) == "int8:format=int8,group=64"
    assert describe(make_codec("natural")) == "natural:format=natural,group=1024"
    assert describe(make_codec("none")) == "none"
    assert describe(make_codec("topk:density=0.1")).startswith("topk:density=0.1")


def test_the_header_is_what_the_format_says():
    """Computed as docs/wire-formats.md states it, without the library."""
    message, payload = sealed(300)
    text = b"int8:group=64\x00100\x00layer>1\x003"
    fingerprint = hashlib.blake2b(text, digest_size=3).digest()
    digest = xxhash.xxh3_64_intdigest(bytes(payload.tolist()) + bytes(4)) % 2**32
    assert bytes(message[:8].tolist()) == b"\x03" + fingerprint + digest.to_bytes(4, "little")


def test_another_version_is_named():
    message, _ = sealed(40)
    message[0] = 1
    with pytest.raises(PayloadError, match=r"rank 3 .*version 1, this rank reads version 3: inst"):
        unseal(message, 40, CONTENTS, 3)


@given(size=st.integers(1, 600), data=st.data())
def test_a_device_finds_a_flipped_bit_when_it_is_read(size, data):
    reports = []

    def unsealed():
        return unseal(message, size, CONTENTS, 5, lambda *report: reports.append(report))

    with late_cpu():
        message, payload = sealed(size)
        assert torch.equal(unsealed(), payload)
        message[data.draw(st.integers(0, message.numel() - 1))] ^= 1 << data.draw(st.integers(0, 7))
        unsealed()
    (good, read), (bad, read_bad) = reports
    read(int(good))
    with pytest.raises(PayloadError, match=r"rank 5 .*int8:group=64.*'layer>1'"):
        read_bad(int(bad))
