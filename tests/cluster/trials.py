"""Break hosts in every way, with default flags, several times each; print how long each step took.

    python -m tests.cluster.trials                    every fault five times, 4 hosts of 2 workers
    python -m tests.cluster.trials cut freeze --times 2

Needs root. One job for each fault; the hosts take turns, rank 0's among them, and each is whole
again before the next is broken. Ends with 1 if a step was lost or done twice, a bound missed, or
something was left on a host. `tests/cluster/test_hosts.py` tries each fault once and looks closer.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.support.clock import jumping_clock
from tests.support.cluster import Cluster, Node, why_not
from tests.support.cluster_job import ClusterJob, elasticrun_on, now
from tests.support.job import eventually
from tests.support.processes import select, signal_each
from tests.support.shaping import rough
from tests.support.slowing import slowed

HOSTS = ("node0", "node1", "node2", "node3")
SLOTS = 2
FULL = len(HOSTS) * SLOTS
FOUR_HOSTS = ("-np", str(FULL), "--min-np", "1", "-H", f"node[0-3]:{SLOTS}")
KILLED_S, SILENT_S = 0.3, 2.5  # until the others have trained on
BUSY_S = 3.0  # added to every bound: twenty processes share this machine's processors
UNHARMED_STEPS = 40  # to be trained while a fault lasts that nobody is to be lost by
CLOCK_FILE = "/tmp/clock"

Fault = Callable[[Node], "contextlib.AbstractContextManager[object]"]


@contextlib.contextmanager
def processes_killed(node: Node) -> Iterator[None]:
    _kill(node, "")
    yield


@contextlib.contextmanager
def agent_killed(node: Node) -> Iterator[None]:
    _kill(node, "launcher.agent")
    yield


@contextlib.contextmanager
def power_lost(node: Node) -> Iterator[None]:
    node.poweroff()
    yield
    node.heal()
    node.boot()


@contextlib.contextmanager
def link_cut(node: Node) -> Iterator[None]:
    node.cut()
    yield
    node.heal()


@contextlib.contextmanager
def one_way_loss(node: Node) -> Iterator[None]:
    node.deafen()
    yield
    node.heal()


@contextlib.contextmanager
def frozen(node: Node) -> Iterator[None]:
    node.freeze()
    yield
    node.thaw()


@contextlib.contextmanager
def sshd_sessions_killed(node: Node) -> Iterator[None]:
    def is_session(process: psutil.Process) -> bool:
        session = process.name() == "sshd" and process.pid != node.pid
        return session and _namespace(process.pid) == _namespace(node.pid or 0)

    signal_each(select(psutil.process_iter(), is_session), signal.SIGKILL)
    yield


@contextlib.contextmanager
def slow_link(node: Node) -> Iterator[None]:
    node.slow_link("2mbit")
    yield
    node.fast_link()


@contextlib.contextmanager
def rough_link(node: Node) -> Iterator[None]:
    with rough(node, 0.05, 2.0):
        yield


@contextlib.contextmanager
def slow_cpu(node: Node) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for process in node.processes():
            stack.enter_context(slowed(process.pid, 0.15))
        yield


@contextlib.contextmanager
def clock_jumps(node: Node) -> Iterator[None]:
    clock = Path("/proc", str(node.pid), "root", CLOCK_FILE.lstrip("/"))
    clock.write_text("3600\n")
    yield
    clock.write_text("-7200\n")


@dataclass(frozen=True)
class Kind:
    """A fault: how it is made, and within how many seconds the driver is to know (None: a host
    that suffers it is not to be lost)."""

    fault: Fault
    known_within: float | None


KINDS = {
    "processes": Kind(processes_killed, KILLED_S),
    "agent": Kind(agent_killed, KILLED_S),
    "power": Kind(power_lost, SILENT_S),
    "cut": Kind(link_cut, SILENT_S),
    "one-way": Kind(one_way_loss, SILENT_S),
    "freeze": Kind(frozen, SILENT_S),
    "sshd": Kind(sshd_sessions_killed, None),
    "slow-link": Kind(slow_link, None),
    "rough-link": Kind(rough_link, None),
    "slow-cpu": Kind(slow_cpu, None),
    "clock": Kind(clock_jumps, None),
}


@dataclass
class Measured:
    """Seconds from a fault to what followed, one of each for each time it was made."""

    known: list[float] = field(default_factory=list)
    trained: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)  # from the repair
    wrong: list[str] = field(default_factory=list)

    def row(self) -> str:
        """For the table: median and worst of each."""
        figures = (self.known, self.trained, self.whole)
        shown = [f"{statistics.median(x):5.2f} {max(x):5.2f}" if x else " " * 11 for x in figures]
        return "   ".join([*shown, "; ".join(self.wrong) or "ok"])


def lose_a_host(job: ClusterJob, node: Node, kind: Kind, found: Measured) -> None:
    """Break one host, see the others go on, repair it, see it come back."""
    before, at = job.newest_round(), now()
    others = {host for host in HOSTS if host != node.name}
    with kind.fault(node):
        found.known.append(job.wait_event("agent_lost", node.name, since=at)["t"] - at)
        job.until(lambda: job.newest_round() > before, "the others go on")
        job.until(lambda: _has_all(job, before, others), "each of the others has trained on")
        found.trained.append(job.first_step_after(before, others) - at)
        repaired = now()
    job.together(FULL, above=before)
    found.whole.append(now() - repaired)
    bound = (kind.known_within or 0.0) + BUSY_S
    for name, seconds in (("known", found.known[-1]), ("trained", found.trained[-1])):
        if seconds > bound:
            found.wrong.append(f"{node.name}: {name} after {seconds:.1f} s")


def bear_it(job: ClusterJob, node: Node, kind: Kind, found: Measured) -> None:
    """Make a fault that nobody is to be lost by; training goes on while it lasts."""
    before, at = job.newest_round(), now()
    step = max(r.step for r in job.steps())
    with kind.fault(node):
        job.until(
            lambda: max(r.step for r in job.steps()) > step + UNHARMED_STEPS,
            "training goes on",
            within=90,
        )
        found.trained.append((now() - at) / UNHARMED_STEPS)
    if job.newest_round() != before or job.events("agent_lost", "worker_lost"):
        found.wrong.append(f"{node.name}: round {job.newest_round()} instead of {before}")


def try_kind(name: str, times: int) -> Measured:
    """One job, `times` faults of one kind, and its end."""
    kind, found = KINDS[name], Measured()
    with contextlib.ExitStack() as stack:
        env = stack.enter_context(_jumping_clock()) if kind.fault is clock_jumps else {}
        cluster = stack.enter_context(Cluster(len(HOSTS), env))
        job = stack.enter_context(elasticrun_on(cluster, *FOUR_HOSTS, defaults=True))
        try:
            job.together(FULL, within=120)
            for n in range(times):
                node = cluster.node(HOSTS[n % len(HOSTS)])
                (bear_it if kind.known_within is None else lose_a_host)(job, node, kind, found)
            lost = set() if kind.known_within is None else set(HOSTS)
            if kind.fault is not clock_jumps:  # whose records are of several clocks
                job.check_steps(lost)
            job.signal(signal.SIGINT)
            if (code := job.wait(90)) != 130:
                found.wrong.append(f"exit status {code}")
            eventually(lambda: not job.left_behind(), within=15, what="nothing is left")
        except AssertionError as error:
            log = Path(tempfile.gettempdir(), f"elastic-trial-{name}.log")
            log.write_text(f"{error}\n{job.left_behind()}\n{job.describe()}")
            found.wrong.append(f"{str(error).splitlines()[0]}, see {log}")
    return found


def _has_all(job: ClusterJob, before: int, hosts: set[str]) -> bool:
    try:
        job.first_step_after(before, hosts)
    except KeyError:
        return False
    return True


def _kill(node: Node, word: str) -> None:
    found = select(node.processes(), lambda process: not word or word in process.cmdline())
    signal_each(found, signal.SIGKILL)


def _namespace(pid: int) -> int:
    return Path(f"/proc/{pid}/ns/pid").stat().st_ino


@contextlib.contextmanager
def _jumping_clock() -> Iterator[dict[str, str]]:
    """For every process that ssh starts: a wall clock that can be told to jump."""
    with tempfile.TemporaryDirectory(prefix="elastic-clock-", dir="/var/tmp") as folder:
        yield jumping_clock(Path(folder), CLOCK_FILE)


def main() -> int:
    """The table, and 1 where something was wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("faults", nargs="*", metavar="FAULT", help=", ".join(KINDS))
    parser.add_argument("--times", type=int, default=5)
    args = parser.parse_args()
    if unknown := set(args.faults) - set(KINDS):
        parser.error(f"no such fault: {', '.join(sorted(unknown))}")
    if reason := why_not():
        print(f"cannot be tried here: {reason}", file=sys.stderr)
        return 75
    print("seconds, median and worst:  known     others trained on   whole after repair")
    wrong = False
    for name in args.faults or KINDS:
        found = try_kind(name, args.times)
        wrong |= bool(found.wrong)
        print(f"{name:<12} {len(found.trained)} x   {found.row()}", flush=True)
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
