"""Scripts that torchrun starts, as their users do."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def on_two_ranks(*command):
    """Return the output of a script of the project that ended well."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    run = subprocess.run(
        [*launcher, *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout
