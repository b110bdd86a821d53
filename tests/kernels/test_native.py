import os
import shutil
import subprocess
import sys
from ctypes import CDLL, c_float, c_int64, c_void_p
from pathlib import Path

import pytest
import torch
from kernel_vectors import any_bits, bits

from shardlab.kernels import bf16, int8, native

SOURCES = Path(__file__).parents[2] / "csrc"
PROBE = """
import sys
import torch
from pathlib import Path
from shardlab.kernels import int8, native
if len(sys.argv) > 1:
    native.LIBRARY = Path(sys.argv[1])
x = torch.arange(10.0)
print(native.available(), int8.encode(x, 8).tolist() == int8.encode(x, 8).tolist())
"""


def probe(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-c", PROBE, *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )


def test_without_a_library_the_reference_runs_and_says_so_once(tmp_path):
    run = probe(str(tmp_path / "absent.so"), SHARDLAB_KERNELS="")
    assert run.stdout.split() == ["False", "True"]
    assert run.stderr.count("no compiled kernels") == 1


def test_the_reference_can_be_chosen_silently():
    run = probe(SHARDLAB_KERNELS="reference")
    assert run.stdout.split() == ["False", "True"]
    assert run.stderr == ""


def test_another_choice_is_refused():
    run = probe(SHARDLAB_KERNELS="fast")
    assert "SHARDLAB_KERNELS: set it to 'reference' or not at all (found 'fast')" in run.stderr


def test_kernels_appear_in_profiles_by_name():
    x, payload = torch.randn(64), torch.empty(2 * 64, dtype=torch.uint8)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        bf16.encode(x, payload)
        int8.decode_add(int8.encode(x, 8), 8, x)
    names = {event.key for event in profile.key_averages()}
    assert {"shardlab::bf16_encode", "shardlab::int8_encode", "shardlab::int8_decode_add"} <= names


def test_operators_trace_without_data():
    with torch._subclasses.FakeTensorMode():
        x = torch.empty(100)
        payload = int8.encode_residual(x, torch.empty(100), 8)
        int8.decode_add(payload, 8, x, 0.5)
        assert payload.shape == (2 * 13 + 100,)


@pytest.mark.skipif(not shutil.which("c++"), reason="no C++ compiler")
def test_all_instruction_sets_give_the_same_bits(tmp_path):
    """The library picks this machine's best code; the plain code must agree with it."""
    if not native.available():
        pytest.skip("no compiled kernels")
    plain = tmp_path / "plain.so"
    sources = map(str, SOURCES.glob("*.cpp"))
    flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-fPIC", "-shared"]
    subprocess.run(["c++", *flags, *sources, "-o", str(plain)], check=True)
    library = CDLL(str(plain))
    for seed, n in enumerate([1, 7, 129, 5000]):
        x, kept = any_bits(n, seed), torch.randn(n)
        kept_plain = kept.clone()
        payload = int8.encode_residual(x, kept, 128)
        plain_payload = torch.zeros_like(payload)
        library.int8_encode_residual(
            c_void_p(x.data_ptr()),
            c_void_p(kept_plain.data_ptr()),
            c_int64(n),
            c_int64(128),
            c_void_p(plain_payload.data_ptr()),
        )
        assert torch.equal(payload, plain_payload)
        assert bits(kept) == bits(kept_plain)
        int8.decode_add(payload, 128, kept, 1 / 3)
        library.int8_decode_add(
            c_void_p(payload.data_ptr()),
            c_int64(n),
            c_int64(128),
            c_float(1 / 3),
            c_void_p(kept_plain.data_ptr()),
        )
        assert bits(kept) == bits(kept_plain)
