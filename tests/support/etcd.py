"""A real etcd: members on loopback ports, or on the nodes of a cluster of namespaces."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from elastic_driver.runtime.journal.etcd import EtcdAccess, EtcdClient, EtcdError
from tests.support.job import eventually


def why_not() -> str | None:
    """Why no etcd can be started here; None where it can."""
    if shutil.which("etcd") is None:
        return "etcd is not installed (etcd-server)"
    return None


class EtcdCluster:
    """Members of one etcd; leaving the context ends them.

    `hosts`: the address of each member, and the words before its command (to enter a node).
    """

    def __init__(
        self,
        folder: Path,
        ports: Sequence[int],
        hosts: Sequence[tuple[str, tuple[str, ...]]] = (("127.0.0.1", ()),) * 3,
        *options: str,
        scheme: str = "http",
    ) -> None:
        self._folder, self._options, self._scheme = folder, options, scheme
        pairs = [(ports[2 * n], ports[2 * n + 1]) for n in range(len(hosts))]
        self._places = [(*host, *pair) for host, pair in zip(hosts, pairs, strict=True)]
        self._members: list[subprocess.Popen[bytes] | None] = [None] * len(hosts)

    def __enter__(self) -> EtcdCluster:
        try:
            for number in range(len(self._places)):
                self.start(number)
            if self._scheme == "http":
                self.wait()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number in range(len(self._places)):
            self.kill(number)

    @property
    def url(self) -> str:
        """The endpoints, as `--journal` takes them."""
        return str(self.access)

    @property
    def access(self) -> EtcdAccess:
        """The endpoints of all members."""
        return EtcdAccess(tuple((host, client) for host, _enter, client, _peer in self._places))

    def start(self, number: int) -> None:
        """Start a member, with the data that it had."""
        cluster = ",".join(
            f"m{n}=http://{host}:{peer}"
            for n, (host, _enter, _client, peer) in enumerate(self._places)
        )
        host, enter, client, peer = self._places[number]
        client_url, peer_url = f"{self._scheme}://{host}:{client}", f"http://{host}:{peer}"
        with (self._folder / f"m{number}.log").open("ab") as log:
            self._members[number] = subprocess.Popen(
                [
                    *enter,
                    *("etcd", "--name", f"m{number}", "--data-dir", self._folder / f"m{number}"),
                    *("--listen-client-urls", client_url, "--advertise-client-urls", client_url),
                    *("--listen-peer-urls", peer_url, "--initial-advertise-peer-urls", peer_url),
                    *("--initial-cluster", cluster, "--logger", "zap"),
                    *self._options,
                ],
                stdout=log,
                stderr=log,
            )

    def kill(self, number: int) -> None:
        """Kill a member."""
        member, self._members[number] = self._members[number], None
        if member is not None:
            member.send_signal(signal.SIGKILL)
            member.wait()

    def wait(self, access: EtcdAccess | None = None) -> None:
        """Wait until the cluster answers."""
        _host, enter, *_ports = self._places[0]

        def answers() -> bool:
            if enter:  # this process is not in its network
                urls = self.url.replace("etcd", "http", 1)
                ask = [*enter, "env", "ETCDCTL_API=3", "etcdctl", "--endpoints", urls, "get", "/"]
                return subprocess.run(ask, capture_output=True, check=False).returncode == 0
            try:
                with EtcdClient(access or self.access, 1.0) as client:
                    client.range("ready")
            except EtcdError:
                return False
            return True

        eventually(answers, within=30, what="etcd answers", context=self.log)

    def log(self) -> str:
        """The end of every member's log."""
        logs = sorted(self._folder.glob("m*.log"))
        return "\n".join(f"{log.name}: {log.read_text()[-1500:]}" for log in logs)
