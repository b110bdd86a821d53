import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shardlab.kernels import build, floats, integers, native
from tests.kernels.all_kernels import digest
from tests.kernels.kernel_vectors import needs_compiled

INT8 = integers.KERNELS["int8"]
SOURCES = Path(__file__).parents[2] / "csrc"
PROBE = """
import sys
import torch
from pathlib import Path
from shardlab.kernels import build, integers, native
if len(sys.argv) > 1:
    build.LIBRARY, build.SOURCES = Path(sys.argv[1]), Path("absent")
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
    for library in native.builds():
        alone = shutil.copy(library, tmp_path / "alone.so")
        assert digest_of(alone) == expected, library.name


@needs_compiled
@pytest.mark.skipif(not shutil.which("c++"), reason="no C++ compiler")
def test_optimization_does_not_change_the_bits(tmp_path):
    plain = tmp_path / "plain.so"
    sources = map(str, SOURCES.glob("*.cpp"))
    flags = ["-std=c++17", "-O0", "-ffp-contract=off", "-fPIC", "-shared", "-Wno-psabi"]
    subprocess.run(["c++", *flags, *sources, "-o", str(plain)], check=True)
    assert digest_of(plain) == digest()


@pytest.fixture
def source_tree(tmp_path):
    """A copy of csrc/ and shardlab/ with built kernels."""
    if not native.available():
        pytest.skip("no compiled kernels")
    ignored = shutil.ignore_patterns("__pycache__")
    for folder in ("csrc", "shardlab"):
        shutil.copytree(SOURCES.parent / folder, tmp_path / folder, ignore=ignored)
    return tmp_path


def kernels_of(tree):
    """The output of a process that loads the kernels of a source tree."""
    return subprocess.run(
        [sys.executable, "-c", "from shardlab.kernels import native; print(native.available())"],
        cwd=tree,
        capture_output=True,
        text=True,
    )


def truncate(library):
    os.truncate(library, library.stat().st_size // 2)


def replace_by_text(library):
    library.write_text("int8")


def change_architecture(library):
    content = bytearray(library.read_bytes())
    content[18:20] = b"\x08\x00"  # MIPS
    library.write_bytes(content)


def change_sources(library):
    (library.parents[2] / "csrc/int8.cpp").open("a").write("// changed\n")


@pytest.mark.long
@pytest.mark.skipif(not shutil.which("c++"), reason="no C++ compiler")
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, "is truncated"),
        (replace_by_text, "is no 64-bit ELF library"),
        (change_architecture, "was built for another architecture"),
        (change_sources, "was built from other sources"),
        (Path.unlink, "no compiled kernels"),
    ],
)
def test_unusable_kernels_of_a_source_tree_are_named_and_rebuilt(source_tree, damage, message):
    damage(source_tree / "shardlab/kernels" / build.LIBRARY.name)
    run = kernels_of(source_tree)
    assert run.stdout == "True\n", run.stderr
    assert message in run.stderr
    assert kernels_of(source_tree).stderr == ""


@pytest.mark.parametrize("damage", [truncate, replace_by_text, change_architecture])
def test_unusable_kernels_of_a_package_are_named_and_the_reference_runs(source_tree, damage):
    shutil.rmtree(source_tree / "csrc")
    damage(source_tree / "shardlab/kernels" / build.LIBRARY.name)
    run = kernels_of(source_tree)
    assert run.stdout == "False\n", run.stderr
    assert run.stderr.count("\n") == 1
    assert "using the PyTorch reference" in run.stderr


@pytest.mark.skipif(not shutil.which("c++"), reason="no C++ compiler")
def test_sources_that_do_not_compile_end_the_command(source_tree):
    source = source_tree / "csrc/int8.cpp"
    source.write_text(f"#error changed\n{source.read_text()}")
    run = kernels_of(source_tree)
    assert run.returncode != 0
    assert "csrc: the kernels do not compile: " in run.stderr
    assert "#error changed" in run.stderr.splitlines()[-1]
