"""A stage sees only the files that dvc.yaml names, params.yaml and the code."""

import re
from pathlib import Path

import pytest
import yaml
from dvc.dependency.param import ParamsDependency
from dvc.repo import Repo

from tests.pipeline.workspace import ROOT, copy_parts, run

STAGES = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]
# the others measure for long, and what they write holds times
KINDS = [kind for kind in STAGES if kind not in ("calibrate", "timing", "trial")]
CODE = ("csrc", "shardlab", "stages", "user_codecs")

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


def contents(path: Path) -> bytes:
    """Bytes of a file but for the revision, which a folder that is no git repository lacks."""
    return re.sub(rb'"revision": "[^"]*"', b"", path.read_bytes())


@pytest.mark.parametrize("kind", KINDS)
def test_a_stage_reads_only_what_it_declares(kind: str, finished: Path, tmp_path: Path) -> None:
    with Repo(str(finished)) as repo:
        stage = next(s for s in repo.index.stages if s.name.split("@")[0] == kind)
    files = [d.def_path for d in stage.deps if not isinstance(d, ParamsDependency)]
    outputs = [out.def_path for out in stage.outs]
    copy_parts([*files, *CODE, "params.yaml"], finished, tmp_path)
    run(tmp_path, "env", f"DVC_STAGE={stage.name}", "sh", "-c", stage.cmd)
    for output in outputs:
        made = tmp_path / output
        assert made.exists(), output
        for file in [made] if made.is_file() else filter(Path.is_file, made.rglob("*")):
            other = finished / file.relative_to(tmp_path)
            assert kind == "train" or contents(file) == contents(other), file.name
