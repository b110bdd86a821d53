"""The source distribution and the wheel built from it: what they hold, and an experiment that the
wheel makes and runs."""

import json
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import torch
from packaging.metadata import Metadata

from stages.folder import FILES
from tests.pipeline.test_light_install import SCRIPT
from tests.pipeline.workspace import PARTS, ROOT, copy_parts

PACKAGES = Path(torch.__file__).parents[1]
"""of the project: its path files, which name the source, are not read where a path file names it"""


def test_the_wheel_takes_all_that_init_writes() -> None:
    scikit_build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["scikit-build"]
    included = scikit_build["wheel"]["force-include"]
    assert {*included} == {*FILES, "csrc"}
    assert all(place == f"shardlab/stages/pipeline/{name}" for name, place in included.items())


STRAYS = ["data/tokens/train.bin", "results/results.jsonl", "shardlab/kernels/libold.so"]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both, of a copy: a build writes beside its sources."""
    folder = tmp_path_factory.mktemp("built")
    source = folder / "source"
    copy_parts([*PARTS, "CHANGELOG.md", "CITATION.cff", "LICENSE"], ROOT, source)
    for stray in STRAYS:
        (source / stray).parent.mkdir(parents=True, exist_ok=True)
        (source / stray).write_text("of a run\n")
    # one of the three libraries is enough
    less = [f"-Ccmake.define.SHARDLAB_HAVE_V{level}=OFF" for level in (3, 4)]
    subprocess.run([sys.executable, "-m", "build", *less, "-o", folder, source], check=True)
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (path,) = built.glob("*.whl")
    return path


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_source_distribution_has_sources_alone(built: Path) -> None:
    (packed,) = built.glob("*.tar.gz")
    with tarfile.open(packed) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
        (info,) = (
            member for member in archive if member.name.count("/") == 1 and "PKG" in member.name
        )
        described = archive.extractfile(info)
        assert described is not None
        metadata = Metadata.from_email(described.read(), validate=True)
    for path in (*FILES, "LICENSE", "csrc", "shardlab/cli.py"):
        assert any(name == path or name.startswith(f"{path}/") for name in names), path
    assert not names & {*STRAYS}
    assert metadata.license_expression == "Apache-2.0" and metadata.license_files == ["LICENSE"]
    assert metadata.description_content_type == "text/markdown"
    assert (metadata.description or "").strip() == (ROOT / "README.md").read_text().strip()


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
        assert "shardlab/kernels/libshardlab_kernels.so" in names


@pytest.mark.long
@pytest.mark.timeout(900)
def test_an_experiment_of_the_wheel_trains(wheel: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    python, command = tmp_path / "venv/bin/python", tmp_path / "venv/bin/shardlab"
    purelib = sysconfig.get_path("purelib", vars={"base": str(tmp_path / "venv")})
    pip = [sys.executable, "-m", "pip", "--python", python]
    subprocess.run([*pip, "install", "--no-deps", "--quiet", wheel], check=True)
    Path(purelib, "packages.pth").write_text(f"{PACKAGES}\n")

    def run(*words: str | Path, folder: Path = tmp_path, path: str = "/usr/bin:/bin") -> str:
        environment = {"PATH": path, "HOME": str(tmp_path)}
        done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    found = run(python, "-c", "import shardlab; print(shardlab.__file__)")
    assert found.startswith(purelib), found
    run(python, "-c", SCRIPT)
    (tmp_path / "book.txt").write_text("\n\n".join(f"Word {i} of some. " * 9 for i in range(300)))
    said = run(command, "init", "mine", "--text", "book.txt", "--link", "none")
    mine = tmp_path / "mine"
    assert "cd " in said and len((mine / "params.yaml").read_text().splitlines()) < 20
    run(command, "run", "--dry-run", folder=mine)
    shutil.copy(ROOT / "params/quick.yaml", mine / "params.yaml")
    trained = "results/train/fsdp2-int8/seed0/metrics.json"
    run(command, "run", "data/params.yaml", trained, folder=mine)
    kernels = json.loads((mine / trained).read_text())["kernels"]
    assert kernels.startswith("libshardlab_kernels") or not shutil.which("c++")
    # DVC knows the code by the links, and has the stages of this version
    run(python, "-m", "dvc", "repro", "prepare", folder=mine, path=f"{python.parent}:/usr/bin:/bin")
    seen = run("git", "status", "--porcelain", "--untracked-files=all", folder=mine)
    assert {line[3:].split("/")[0] for line in seen.splitlines()} & {"shardlab", "csrc"} == set()
