import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shardlab.codecs.kernels import build, floats, integers, native
from shardlab.core.errors import UserError
from tests.codecs.kernels.kernel_vectors import needs_compiled

INT8 = integers.KERNELS["int8"]
needs_compiler = pytest.mark.skipif(not shutil.which("c++"), reason="no C++ compiler")


@pytest.fixture
def unloaded(monkeypatch):
    """The test loads kernels anew; after it, those of this tree are loaded."""
    monkeypatch.delenv("SHARDLAB_KERNELS", raising=False)
    monkeypatch.setattr(native, "_fault", native._fault)
    native.library.cache_clear()
    yield monkeypatch
    native.library.cache_clear()


def reference_runs():
    x = torch.arange(10.0)
    expected = torch.empty(INT8.payload_bytes(10, 8), dtype=torch.uint8)
    INT8.encode_reference(x, None, None, 8, 0, 0, expected)
    return not native.available() and torch.equal(INT8.encode(x, 8), expected)


def test_missing_library_is_reported_once_and_the_reference_runs(unloaded, tmp_path, capfd):
    unloaded.setattr(build, "LIBRARY", tmp_path / "absent.so")
    unloaded.setattr(build, "SOURCES", tmp_path / "absent")
    assert reference_runs() and reference_runs()
    assert capfd.readouterr().err.count("no compiled kernels") == 1


def test_reference_chosen_by_environment_is_not_reported(unloaded, capfd):
    unloaded.setenv("SHARDLAB_KERNELS", "reference")
    assert reference_runs()
    assert native.serving() == "PyTorch reference (SHARDLAB_KERNELS=reference)"
    assert capfd.readouterr().err == ""


def test_unknown_value_of_environment_variable_is_refused(unloaded):
    unloaded.setenv("SHARDLAB_KERNELS", "fast")
    expected = r"SHARDLAB_KERNELS: set it to 'reference' or not at all \(found 'fast'\)"
    with pytest.raises(UserError, match=expected):
        native.available()


@needs_compiled
def test_the_library_that_serves_is_named_with_its_sources():
    said = native.serving()
    assert said.startswith(f"{native.builds()[-1].name} (")
    assert said.endswith(f", csrc {build.source_hash()[:12]}")


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


def digests_of(*libraries):
    run = subprocess.run(
        [sys.executable, "-m", "tests.codecs.kernels.all_kernels", *libraries],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.split()


@pytest.mark.long
@needs_compiled
def test_all_instruction_sets_compute_the_same_bits(tmp_path):
    # each alone in a folder: none is replaced by a wider one
    alone = [tmp_path / library.name / "alone.so" for library in native.builds()]
    for library, copy in zip(native.builds(), alone, strict=True):
        copy.parent.mkdir()
        shutil.copy(library, copy)
    digests = digests_of(*alone)
    assert len(digests) == len(alone) and len(set(digests)) == 1


@pytest.fixture
def source_tree(unloaded, tmp_path):
    """A copy of csrc/ and of the built kernels, which is used in place of this tree."""
    shutil.copytree(build.SOURCES, tmp_path / "csrc")
    library = tmp_path / "shardlab/codecs/kernels" / build.LIBRARY.name
    library.parent.mkdir(parents=True)
    for built in build.LIBRARY.parent.glob("*.so"):
        shutil.copy(built, library.parent)
    for name, path in (("_TREE", tmp_path), ("SOURCES", tmp_path / "csrc"), ("LIBRARY", library)):
        unloaded.setattr(build, name, path)
    return tmp_path


def truncate(library):
    os.truncate(library, library.stat().st_size // 2)


def replace_by_text(library):
    library.write_text("int8")


def change_architecture(library):
    content = bytearray(library.read_bytes())
    content[18:20] = b"\x08\x00"  # MIPS
    library.write_bytes(content)


def change_sources(library):
    (build.SOURCES / SOURCE.name).open("a").write("// changed\n")


SOURCE = build.SOURCES / "int8.cpp"
DAMAGES = {
    truncate: "is truncated",
    replace_by_text: "is no 64-bit ELF library",
    change_architecture: "was built for another architecture",
    change_sources: "was built from other sources",
    Path.unlink: "no compiled kernels",
}


@needs_compiled
@needs_compiler
@pytest.mark.parametrize(("damage", "message"), DAMAGES.items())
def test_unusable_kernels_of_a_source_tree_are_named_and_built(
    source_tree, unloaded, capfd, damage, message
):
    good = build.LIBRARY.read_bytes()

    def compile_sources():
        shutil.copy(SOURCE, build.SOURCES)
        build.LIBRARY.write_bytes(good)

    unloaded.setattr(build, "build", compile_sources)
    damage(build.LIBRARY)
    assert native.available()
    assert message in capfd.readouterr().err
    native.library.cache_clear()
    assert native.available()
    assert capfd.readouterr().err == ""


def simplify(recipe):
    """Change how sources are compiled: without optimization, for every CPU alone."""
    text = recipe.read_text()
    for before, after in (" -O3 ", " -O0 "), ("foreach(level 3 4)", "foreach(level)"):
        assert before in text
        text = text.replace(before, after)
    recipe.write_text(text)


@pytest.mark.long
@needs_compiled
@needs_compiler
def test_changed_sources_are_compiled_to_the_same_bits_without_optimization(source_tree, capfd):
    optimized = source_tree / "optimized.so"
    shutil.copy(build.LIBRARY, optimized)
    for wider in build.LIBRARY.parent.glob(f"{build.LIBRARY.stem}_*"):
        wider.unlink()
    change_sources(build.LIBRARY)
    simplify(build.SOURCES / "CMakeLists.txt")
    assert native.available()
    assert "was built from other sources" in capfd.readouterr().err
    assert build.built_from(build.LIBRARY) == build.source_hash()
    first, second = digests_of(build.LIBRARY, optimized)
    assert first == second


@needs_compiled
@pytest.mark.parametrize("damage", [truncate, replace_by_text, change_architecture])
def test_unusable_kernels_of_a_package_are_named_and_the_reference_runs(source_tree, capfd, damage):
    shutil.rmtree(build.SOURCES)
    damage(build.LIBRARY)
    assert reference_runs()
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert DAMAGES[damage] in said and "using the PyTorch reference" in said


@needs_compiled
@needs_compiler
def test_sources_that_do_not_compile_end_the_command(source_tree):
    for source in build.SOURCES.glob("*.cpp"):
        source.write_text("#error changed\n")  # all of them, so that none is compiled
    with pytest.raises(UserError, match=r"csrc: the kernels do not compile: .*#error changed"):
        native.available()
