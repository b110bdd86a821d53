"""A stage sees only what dvc.yaml names: its files, and its keys of params.yaml."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from dvc.dependency.param import ParamsDependency
from dvc.repo import Repo

from tests.pipeline.workspace import ROOT, copy_parts, run

KINDS = list(yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"])
MEASURED = {"calibrate", "train", "timing", "trial"}
"""their outputs hold times"""

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


def only(tree: dict[str, Any], keys: list[str]) -> dict[str, Any]:
    """The part of a tree that dotted keys name."""
    kept: dict[str, Any] = {}
    for key in keys:
        source, target = tree, kept
        *parents, leaf = key.split(".")
        for part in parents:
            source, target = source[part], target.setdefault(part, {})
        target[leaf] = source[leaf]
    return kept


@pytest.mark.parametrize("kind", KINDS)
def test_a_stage_reads_only_what_it_declares(kind: str, finished: Path, tmp_path: Path) -> None:
    with Repo(str(finished)) as repo:
        stage = next(s for s in repo.index.stages if s.name.split("@")[0] == kind)
    files = [d.def_path for d in stage.deps if not isinstance(d, ParamsDependency)]
    keys = [k for d in stage.deps if isinstance(d, ParamsDependency) for k in d.params]
    outputs = [out.def_path for out in stage.outs]
    # no dependency: it refuses names, and changes no output
    copy_parts([*files, "stages/names.py"], finished, tmp_path)
    if kind == "readme":  # the one file that a stage changes in place
        copy_parts(["README.md"], ROOT, tmp_path)
    params = yaml.safe_load((finished / "params.yaml").read_text())
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(only(params, keys or list(params))))
    for command in stage.cmd if isinstance(stage.cmd, list) else [stage.cmd]:
        run(tmp_path, "env", f"DVC_STAGE={stage.name}", "sh", "-c", command)
    for output in outputs:
        made = tmp_path / output
        assert made.exists(), output
        for file in [made] if made.is_file() else made.iterdir():
            other = finished / file.relative_to(tmp_path)
            assert kind in MEASURED or file.read_bytes() == other.read_bytes(), file.name
