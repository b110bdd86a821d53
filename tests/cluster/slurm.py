"""A SLURM cluster of several nodes on one machine.

A node is a network namespace and a host name of its own with a slurmd in it; a bridge joins the
nodes and the controller, and token buckets limit what a node sends and receives. CPUs and GPUs of
the nodes are declared, not real: the controller counts them.

The daemons read /etc/slurm and /etc/hosts, which are mounted over: everything is to run in
namespaces of its own (`python -m tests.cluster`) and ends with them.
"""

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from shardlab.core.link import bucket_bytes

CPUS, GPUS, MEMORY_MB = 64, 8, 16000
"""of a node"""
_CONTROLLER = "198.18.1.254"

_CONFIGURATION = """
ClusterName=shardlab
SlurmctldHost=head({controller})
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
SlurmUser=root
AuthType=auth/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerParameters=batch_sched_delay=0,sched_interval=2,requeue_delay=1
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/completed.txt
GresTypes=gpu
SlurmdParameters=config_overrides
ReturnToService=2
MinJobAge=86400
SlurmdTimeout=10
KillWait=5
MpiDefault=none
PartitionName=main Nodes=ALL Default=YES MaxTime=60 State=UP OverSubscribe=NO
"""


class Cluster:
    """Context of a running cluster of `nodes`, joined by links of `rate` bits per second."""

    def __init__(self, folder: Path, nodes: int, rate: int) -> None:
        self.folder = folder
        self.nodes = [f"n{number}" for number in range(1, nodes + 1)]
        self._rate = rate
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> "Cluster":
        self._configure()
        self._network()
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        files = [
            f"--{name}-file={self.folder}/munge.{name}" for name in ("key", "pid", "log", "seed")
        ]
        socket = self.folder / "munge.socket"
        self._start("munged", "munged", "--foreground", "--force", f"--socket={socket}", *files)
        wait_for(socket.exists, "the socket of munged")
        self._start("slurmctld", "slurmctld", "-D")
        for name in self.nodes:
            self.start_node(name)
        wait_for(lambda: set(self.states().values()) == {"idle"}, "idle nodes")
        return self

    def __exit__(self, *_: object) -> None:
        for daemon in reversed(self._daemons.values()):
            daemon.terminate()
        for daemon in self._daemons.values():
            daemon.wait()

    def start_node(self, name: str) -> None:
        """Start the slurmd of a node."""
        own = f"hostname {name} && exec slurmd -D"
        network = f"--net=/run/netns/{name}"  # not `ip netns exec`, which hides cgroups
        self._start(name, "nsenter", network, "unshare", "--uts", "sh", "-c", own)

    def kill_node(self, name: str) -> None:
        """End the slurmd of a node and cut its link, as when it loses its power."""
        self._daemons[name].kill()
        self._daemons[name].wait()
        run("ip", "link", "set", f"port-{name}", "down")

    def states(self) -> dict[str, str]:
        """Return the state of each node."""
        said = run("sinfo", "--Node", "--noheader", "--format=%N %T", check=False)
        return dict(line.split() for line in said.splitlines())

    def jobs(self, **chosen: str) -> list[dict[str, str]]:
        """Return what scontrol says of the jobs that it still knows, the newest last."""
        said = run("scontrol", "--oneliner", "show", "job", "--details", check=False)
        found = [
            dict(word.split("=", 1) for word in line.split(" ") if "=" in word)
            for line in said.splitlines()
            if line.startswith("JobId=")
        ]
        ordered = sorted(found, key=lambda job: int(job["JobId"]))
        return [job for job in ordered if all(job.get(k) == v for k, v in chosen.items())]

    def _configure(self) -> None:
        for name in ("state", "etc", *(f"spool/{node}" for node in self.nodes)):
            (self.folder / name).mkdir(parents=True)
        text = _CONFIGURATION.format(folder=self.folder, controller=_CONTROLLER)
        gres = ""
        hosts = f"127.0.0.1 localhost\n{_CONTROLLER} head\n"
        for number, name in enumerate(self.nodes, 1):
            text += (
                f"NodeName={name} NodeAddr=198.18.1.{number} CPUs={CPUS} Boards=1 SocketsPerBoard=1"
                f" CoresPerSocket={CPUS} ThreadsPerCore=1 RealMemory={MEMORY_MB} Gres=gpu:{GPUS}"
                " State=UNKNOWN\n"
            )
            hosts += f"198.18.1.{number} {name}\n"
        for number in range(GPUS):
            device = self.folder / f"gpu{number}"
            os.mknod(device, 0o20666, os.makedev(1, 3))  # as /dev/null
            gres += f"Name=gpu File={device}\n"
        (self.folder / "etc/slurm.conf").write_text(text)
        (self.folder / "etc/gres.conf").write_text(gres)
        (self.folder / "etc/cgroup.conf").write_text("CgroupAutomount=no\n")
        (self.folder / "hosts").write_text(hosts)
        run("mount", "--bind", str(self.folder / "etc"), "/etc/slurm")
        run("mount", "--bind", str(self.folder / "hosts"), "/etc/hosts")

    def _network(self) -> None:
        run("hostname", "head")
        run("ip", "link", "set", "lo", "up")
        run("ip", "link", "add", "bridge", "type", "bridge")
        run("ip", "address", "add", f"{_CONTROLLER}/24", "dev", "bridge")
        run("ip", "link", "set", "bridge", "up")
        # the names of namespaces are mounts, which are to end with this cluster
        Path("/run/netns").mkdir(exist_ok=True)
        run("mount", "-t", "tmpfs", "tmpfs", "/run/netns")
        bucket = ("tbf", "rate", f"{self._rate}bit", "burst", str(bucket_bytes(self._rate)))
        for number, name in enumerate(self.nodes, 1):
            port = f"port-{name}"
            run("ip", "netns", "add", name)
            run("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
            run("ip", "link", "set", port, "master", "bridge", "up")
            run("ip", "-n", name, "link", "set", "lo", "up")
            run("ip", "-n", name, "address", "add", f"198.18.1.{number}/24", "dev", "eth0")
            run("ip", "-n", name, "link", "set", "eth0", "up")
            run("tc", "qdisc", "add", "dev", port, "root", *bucket, "latency", "50ms")
            run("tc", "-n", name, "qdisc", "add", "dev", "eth0", "root", *bucket, "latency", "50ms")

    def _start(self, name: str, *command: str) -> None:
        with (self.folder / f"{name}.out").open("ab") as log:
            self._daemons[name] = subprocess.Popen(command, stdout=log, stderr=log)


def run(*command: str, check: bool = True) -> str:
    """Return what the command says; it has to succeed, unless `check` is False."""
    done = subprocess.run(command, capture_output=True, text=True)
    assert not check or done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout


def wait_for(condition: Callable[[], bool], what: str, seconds: float = 60) -> None:
    """Wait until the condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {seconds:g} s"
        time.sleep(0.2)
