"""The server of a job whose nodes join by themselves, with or without workers on its own node.

`launcher.job` calls `serve`. To the driver the nodes are hosts like any other; the server's own
node, where it has one, is started by the local backend and needs no way round over HTTP.
"""

from __future__ import annotations

import time
from pathlib import Path

from elastic_driver.errors import UsageError
from elastic_driver.runtime.backend import Backend, OnLost
from elastic_driver.runtime.host_lists import Hosts
from elastic_driver.runtime.joined import JoinedNodes, NodeRules
from elastic_driver.runtime.run_dir import RunDir
from launcher.backends.local import LocalBackend
from launcher.build_info import version
from launcher.join.find_server import bind_address, own_address
from launcher.join.secret import of_server
from launcher.plan.hosts import JoinedHosts
from launcher.plan.launch import LaunchPlan
from launcher.submit.submit import run_driver


def serve(plan: LaunchPlan, hosts: JoinedHosts, run_dir: RunDir) -> int:
    """Hold the job until it ends; its exit status. Raises ElasticError where it cannot begin."""
    refuse_what_does_not_fit(plan)
    own = dict(hosts.own)
    rules = NodeRules(
        run_id=plan.spec.run_id,
        version=version(),
        heartbeat_timeout=plan.settings.heartbeat_timeout,
        leave_notice=plan.spec.leave_notice,
        default_slots=hosts.default_slots,
        reserved=frozenset(own),
    )
    nodes = JoinedNodes(rules, of_server(hosts.token_file, hosts.run_id))
    bound = bind_address(plan.driver.bind_host)

    def starter(endpoint: str, token_file: Path) -> Backend:
        nodes.open(token_file)
        if not own:
            return nodes
        here = LocalBackend(endpoint, token_file, address=own_address(bound))
        return OwnAndJoined(own, here, nodes)

    return run_driver(
        plan,
        discovery=WithOwn(hosts.own, nodes),
        starter=starter,
        bind_host=bound,
        run_dir=run_dir,
        joined=nodes,
    )


class WithOwn:
    """The server's own node and those that have joined, as one source of hosts."""

    def __init__(self, own: Hosts, nodes: JoinedNodes) -> None:
        self._own, self._nodes = own, nodes

    def find(self) -> Hosts:
        """See `HostDiscovery.find`; returns when a node came or went."""
        return (*self._own, *self._nodes.find())

    def cancel(self) -> None:
        """See `HostDiscovery.cancel`."""
        self._nodes.cancel()


class OwnAndJoined(Backend):
    """Two starters as one: the server's own node is the first one's, all others the second's."""

    def __init__(self, own: dict[str, int], here: Backend, nodes: Backend) -> None:
        self._own, self._here, self._nodes = own, here, nodes

    def start(self, host: str, incarnation: int, on_lost: OnLost) -> None:
        """See `Backend.start`."""
        (self._here if host in self._own else self._nodes).start(host, incarnation, on_lost)

    def kill(self, host: str, incarnation: int) -> None:
        """See `Backend.kill`."""
        (self._here if host in self._own else self._nodes).kill(host, incarnation)

    def close(self, grace: float) -> None:
        """See `Backend.close`; the grace is spent once."""
        began = time.monotonic()
        self._here.close(grace)
        self._nodes.close(max(0.0, grace - (time.monotonic() - began)))


def refuse_what_does_not_fit(plan: LaunchPlan) -> None:
    """Raise UsageError for options that need hosts which are known beforehand."""
    if plan.node_check is not None:
        raise UsageError(
            "the node check needs hosts that are known beforehand, and these join by themselves; "
            "check them with: elasticctl check HOSTS"
        )
