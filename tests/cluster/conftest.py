"""The cluster, and the project in it."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.cluster.__main__ import INSIDE
from tests.cluster.slurm import Cluster
from tests.pipeline.workspace import copy_project, environment

RATE = 100_000_000
"""bits per second of the links between the nodes"""


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if INSIDE not in os.environ:
        pytest.skip("there is no cluster: make test-cluster")
    with Cluster(tmp_path_factory.mktemp("slurm"), nodes=3, rate=RATE) as running:
        yield running


class Project:
    """A copy of the project with the profile of the cluster."""

    def __init__(self, root: Path) -> None:
        self.root = copy_project(root)

    def profile(self, exclusive: bool = True, **defaults: int | str) -> None:
        """Write profiles/test: profiles/slurm for this cluster."""
        path = self.root / "profiles/slurm/profile.yaml"
        profile = yaml.safe_load(path.read_text())
        profile["default-resources"] |= {"slurm_partition": "main", "mem_mb": 3000} | defaults
        # no accounting database
        profile |= {"slurm-no-account": True, "slurm-status-command": "squeue"}
        profile |= {"slurm-init-seconds-before-status-checks": 2, "latency-wait": 10}
        profile |= {"slurm-keep-successful-logs": True}
        if not exclusive:
            del profile["set-resources"]
        target = self.root / "profiles/test/profile.yaml"
        target.parent.mkdir(exist_ok=True)
        target.write_text(yaml.safe_dump(profile))

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        command = ["snakemake", "--workflow-profile", "profiles/test", "--"]
        return subprocess.Popen(
            [*command, *arguments],
            cwd=self.root,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *arguments: str, code: int = 0) -> str:
        """Return what Snakemake said; it has to end with this exit code."""
        process = self.start(*arguments)
        said, _ = process.communicate()
        assert process.returncode == code, said + self.logs()
        return said

    def logs(self) -> str:
        """Return the output of all jobs."""
        found = (self.root / ".snakemake/slurm_logs").rglob("*.log")
        return "\n".join(path.read_text(errors="replace") for path in found)
