"""Triton's radix selection in its interpreter, against a stable sort."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.kernel_vectors import any_bits, bits

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1",
    reason="on a GPU tests/codecs/test_devices.py runs the kernels themselves",
)

from shardlab.kernels.triton.select import select  # noqa: E402

vectors = st.one_of(
    st.builds(any_bits, st.integers(1, 5000), st.integers(0, 2**31)),
    # few different values: ties decide
    st.builds(
        lambda n, seed: (
            torch.randint(-3, 4, (n,), generator=torch.Generator().manual_seed(seed)) / 2
        ),
        st.integers(1, 5000),
        st.integers(0, 2**31),
    ),
)


@given(vectors, st.floats(0, 1))
@settings(max_examples=30)
def test_keeps_the_largest_and_of_equals_the_first(x, share):
    k = round(share * len(x))
    patterns = x.view(torch.int32) & 0x7FFFFFFF
    expected = patterns.sort(descending=True, stable=True).indices[:k].sort().values
    indices, values = select(x, k)
    assert indices.tolist() == expected.tolist()
    assert bits(values) == bits(x[expected])


def test_all_kernels_compile_for_a_gpu_without_fused_multiply_add():
    script = Path(__file__).with_name("triton_compiles.py")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, script],
        env=environment | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert len(run.stdout.splitlines()) >= 7 and "True" not in run.stdout, run.stdout
