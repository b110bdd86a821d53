"""Folders of experiments, for `make run PARAMS=FILE`, `shardlab init` and `shardlab search`."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from shardlab.core.errors import UserError
from shardlab.core.files import write_text

_HERE = Path(__file__).resolve().parent
_WHEEL = _HERE / "pipeline"
"""where pyproject.toml puts the files of the pipeline in a wheel"""
_CODE = ("csrc", "shardlab", "stages")
_DAG = (".dvc/plots", ".dvcignore", "Snakefile", "dvc.yaml", "profiles", "user_codecs", "workflow")
_FOLDERS = ("data/inputs", "results/tune")
"""that stages depend on, also where they are empty"""
FILES = (
    *(*_DAG, ".dvc/.gitignore", ".dvc/config", ".gitignore"),
    *(f"{folder}/.gitignore" for folder in _FOLDERS),
)
"""of which a folder that stands alone has copies"""


def make_folder(params: str | Path, target: Path, root: Path | None = None) -> None:
    """Make the folder of an experiment, or write again what it has of the pipeline.

    Args:
        params: text of its params.yaml, or a file that this is a link to.
        root: folder whose files, lock and cache of DVC it shares by links, so that both tools find
            what they find there, and two experiments never disturb each other's timings. None: it
            has copies in a git repository, and links to the installed code, which git ignores.

    Raises:
        UserError: it is of other parameters or a part of shardlab's repository, or git is missing.
    """
    path = target / "params.yaml"
    if isinstance(params, Path) and path.exists() and not path.samefile(params):
        raise UserError(f"{target} is of {path.resolve()}: rename {params}, or remove {target}")
    if root is None:
        _copy_pipeline(target)
    else:
        for name in (*_CODE, *_DAG, ".shardlab.lock"):
            _link(target / name, os.path.relpath(root / name, (target / name).parent))
        for folder in _FOLDERS:
            (target / folder).mkdir(parents=True, exist_ok=True)
        cache = f"[cache]\n    dir = {os.path.relpath(root / '.dvc/cache', target / '.dvc')}\n"
        core = "[core]\n    analytics = false\n    no_scm = true\n"
        write_text(target / ".dvc/config", core + cache)
    if isinstance(params, Path):
        if not path.exists():
            _link(path, os.path.relpath(params, target))
    elif not path.exists() or path.read_text(encoding="utf-8") != params:
        write_text(path, params)  # a newer file repeats work


def _copy_pipeline(folder: Path) -> None:
    taken = any((folder / name).exists() and not (folder / name).is_symlink() for name in _CODE)
    if taken or (folder / "Snakefile").is_symlink():
        raise UserError(f"{folder}: a folder of the repository of shardlab: name another one")
    git = shutil.which("git")
    if git is None:
        raise UserError("git is missing: install it, DVC needs it")
    for name in FILES:
        source, copy = _source(name), folder / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, copy, ignore=ignored, dirs_exist_ok=True)
        else:
            shutil.copyfile(source, copy)
    with (folder / ".gitignore").open("a", encoding="utf-8") as file:
        file.writelines(f"/{name}\n" for name in _CODE)
    for name in _CODE:
        _link(folder / name, str(_source(name)))
    if subprocess.run([git, "-C", folder, "rev-parse"], capture_output=True).returncode:
        subprocess.run([git, "init", "--quiet", folder], check=True)


def _source(name: str) -> Path:
    """Return where a file or folder is installed."""
    if not _WHEEL.is_dir():
        return _HERE.parent / name
    return {"shardlab": _HERE.parent, "stages": _HERE}.get(name, _WHEEL / name)


def _link(path: Path, to: str) -> None:
    # one that is right stays: a job may be using it
    if not path.is_symlink() or path.readlink() != Path(to):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.symlink_to(to)


if __name__ == "__main__":
    try:
        make_folder(Path(sys.argv[1]), Path(sys.argv[2]), Path())
    except UserError as error:
        sys.exit(f"make run: error: {error}")
