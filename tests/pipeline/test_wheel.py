"""What the wheel holds."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.pipeline.workspace import ROOT, copy_parts

PARTS = [".dvc/.gitignore", ".dvc/config", ".dvc/plots", ".dvcignore", ".gitignore", "LICENSE"]
PARTS += ["README.md", "Snakefile", "csrc", "data/inputs/.gitignore", "dvc.yaml", "profiles"]
PARTS += ["pyproject.toml", "shardlab", "stages", "user_codecs", "workflow"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: a build writes beside its sources."""
    folder = tmp_path_factory.mktemp("wheel")
    copy_parts(PARTS, ROOT, folder / "source")
    # one of the three libraries is enough
    less = [f"--config-settings=cmake.define.SHARDLAB_HAVE_V{level}=OFF" for level in (3, 4)]
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", *less, "-w", folder]
    subprocess.run([*command, folder / "source"], check=True)
    (built,) = folder.glob("*.whl")
    return built


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_wheel_is_one_package_for_every_python(wheel: Path) -> None:
    assert wheel.name.startswith("shardlab-") and "-py3-none-" in wheel.name
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"shardlab"}
    assert not [name for name in names if "__pycache__" in name]
    assert "shardlab/stages/pipeline/workflow/rules/check.smk" in names
    if shutil.which("c++"):
        assert "shardlab/codecs/libshardlab_kernels.so" in names
