"""A real Slurm on a cluster of network namespaces: slurmctld on head, a slurmd on each node.

Needs Debian's slurmctld, slurmd, slurm-client and munge beside what `tests.support.cluster` needs;
`why_not()` says what is missing. Everything runs inside the nodes and ends with them.

    with Cluster(2) as cluster:
        slurm = Slurm(cluster)
        slurm.start()
        cluster.run("head", "srun", "-N2", "hostname")
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import pytest

from tests.support import cluster as namespaces
from tests.support.cluster import Cluster
from tests.support.job import eventually
from tests.support.processes import read_each

READY_S = 30.0
PORTS = ("6817:6818", "60001:60063")  # of its daemons, and of srun
CPUS = 4  # each node says it has, whatever there is
MEMORY = 4000  # MB, the same
GPUS = 4  # of each node, as far as Slurm knows: devices without a driver
_TOOLS = ("slurmctld", "slurmd", "srun", "sbatch", "scancel", "sinfo", "munged")
_PATH = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"))

_CONFIG = """\
ClusterName={name}
SlurmctldHost=head
SlurmUser=root
AuthType=auth/munge
CryptoType=crypto/munge
AuthInfo=cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=100
GresTypes=gpu
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,sched_min_interval=0
MpiDefault=none
SrunPortRange=60001-60063
ReturnToService=2
SlurmctldTimeout=10
SlurmdTimeout=10
KillWait=10
MinJobAge=60
StateSaveLocation={folder}/state
SlurmdSpoolDir=/tmp/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
"""


def why_not() -> str | None:
    """Why there can be no Slurm here; None where there can."""
    missing = [tool for tool in _TOOLS if shutil.which(tool, path=_PATH) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (slurmctld, slurmd, slurm-client, munge)"
    return namespaces.why_not()


class Slurm:
    """The daemons on a cluster's nodes."""

    def __init__(self, cluster: Cluster, names: Mapping[str, str] | None = None) -> None:
        """`names`: what Slurm calls some nodes, which no resolver knows."""
        self.cluster, self._names = cluster, names or {}
        self.folder = cluster.folder / "slurm"
        self.environ = {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def start(self) -> None:
        """Start everything; returns when all nodes are idle."""
        (self.folder / "state").mkdir(parents=True)
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        nodes = [name for name in self.cluster.nodes if name != "head"]
        text = _CONFIG.format(
            name=self.cluster.name, folder=self.folder, nodes=self._describe_nodes(nodes)
        )
        Path(self.environ["SLURM_CONF"]).write_text(text)
        self._make_gpus()
        self._munge("head")
        self.run("head", "slurmctld")
        for name in nodes:
            self.join(name)
        self.until_idle(len(nodes))

    def _make_gpus(self) -> None:
        """Make devices that nobody opens: Slurm wants to see character devices."""
        for number in range(GPUS):
            device = os.makedev(195, number)  # as NVIDIA's driver numbers its own
            os.mknod(self.folder / f"gpu{number}", stat.S_IFCHR | 0o600, device)
        line = f"Name=gpu Type=fake File={self.folder}/gpu[0-{GPUS - 1}]\n"
        (self.folder / "gres.conf").write_text(line)

    def join(self, name: str) -> None:
        """Start a node's daemons, after its boot."""
        self._munge(name)
        self.run(name, "slurmd", "-N", self._names.get(name, name))

    def _describe_nodes(self, nodes: list[str]) -> str:
        lines = []
        for node in nodes:
            address = self.cluster.node(node).address
            named = f" NodeAddr={address} NodeHostname={node}" if node in self._names else ""
            name = self._names.get(node, node)
            has = f"CPUs={CPUS} RealMemory={MEMORY} Gres=gpu:fake:{GPUS}"
            lines.append(f"NodeName={name}{named} {has} State=UNKNOWN")
        return "\n".join(lines)

    def until_idle(self, count: int) -> None:
        """Wait until this many nodes can take jobs."""

        def idle() -> bool:
            listed = self.cluster.run(
                "head", "env", *self._settings(), "sinfo", "-h", "-N", "-t", "idle", "-o", "%N %t"
            )
            states = [line.split() for line in listed.stdout.splitlines()]
            return sum(len(s) == 2 and s[1] == "idle" for s in states) == count

        eventually(idle, within=READY_S, what=f"{count} nodes are idle", context=self.describe)

    def run(self, node: str, *argv: str, timeout: float = 30.0) -> str:
        """Run one of Slurm's commands on a node; its output. Raises where it fails."""
        done = self.cluster.run(node, "env", *self._settings(), *argv, timeout=timeout)
        if done.returncode != 0:
            raise RuntimeError(
                f"{' '.join(argv)} on {node}: {done.stderr.strip()}\n{self.describe()}"
            )
        return done.stdout

    def describe(self) -> str:
        """The ends of the daemons' logs."""
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"--- {p.name}\n{p.read_text(errors='replace')[-1500:]}" for p in logs)

    def _settings(self) -> list[str]:
        return [f"{name}={value}" for name, value in self.environ.items()]

    def _munge(self, node: str) -> None:
        self.run(node, "mkdir", "-p", "/run/munge")
        self.run(
            node,
            "munged",
            "--force",
            f"--key-file={self.folder}/munge.key",
            "--socket=/run/munge/munge.socket.2",
            "--pid-file=/run/munge/munged.pid",
            "--seed-file=/run/munge/seed",
            "--log-file=/run/munge/munged.log",
        )


def left_behind(cluster: Cluster) -> list[str]:
    """Processes and files of ours on nodes that are up; Slurm's own daemons stay, of course."""
    found = []
    for node in cluster.nodes.values():
        if not node.is_up:
            continue
        found += [f"{node.name}: {name}" for name in node.files() if name.startswith("elastic-")]
        for _, argv in read_each(node.processes(), psutil.Process.cmdline):
            words = " ".join(argv)
            if "launcher." in words or "train.py" in words:
                found.append(f"{node.name}: {words}")
    return found


@contextlib.contextmanager
def running(nodes: int, names: Mapping[str, str] | None = None) -> Iterator[Slurm]:
    """Slurm on head and so many nodes; the test is left out where there can be none.

    `names`: see `Slurm`.
    """
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    with Cluster(nodes) as cluster:
        slurm = Slurm(cluster, names or {})
        slurm.start()
        yield slurm
