"""Under the wrappers of Accelerate and Lightning Fabric, LayerAdam is as torch's AdamW."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.mark.long
@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="torch rounds otherwise on this processor",
)
@pytest.mark.parametrize(
    ("name", "needed"), [("accelerate", "accelerate"), ("fabric", "lightning_fabric")]
)
def test_sharded_training_by_other_libraries_has_the_bits_of_torchs_fused_optimizer(name, needed):
    pytest.importorskip(needed)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    run = subprocess.run(
        [*launcher, "tests/reference/wrapped_layer_adam.py", name],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode == 0, run.stderr[-3000:]
