"""The first stages succeed on machines of many kinds: folders, rights, locales, no compiler."""

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pipeline.workspace import copy_project, environment, set_params

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

STAGES = (["prepare"], ["tokenize"], ["train", "--run", "fsdp2-int8"])
TEXT = "Füße, çığ, İstanbul, 東京 and plain words. "
COMMAND = {
    "umask": ["sh", "-c", 'umask 077; exec "$@"', "-"],
    "network": ["unshare", "-n", "sh", "-c", 'ip link set lo up; exec "$@"', "-"],
}


def project_in(folder: Path) -> Path:
    """A project with a small corpus that is not ASCII."""
    project = copy_project(folder)
    documents = [{"id": str(n), "title": f"ünï {n}", "text": TEXT * 20} for n in range(60)]
    # escaped, so that reading does not depend on the locale of this process
    (project / "texts.jsonl").write_text("".join(json.dumps(each) + "\n" for each in documents))
    source = {"source": "jsonl", "path": "texts.jsonl", "validation_share": 0.2}
    train = {"train__steps": 2, "train__warmup_steps": 1, "train__untimed_steps": 1}
    set_params(
        project, inputs={"texts": "texts.jsonl"}, data=source, tokenize={"vocabulary": 300}, **train
    )
    return project


def run_stages(
    project: Path, *prefix: str, drop: tuple[str, ...] = (), **variables: str
) -> list[str]:
    """Run the stages one after the other, and return what each said."""
    env = {k: v for k, v in environment(**variables).items() if k not in drop}
    said = []
    for name, *arguments in STAGES:
        done = subprocess.run(
            [*prefix, "python", "-m", f"stages.{name}", *arguments],
            cwd=project,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        said.append(done.stdout.decode())
        assert done.returncode == 0 and "Traceback" not in said[-1], said[-1]
    assert (project / "results/train/fsdp2-int8/seed0/metrics.json").is_file()
    return said


@contextlib.contextmanager
def other_file_system(folder: Path) -> Iterator[Path]:
    shared = Path("/dev/shm")
    if not shared.is_dir() or shared.stat().st_dev == folder.stat().st_dev:
        pytest.skip("/dev/shm is no other file system")
    with tempfile.TemporaryDirectory(dir=shared) as name:
        yield Path(name)


def test_files_are_private_in_an_odd_folder_with_the_temporary_one_elsewhere(
    tmp_path: Path,
) -> None:
    """Of a private umask; the temporary folder is on another file system."""
    project = project_in(tmp_path / """it's a "ünïcode" $HOME;`dir`""")
    of_git = {*(project / "data").rglob("*")}
    with other_file_system(tmp_path) as temporary:
        run_stages(project, *COMMAND["umask"], TMPDIR=str(temporary))
        # torch keeps a cache of its own there
        left = [path.name for path in temporary.iterdir()]
        assert not [name for name in left if not name.startswith("torchinductor_")]
    written = [path for top in ("data", "results") for path in (project / top).rglob("*")]
    public = {path for path in written if path.stat().st_mode & 0o077}
    assert written and public <= of_git


def locales() -> list[str]:
    found = subprocess.run(["locale", "-a"], stdout=subprocess.PIPE, text=True, check=False)
    return found.stdout.split()


def test_neither_locale_nor_home_changes_an_output(tmp_path: Path) -> None:
    """Nor does an interpreter that neither assumes UTF-8 nor leaves the C locale."""
    caches = ("XDG_CACHE_HOME", "HF_HOME", "MPLCONFIGDIR", "TRITON_CACHE_DIR")
    plain = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    turkish = "tr_TR.utf8" if "tr_TR.utf8" in locales() else "C.UTF-8"
    outputs = []
    # no home, and one that cannot be written
    for locale, home in ("C", {}), (turkish, {"HOME": "/proc/none"}):
        project = project_in(tmp_path / locale)
        variables = {"LC_ALL": locale, "LANG": locale, **home}
        run_stages(project, drop=(*caches, *(["HOME"] if not home else [])), **plain, **variables)
        names = ("data/corpus.json", "data/tokens/train-0.bin")
        outputs.append([(project / name).read_bytes() for name in names])
    assert outputs[0] == outputs[1]


def test_reference_kernels_are_named_where_there_is_no_compiler(tmp_path: Path) -> None:
    project = project_in(tmp_path / "project")
    (project / "shardlab/codecs/libshardlab_kernels.so").unlink()
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("python", "git"):
        (tools / name).symlink_to(str(shutil.which(name, path=environment()["PATH"])))
    # a link to python is not seen as that of the environment
    python = Path(environment()["PATH"].partition(os.pathsep)[0], "python")
    (tools / "python").unlink()
    (tools / "python").write_text(f'#!/bin/sh\nexec {python} "$@"\n')
    (tools / "python").chmod(0o755)
    *_, said = run_stages(project, PATH=str(tools))
    assert said.count("no compiled kernels") == 1


def mounted_read_only(folder: Path) -> list[str]:
    script = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec "$@"'
    return ["unshare", "-m", "sh", "-c", script, str(folder)]


def permitted(*command: str) -> None:
    if subprocess.run([*command, "true"], capture_output=True, check=False).returncode:
        pytest.skip(f"not permitted: {command[0]}")


def test_a_read_only_checkout_trains_elsewhere_without_a_network(tmp_path: Path) -> None:
    permitted(*COMMAND["network"])
    project = project_in(tmp_path / "project")
    code = copy_project(tmp_path / "code")
    for part in ("shardlab", "stages", "csrc"):
        shutil.rmtree(project / part)
    prefix = mounted_read_only(code)
    permitted(*prefix)
    run_stages(project, *COMMAND["network"], *prefix, PYTHONPATH=str(code))
