"""A cluster on one machine: each node has its own network, processes, name, /tmp and sshd.

Made of Linux namespaces (net, pid, uts, ipc, mount) on a bridge that leads nowhere else, so it
needs root, and `why_not()` says what is missing where it cannot be made. `head` is one more node,
from which a driver is meant to run. Nodes can be killed, lose their power or their cable, be
frozen, and come back. Leaving the context ends every process, namespace, mount and file of it.

    with Cluster(4) as cluster:
        cluster.run("head", "ssh", "node1", "hostname")
        cluster.node("node1").poweroff()
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import psutil

from tests.support.control_group import ControlGroup
from tests.support.job import ROOT, eventually
from tests.support.processes import select

BOOT_S = 15.0
SUBNET = "10.99.0."  # head is 1, node<i> is 10 + i; the networks of two clusters never meet
SUBNET6 = "fd99::"
_INIT = Path(__file__).with_name("node.py")
_QUOTA_PERIOD_S = 0.02
_TOOLS = ("ip", "tc", "iptables", "nsenter", "unshare", "ssh", "ssh-keygen", "sshd")
_PATH = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"))

_SSHD_CONFIG = """\
Port 22
HostKey {keys}/host
AuthorizedKeysFile {keys}/user.pub
PidFile none
StrictModes no
UsePAM no
UseDNS no
PasswordAuthentication no
PermitRootLogin prohibit-password
MaxStartups 1000
PrintMotd no
"""
_SSH_CONFIG = """\
Host *
    User root
    IdentityFile {keys}/user
    IdentitiesOnly yes
    UserKnownHostsFile {keys}/known_hosts
    GlobalKnownHostsFile /dev/null
    StrictHostKeyChecking yes
