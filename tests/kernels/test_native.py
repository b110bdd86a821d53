import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shardlab.kernels import casts, int8, native
from tests.kernels.all_kernels import digest

SOURCES = Path(__file__).parents[2] / "csrc"
PROBE = """
import sys
import torch
from pathlib import Path
from shardlab.kernels import int8, native
if len(sys.argv) > 1:
    native.LIBRARY = Path(sys.argv[1])
x = torch.arange(10.0)
encode = int8.KERNEL.encode
print(native.available(), encode(x, 8).tolist() == encode(x, 8).tolist())
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
    x = torch.randn(64)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        casts.BF16.encode(x, casts.GROUP)
        int8.KERNEL.decode_add(int8.KERNEL.encode(x, 8), 8, x)
    names = {event.key for event in profile.key_averages()}
    assert {"shardlab::bf16_encode", "shardlab::int8_encode", "shardlab::int8_decode"} <= names


def test_operators_trace_without_data():
    with torch._subclasses.FakeTensorMode():
        x = torch.empty(100)
        payload = int8.KERNEL.encode_residual(x, torch.empty(100), torch.empty(100), 8)
        int8.KERNEL.decode_add(payload, 8, x, 0.5)
        assert payload.shape == (2 * 13 + 100,)


def digest_of(path):
    run = subprocess.run(
        [sys.executable, Path(__file__).with_name("all_kernels.py"), path],
        env=os.environ | {"PYTHONPATH": "."},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def test_all_instruction_sets_give_the_same_bits(tmp_path):
    if not native.available():
        pytest.skip("no compiled kernels")
    expected = digest()
    for build in native.builds():
        alone = shutil.copy(build, tmp_path / "alone.so")
        assert digest_of(alone) == expected, build.name


@pytest.mark.skipif(not shutil.which("c++"), reason="no C++ compiler")
def test_optimisation_does_not_change_the_bits(tmp_path):
    if not native.available():
        pytest.skip("no compiled kernels")
    plain = tmp_path / "plain.so"
    sources = map(str, SOURCES.glob("*.cpp"))
    flags = ["-std=c++17", "-O0", "-ffp-contract=off", "-fPIC", "-shared", "-Wno-psabi"]
    subprocess.run(["c++", *flags, *sources, "-o", str(plain)], check=True)
    assert digest_of(plain) == digest()
