import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shardlab.kernels import floats, integers, native
from tests.kernels.all_kernels import digest
from tests.kernels.kernel_vectors import needs_compiled

INT8 = integers.KERNELS["int8"]
SOURCES = Path(__file__).parents[2] / "csrc"
PROBE = """
import sys
import torch
from pathlib import Path
from shardlab.kernels import integers, native
if len(sys.argv) > 1:
    native.LIBRARY = Path(sys.argv[1])
x = torch.arange(10.0)
encode = integers.KERNELS["int8"].encode
print(native.available(), encode(x, 8).tolist() == encode(x, 8).tolist())
"""


def probe(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-c", PROBE, *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )


def test_missing_library_is_reported_once_and_the_reference_runs(tmp_path):
    run = probe(str(tmp_path / "absent.so"), SHARDLAB_KERNELS="")
    assert run.stdout.split() == ["False", "True"]
    assert run.stderr.count("no compiled kernels") == 1


def test_reference_chosen_by_environment_is_not_reported():
    run = probe(SHARDLAB_KERNELS="reference")
    assert run.stdout.split() == ["False", "True"]
    assert run.stderr == ""


def test_unknown_value_of_environment_variable_is_refused():
    run = probe(SHARDLAB_KERNELS="fast")
    assert "SHARDLAB_KERNELS: set it to 'reference' or not at all (found 'fast')" in run.stderr


def test_kernels_appear_in_profiles_by_name():
    x = torch.randn(64)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        floats.KERNELS["bf16"].encode(x, floats.GROUP)
        INT8.decode_add(INT8.encode(x, 8), 8, x)
    names = {event.key for event in profile.key_averages()}
    assert {"shardlab::bf16_encode", "shardlab::int8_encode", "shardlab::int8_decode"} <= names


def test_operators_trace_without_data():
    with torch._subclasses.FakeTensorMode():
        x = torch.empty(100)
        payload = INT8.encode_residual(x, torch.empty(100), torch.empty(100), 8)
        INT8.decode_add(payload, 8, x, 0.5)
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


@needs_compiled
def test_all_instruction_sets_compute_the_same_bits(tmp_path):
    expected = digest()
    for build in native.builds():
        alone = shutil.copy(build, tmp_path / "alone.so")
        assert digest_of(alone) == expected, build.name


@needs_compiled
@pytest.mark.skipif(not shutil.which("c++"), reason="no C++ compiler")
def test_optimization_does_not_change_the_bits(tmp_path):
    plain = tmp_path / "plain.so"
    sources = map(str, SOURCES.glob("*.cpp"))
    flags = ["-std=c++17", "-O0", "-ffp-contract=off", "-fPIC", "-shared", "-Wno-psabi"]
    subprocess.run(["c++", *flags, *sources, "-o", str(plain)], check=True)
    assert digest_of(plain) == digest()