"""


def why_not() -> str | None:
    """Why no cluster can be made here; None where it can."""
    if os.geteuid() != 0:
        return "a cluster of network namespaces needs root"
    missing = [tool for tool in _TOOLS if shutil.which(tool, path=_PATH) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (iproute2, iptables, openssh-server)"
    probe = ["unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "true"]
    if subprocess.run(probe, capture_output=True, check=False).returncode != 0:
        return "this machine lets us make no namespaces"
    return None


def _run(*argv: str, check: bool = True) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, check=False, env=_environ())
    if check and done.returncode != 0:
        raise RuntimeError(f"{' '.join(argv)}: {done.stderr.strip() or done.returncode}")
    return done.stdout


def _environ() -> dict[str, str]:
    return {**os.environ, "PATH": _PATH}


class Node:
    """One machine of a cluster; made by `Cluster`."""

    def __init__(self, cluster: Cluster, name: str, index: int) -> None:
        subnet = SUBNET6 if cluster.ipv6 else SUBNET
        self.name, self.address = name, f"{subnet}{1 if index == 0 else 9 + index}"
        self._cluster = cluster
        self._netns = f"{cluster.name}-{name}"
        self._port = f"p{index}"  # of the switch, that our cable ends in
        self._pid_file = cluster.folder / f"{name}.pid"
        self._console = cluster.folder / f"{name}.console"
        self._group: ControlGroup | None = None
        self._outer: subprocess.Popen[bytes] | None = None

    # ---- life ----------------------------------------------------------------------------

    def lay_cable(self) -> None:
        """The node's network, connected to the switch."""
        switch = self._cluster.switch
        _run("ip", "netns", "add", self._netns)
        _run(
            *("ip", "link", "add", "eth0", "netns", self._netns, "type", "veth"),
            *("peer", "name", self._port, "netns", switch),
        )
        _run("ip", "-n", switch, "link", "set", self._port, "master", "br0", "up")
        # No search for others with this address: it would not be usable for a second.
        own = (f"{self.address}/64", "nodad") if self._cluster.ipv6 else (f"{self.address}/24",)
        _run("ip", "-n", self._netns, "addr", "add", *own, "dev", "eth0")
        _run("ip", "-n", self._netns, "link", "set", "lo", "up")
        _run("ip", "-n", self._netns, "link", "set", "eth0", "up")
        with contextlib.suppress(OSError):  # then it can be neither frozen nor slowed
            self._group = ControlGroup(f"{self._cluster.name}-{self.name}")

    def start(self) -> None:
        """Begin to boot; `wait` says when that is done."""
        self._pid_file.unlink(missing_ok=True)
        birth = {
            "name": self.name,
            "shared": [str(folder) for folder in self._cluster.shared],
            "etc": str(self._cluster.folder / "etc"),
            "pid_file": str(self._pid_file),
            "cgroups": list(map(str, self._group.process_lists)) if self._group else [],
        }
        with self._console.open("ab") as console:
            self._outer = subprocess.Popen(
                [
                    *("nsenter", f"--net=/run/netns/{self._netns}"),
                    *("unshare", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child"),
                    *(sys.executable, str(_INIT), json.dumps(birth)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                start_new_session=True,
                env={"PATH": _PATH},
            )

    def wait(self) -> None:
        """Wait until sshd listens; looked up from outside, so a cut does not matter."""
        eventually(self._listens, within=BOOT_S, what=f"{self.name} is up", context=self.console)

    def boot(self) -> None:
        """Turn a dead node on again, with nothing of what it had in memory or /tmp."""
        self.start()
        self.wait()

    def kill(self) -> None:
        """End every process at once; its kernel still says goodbye to the peers."""
        self.thaw()
        pid, outer = self.pid, self._outer
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)  # the kernel ends a namespace with its first process
        if outer is not None:
            outer.wait(BOOT_S)
        self._outer = None

    def poweroff(self) -> None:
        """Die without a word: nothing leaves the node any more."""
        self.cut()
        self.kill()

    def destroy(self) -> None:
        """Remove everything of the node."""
        self.kill()
        _run("ip", "netns", "del", self._netns, check=False)
        if self._group is not None:
            self._group.remove()

    # ---- faults --------------------------------------------------------------------------

    def cut(self) -> None:
        """The cable leads nowhere, and nobody is told; `heal` undoes it."""
        _run("ip", "-n", self._cluster.switch, "link", "set", self._port, "nomaster")

    def deafen(self) -> None:
        """One-way loss: what the node sends arrives, what is sent to it is lost."""
        _run("ip", "netns", "exec", self._netns, "iptables", "-w", *_DROP_ALL_IN)

    def firewall(self, *ports: str) -> None:
        """Refuse new connections from other nodes without a word, but to `ports`.

        A port is as iptables has it: `22`, `29400:29463`. `heal` undoes it.
        """
        for port in ports:
            self._filter("-p", "tcp", "--syn", "--dport", port, "-j", "ACCEPT")
        self._filter("-p", "tcp", "--syn", "-j", "DROP")
        self._filter("-p", "udp", "-j", "DROP")

    def refuse_from(self, other: Node, ports: str) -> None:
        """Drop new connections of one other node to these ports; `heal` undoes it."""
        self._filter("-s", other.address, "-p", "tcp", "--syn", "--dport", ports, "-j", "DROP")

    def _filter(self, *rule: str) -> None:
        netns, chain = self._netns, ("-A", "INPUT", "-i", "eth0")
        _run("ip", "netns", "exec", netns, "iptables", "-w", *chain, *rule)

    def rename_interface(self, name: str) -> None:
        """Call the interface `name` that was called eth0."""
        for words in (("eth0", "down"), ("eth0", "name", name), (name, "up")):
            _run("ip", "-n", self._netns, "link", "set", *words)

    def slow_link(self, rate: str) -> None:
        """Let no more than `rate` (as tc has it: `50mbit`) through the cable, either way."""
        for netns, device in self._ends():
            shape = ("root", "tbf", "rate", rate, "burst", "64kb", "latency", "100ms")
            _run("ip", "netns", "exec", netns, "tc", "qdisc", "replace", "dev", device, *shape)

    def fast_link(self) -> None:
        """Undo `slow_link`."""
        for netns, device in self._ends():
            _run("ip", "netns", "exec", netns, "tc", "qdisc", "del", "dev", device, "root")

    @contextlib.contextmanager
    def slow_cpu(self, share: float) -> Iterator[None]:
        """While this lasts, all processes of the node together have `share` of one processor."""
        self._control_group().limit(share, _QUOTA_PERIOD_S)
        try:
            yield
        finally:
            self._control_group().unlimit()

    def limit_memory(self, size: int) -> None:
        """From now on, let all processes of the node together have `size` bytes of memory."""
        self._control_group().limit_memory(size)

    def _ends(self) -> tuple[tuple[str, str], tuple[str, str]]:
        return (self._netns, "eth0"), (self._cluster.switch, self._port)

    def cable(self) -> tuple[str, str, str]:
        """The namespaces of its network and of the switch, and the port there that it ends in."""
        return self._netns, self._cluster.switch, self._port

    def heal(self) -> None:
        """Undo `cut` and `deafen`."""
        _run("ip", "-n", self._cluster.switch, "link", "set", self._port, "master", "br0", "up")
        _run("ip", "netns", "exec", self._netns, "iptables", "-w", "-F")

    def freeze(self) -> None:
        """A hung operating system: TCP is still acknowledged, nobody answers."""
        self._control_group().freeze()

    def thaw(self) -> None:
        """Undo `freeze`."""
        if self._group is not None:
            self._group.thaw()

    def _control_group(self) -> ControlGroup:
        assert self._group is not None, "no control group can be made here"
        return self._group

    # ---- what goes on there --------------------------------------------------------------

    @property
    def pid(self) -> int | None:
        """Pid of the node's first process as this machine counts; None before it is set up."""
        try:
            return int(self._pid_file.read_text())
        except FileNotFoundError:
            return None

    @property
    def is_up(self) -> bool:
        """Whether it was turned on, and not killed since."""
        return self._outer is not None

    def console(self) -> str:
        """What sshd has said."""
        return self._console.read_text(errors="replace")[-2000:]

    def inside(self, *argv: str, cwd: str = "/") -> list[str]:
        """`argv` as a command that runs in the node."""
        if self.pid is None or not self.is_up:
            raise RuntimeError(f"{self.name} is off")
        return [
            *("nsenter", f"--target={self.pid}", "--mount", "--uts", "--ipc", "--net", "--pid"),
            *("--", "env", f"--chdir={cwd}", *argv),
        ]

    def processes(self) -> list[psutil.Process]:
        """Every process of the node but its sshd's."""
        if not self.is_up:
            return []
        mine = os.stat(f"/proc/{self.pid}/ns/pid").st_ino

        def is_of_node(process: psutil.Process) -> bool:
            same = os.stat(f"/proc/{process.pid}/ns/pid").st_ino == mine
            return same and process.name() != "sshd" and process.status() != "zombie"

        return select(psutil.process_iter(), is_of_node)

    def running(self, words: str) -> list[psutil.Process]:
        """The node's processes that have these words in their command line."""
        return select(self.processes(), lambda process: words in " ".join(process.cmdline()))

    def files(self) -> list[str]:
        """Names in the node's own /tmp, but for the folders all nodes share."""
        names = os.listdir(Path("/proc", str(self.pid), "root", "tmp"))
        shared = {folder.relative_to("/tmp").parts[0] for folder in self._cluster.shared}
        return sorted(name for name in names if name not in shared)

    def _listens(self) -> bool:
        pid = self.pid
        table = "tcp6" if self._cluster.ipv6 else "tcp"
        try:
            lines = Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
        except OSError:
            return False
        fields = [line.split() for line in lines]
        return pid is not None and any(f[1].endswith(":0016") and f[3] == "0A" for f in fields)


_DROP_ALL_IN = ("-A", "INPUT", "-i", "eth0", "-j", "DROP")


class Cluster:
    """`head` and `node0` … `node<count - 1>`; a context manager."""

    def __init__(
        self, count: int, env: Mapping[str, str] | None = None, *, ipv6: bool = False
    ) -> None:
        """`env`: what each sshd gives to what it starts; `ipv6`: nodes have no other address."""
        self._count, self._env, self.ipv6 = count, dict(env or {}), ipv6
        self.name, self.switch = "", ""
        self.folder = Path()
        self.nodes: dict[str, Node] = {}

    def __enter__(self) -> Cluster:
        self.folder = Path(tempfile.mkdtemp(prefix="elastic-cluster-"))
        self.name = self.folder.name.removeprefix("elastic-cluster-")
        self.switch = f"{self.name}-switch"
        names = ["head", *(f"node{i}" for i in range(self._count))]
        self.nodes = {name: Node(self, name, index) for index, name in enumerate(names)}
        try:
            self._write_etc()
            _run("ip", "netns", "add", self.switch)
            _run("ip", "-n", self.switch, "link", "add", "br0", "type", "bridge", *_NO_DELAY)
            _run("ip", "-n", self.switch, "link", "set", "br0", "up")
            for node in self.nodes.values():
                node.lay_cable()
            for node in self.nodes.values():
                node.start()
            for node in self.nodes.values():
                node.wait()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._remove()

    def node(self, name: str) -> Node:
        """One node by name."""
        return self.nodes[name]

    @property
    def shared(self) -> list[Path]:
        """What of this machine's /tmp the nodes see too: the cluster's folder, and us if there."""
        places = {self.folder, ROOT, Path(sys.prefix), Path(sys.base_prefix)}
        below = {p.resolve() for p in places if p.resolve().is_relative_to("/tmp")}
        return [
            p for p in below if not any(p != other and p.is_relative_to(other) for other in below)
        ]

    def run(self, node: str, *argv: str, timeout: float = 30.0) -> subprocess.CompletedProcess[str]:
        """Run a command in a node and wait for it."""
        inside = self.nodes[node].inside(*argv)
        return subprocess.run(
            inside, capture_output=True, text=True, timeout=timeout, check=False, env=_environ()
        )

    def start(
        self, node: str, argv: Sequence[str], *, out: Path, err: Path, env: dict[str, str]
    ) -> subprocess.Popen[bytes]:
        """Start a command in a node, and append what it writes; its owner waits for it."""
        inside = self.nodes[node].inside(*argv, cwd=str(self.folder))
        with out.open("ab") as stdout, err.open("ab") as stderr:
            return subprocess.Popen(
                inside,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                # The network is the cluster's own: etcd is plain there.
                env={**env, "PATH": _PATH, "ELASTIC_ETCD_INSECURE": "1"},
                start_new_session=True,
            )

    def _write_etc(self) -> None:
        keys, etc = self.folder / "keys", self.folder / "etc"
        keys.mkdir()
        (etc / "ssh_config.d").mkdir(parents=True)
        for key in ("user", "host"):
            _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "test", "-f", f"{keys}/{key}")
        host_key = " ".join((keys / "host.pub").read_text().split()[:2])
        nodes = self.nodes.values()
        known = "".join(f"{n.name},{n.address} {host_key}\n" for n in nodes)
        (keys / "known_hosts").write_text(known)
        hosts = "".join(f"{n.address} {n.name}\n" for n in nodes)
        (etc / "hosts").write_text(f"127.0.0.1 localhost\n{hosts}")
        (etc / "bashrc").write_text("")
        (etc / "resolv.conf").write_text("")  # no name server: look-ups fail at once
        given = " ".join(f"{name}={value}" for name, value in self._env.items())
        config = _SSHD_CONFIG.format(keys=keys) + (f"SetEnv {given}\n" if given else "")
        (etc / "sshd_config").write_text(config)
        (etc / "ssh_config.d" / "cluster.conf").write_text(_SSH_CONFIG.format(keys=keys))

    def _remove(self) -> None:
        for node in self.nodes.values():
            node.destroy()
        _run("ip", "netns", "del", self.switch, check=False)
        shutil.rmtree(self.folder, ignore_errors=True)


_NO_DELAY = ("forward_delay", "0")
