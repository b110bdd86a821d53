"""The Triton kernels in Triton's interpreter on the CPU, against the PyTorch reference."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.codecs.kernels.all_kernels import GROUPED, KEY
from tests.codecs.kernels.kernel_vectors import any_bits, bits, vectors

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1",
    reason="on a GPU tests/codecs/test_devices.py runs the kernels themselves",
)

from shardlab.codecs.kernels.triton import formats, launch  # noqa: E402

FORMATS = {name: (GROUPED[name], format) for name, format in formats.FORMATS.items()}
GROUPS = st.sampled_from([8, 16, 128, 1000])
every_format = pytest.mark.parametrize(("kernel", "format"), FORMATS.values(), ids=FORMATS)


def check(kernel, format, x, residual, group):
    """Compare payload, residual and sums of both."""
    size = kernel.payload_bytes(len(x), group)
    payload, expected = torch.zeros(2, size, dtype=torch.uint8)
    kept, kept_expected, out, out_expected = torch.ones(4, len(x))
    format.encode(x, residual, kept, group, *KEY, payload)
    kernel.encode_reference(x, residual, kept_expected, group, *KEY, expected)
    assert payload.tolist() == expected.tolist()
    assert bits(kept) == bits(kept_expected)
    plain = torch.zeros_like(payload)
    format.encode(x, None, None, group, *KEY, plain)
    kernel.encode_reference(x, None, None, group, *KEY, expected)
    assert plain.tolist() == expected.tolist()
    for add in (False, True):
        format.decode([payload, plain, payload], group, out, 1 / 3, add)
        kernel.decode_reference([payload, plain, payload], group, out_expected, 1 / 3, add)
        assert bits(out) == bits(out_expected)


@st.composite
def pairs(draw):
    """Vector and residual: normal numbers with special values, or any bit patterns."""
    if draw(st.booleans()):
        x = draw(vectors())
        return x, draw(vectors(n=len(x)))
    n, seed = draw(st.integers(0, 600)), draw(st.integers(0, 2**31))
    x, residual = any_bits(n, seed), any_bits(n, seed + 1)
    residual[x.isnan() & residual.isnan()] = 0.0
    return x, residual


@every_format
@given(pairs(), GROUPS)
@settings(max_examples=5)
def test_formats_match_reference(kernel, format, pair, group):
    check(kernel, format, *pair, group)


def test_every_format_has_kernels():
    assert FORMATS.keys() == GROUPED.keys()


@pytest.mark.parametrize("name", [name for name, kernel in GROUPED.items() if kernel.format.random])
@pytest.mark.parametrize("key", [(0, 1), (1, 2**31), (2**31 - 1, 2**32 - 1)])
def test_keys_of_any_size_match_the_reference(name, key):
    kernel, format = FORMATS[name]
    x = torch.linspace(-1, 1, 300)
    payload, expected = torch.zeros(2, kernel.payload_bytes(300, 128), dtype=torch.uint8)
    format.encode(x, None, None, 128, *key, payload)
    kernel.encode_reference(x, None, None, 128, *key, expected)
    assert payload.tolist() == expected.tolist()


def test_keys_are_of_one_type():
    """One of another type would be compiled for, while training."""
    signed = [launch.signed(k) for k in (0, 1, 2**31 - 1, 2**31, 2**32 - 1)]
    assert signed == [0, 1, 2**31 - 1, -(2**31), -1]


def test_addresses_are_copied_to_a_device_once():
    payloads = torch.zeros(3, 40, dtype=torch.uint8)
    before = launch._table.cache_info().misses
    for _ in range(5):
        FORMATS["int8"][1].decode([*payloads], 128, torch.zeros(30), 1.0, False)
    assert launch._table.cache_info().misses == before + 1


@pytest.mark.long
@pytest.mark.parametrize(
    "arguments",
    # every kernel for one GPU, and for one of the others: for any numbers on the one, for ones on
    # the other
    [("90",), ("80", "0", "2"), ("100", "1", "2")],
    ids=lambda arguments: arguments[0],
)
def test_all_kernels_compile_for_gpus_without_inexact_instructions(arguments):
    script = Path(__file__).with_name("triton_compiles.py")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, script, *arguments],
        env=environment | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert len(lines) > (2 if len(arguments) == 1 else 1) * len(FORMATS)
    assert [line for line in lines if not line.endswith(" []")] == []
