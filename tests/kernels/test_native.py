"""The library that serves, its build from csrc/, and the reference where there is none."""

import os
import shutil
import subprocess
import sys

import pytest
import torch

from shardlab.codecs.integers import Int8
from shardlab.core.errors import UserError
from shardlab.kernels import native
from tests.codecs.vectors import needs_compiled, reference

needs_compiler = pytest.mark.skipif(not shutil.which("c++"), reason="no C++ compiler")


@pytest.fixture
def unloaded(monkeypatch):
    """Unload the kernels before the test, and after it, so that they are loaded again."""
    monkeypatch.delenv("SHARDLAB_KERNELS", raising=False)
    native.library.cache_clear()
    yield monkeypatch
    native.library.cache_clear()


@pytest.fixture
def source_tree(unloaded, tmp_path):
    """Return a copy of csrc/ and of the built kernels that is used in place of this tree."""
    shutil.copytree(native.TREE / "csrc", tmp_path / "csrc")
    for library in native.LIBRARY.parent.glob("*.so"):
        shutil.copy(library, tmp_path)
    unloaded.setattr(native, "TREE", tmp_path)
    unloaded.setattr(native, "LIBRARY", tmp_path / native.LIBRARY.name)
    return tmp_path


def reference_serves():
    x = torch.arange(10.0)
    payload = Int8(8).encode(x)
    with reference():
        return not native.available() and torch.equal(Int8(8).encode(x), payload)


@pytest.mark.parametrize(
    ("variable", "reason", "warnings"),
    [
        ("", "no compiled kernels (no C++ compiler?)", 1),
        ("reference", "SHARDLAB_KERNELS=reference", 0),
    ],
)
def test_without_a_library_the_reference_runs_and_says_why(
    unloaded, tmp_path, capfd, variable, reason, warnings
):
    unloaded.setattr(native, "LIBRARY", tmp_path / "absent.so")
    unloaded.setattr(native, "TREE", tmp_path)
    unloaded.setenv("SHARDLAB_KERNELS", variable)
    assert not native.available() and reference_serves()
    assert native.serving() == f"PyTorch reference ({reason})"
    assert capfd.readouterr().err.count(reason) == warnings


def test_of_the_ranks_of_a_node_one_says_what_to_do(unloaded, tmp_path, capfd):
    unloaded.setattr(native, "LIBRARY", tmp_path / "absent.so")
    unloaded.setattr(native, "TREE", tmp_path)
    for rank in ("0", "1"):
        unloaded.setenv("LOCAL_RANK", rank)
        native.library.cache_clear()
        assert not native.available()
    assert capfd.readouterr().err.count("install a C++ compiler, then shardlab again\n") == 1


def test_unknown_value_of_environment_variable_is_refused(unloaded):
    unloaded.setenv("SHARDLAB_KERNELS", "fast")
    expected = r"SHARDLAB_KERNELS: set it to 'reference' or not at all \(found 'fast'\)"
    with pytest.raises(UserError, match=expected):
        native.available()


@needs_compiled
def test_the_library_that_serves_is_named_with_its_sources():
    serving = native.serving()
    assert serving.startswith(f"{native.builds()[-1].name} (")
    assert serving.endswith(f", csrc {native.source_hash()[:12]}")


@needs_compiled
def test_a_library_of_another_architecture_is_named_and_the_reference_runs(source_tree, capfd):
    shutil.rmtree(source_tree / "csrc")
    native.LIBRARY.write_text("int8")
    assert not native.available() and reference_serves()
    error = capfd.readouterr().err
    assert error.count("\n") == 1 and "using the PyTorch reference" in error


@pytest.mark.long
@needs_compiled
@needs_compiler
def test_kernels_of_other_sources_are_built_anew(source_tree, capfd):
    (source_tree / "csrc/integers.cpp").open("a").write("// changed\n")
    assert native.available()
    assert "building csrc/" in capfd.readouterr().err
    assert native.built_from(native.LIBRARY) == native.source_hash()


@needs_compiled
@needs_compiler
def test_sources_that_do_not_compile_end_the_command(source_tree):
    for source in (source_tree / "csrc").glob("*.cpp"):
        source.write_text("#error changed\n")  # all of them, so that none is compiled
    with pytest.raises(UserError, match=r"csrc: the kernels do not compile: .*#error changed"):
        native.available()


@pytest.mark.long
@needs_compiled
def test_every_instruction_set_has_the_bits_of_the_reference(tmp_path):
    tests = ["tests/kernels/test_operators.py", "tests/codecs/test_selection.py"]
    for library in native.builds()[:-1]:
        # in an empty folder, where no wider library replaces it
        copy = tmp_path / library.stem / "only.so"
        copy.parent.mkdir()
        shutil.copy(library, copy)
        script = (
            "import sys, pytest, pathlib; from shardlab.kernels import native; "
            f"native.LIBRARY = pathlib.Path({str(copy)!r}); "
            "native.TREE = pathlib.Path('absent'); assert native.available(); "
            f"sys.exit(pytest.main(['-q', '-n', '0', '-k', 'reference', *{tests!r}]))"
        )
        run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
        assert run.returncode == 0, run.stdout


@pytest.mark.long
@needs_compiler
def test_sanitizers_report_nothing():
    command = [sys.executable, "-m", "tests.codecs.sanitized", "300", "1"]
    run = subprocess.run(command, capture_output=True, text=True, env=os.environ)
    assert run.returncode == 0 and run.stderr == "", run.stdout + run.stderr
