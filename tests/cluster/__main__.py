"""`python -m tests.cluster`: run the tests of a SLURM cluster in namespaces that end with them.

Installs Debian's packages where they are missing. Nothing else of the machine changes.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

PACKAGES = ("slurm-wlm", "munge", "iproute2")
COMMANDS = ("slurmctld", "slurmd", "munged", "ip", "tc")
INSIDE = "SHARDLAB_CLUSTER"
"""environment variable of processes that may mount over the files of the machine"""


def _missing() -> str:
    """Say why there can be no cluster here; empty: there can be one."""
    if os.geteuid() != 0:
        return "it needs root, for network namespaces and the daemons: sudo make test-cluster"
    if subprocess.run(["unshare", "--mount", "--net", "--uts", "true"], check=False).returncode:
        return "this kernel or container forbids namespaces"
    if all(map(shutil.which, COMMANDS)):
        return ""
    if shutil.which("apt-get") is None:
        return f"it needs {', '.join(COMMANDS)}, and there is no apt-get to install them with"
    for command in (["update"], ["install", "--yes", "--no-install-recommends", *PACKAGES]):
        quiet = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        done = subprocess.run(
            ["apt-get", "-qq", *command], env=quiet, capture_output=True, text=True, check=False
        )
        if done.returncode:
            said = (done.stderr.strip() or done.stdout.strip()).splitlines() or ["no reason given"]
            return f"apt-get {command[0]} failed: {said[-1]}"
    return ""


def main() -> None:
    """Run pytest with the arguments of the command line."""
    if reason := _missing():
        print(f"test-cluster: skipped: {reason}")
        return
    Path("/etc/slurm").mkdir(exist_ok=True)  # where a file system is mounted
    os.environ[INSIDE] = "1"
    own = ["--mount", "--net", "--uts", "--ipc", "--pid", "--fork", "--mount-proc", "--kill-child"]
    tests = [sys.executable, "-m", "pytest", "-m", "cluster", "tests/cluster", *sys.argv[1:]]
    os.execvp("unshare", ["unshare", *own, *tests])


if __name__ == "__main__":
    main()
