"""A codec that a module of the experiment registers trains like a built-in one."""

import json
import shutil

from shardlab.core.files import read_json
from tests.commands import typed
from tests.pipeline.workspace import ROOT
from tests.train.test_train_command import PARAMS, losses

CODEC = {"codec": "ternary:group=64", "error_feedback": True, "minimum_size": 64}


def test_a_run_is_trained_with_a_codec_in_plain_pytorch(data, tmp_path):
    project = tmp_path / "project"
    (project / "user_codecs").mkdir(parents=True)
    shutil.copy(ROOT / "user_codecs/ternary.py", project / "user_codecs")
    (project / "data").symlink_to(data)
    strategies = {"ternary": {"engine": "fsdp2", "gradients": CODEC}}
    params = {**PARAMS, "strategies": strategies, "codecs": ["user_codecs.ternary"]}
    (project / "params.yaml").write_text(json.dumps(params))
    command = typed(tmp_path / "command", project, "stages.train", "--run", "ternary")
    assert command.wait(60) == 0, command.said()
    metrics = read_json(project / "results/train/ternary/seed0/metrics.json")
    assert metrics["strategy"]["gradients"]["codec"] == {"name": "ternary", "group": 64}
    assert losses(project, "ternary")
    # 2 bits, 16 bits of scale for 64 elements, and the envelope
    assert 14 < metrics["ledger"]["gradients"]["compression_ratio"] < 14.3
