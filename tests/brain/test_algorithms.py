"""Algorithms in processes of their own: ours, and those of an outside package."""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elastic_driver.brain.algorithm import HostView, JobView, Plan, View
from elastic_driver.brain.algorithms import Algorithms
from elastic_driver.brain.fair import fair
from elastic_driver.brain.messages import PlanFailed, Planned
from elastic_driver.errors import ExitCode, UsageError
from tests.support.job import eventually
from tests.support.processes import is_running

VIEW = View(
    now=1000.0,
    triggers=("job arrived",),
    jobs=(JobView(name="A", arrived=1.0, least=1), JobView(name="B", arrived=2.0, least=2)),
    hosts=(HostView(name="n1", slots=4), HostView(name="n2", slots=4)),
)
LIMIT_S = 1.0
_ALGORITHMS = '''
import os, subprocess, sys, time
from elastic_driver.brain.algorithm import Plan, View

print("what an import prints is no answer")
calls = 0

def first_come(view: View) -> Plan:
    """All slots to the job that came first."""
    global calls
    calls += 1
    print("so is what a plan prints")
    os.write(1, b'{"type": "failed", "reason": "no"}\\n')
    assert sys.stdin.read() == ""
    at = {host.name: host.slots for host in view.hosts}
    return Plan(workers={view.jobs[0].name: at}, reason=f"plan {calls}")

def raises(view):
    raise ValueError("no\\nplan")

def leaves(view):
    sys.exit(3)

def ends(view):
    os._exit(4)

def hangs(view):
    print(os.getpid(), subprocess.Popen(["sleep", "1000"]).pid,
          file=open(view.jobs[0].name, "w"), flush=True)
    time.sleep(1000)

def forks(view):
    pid = os.fork()
    if pid:
        time.sleep(0.2)  # the child would answer first
    return Plan(workers={}, reason="of the child" if not pid else "of the parent")

def ends_alone(view):
    if not os.fork():
        print(os.getpid(), file=open(view.jobs[0].name, "w"), flush=True)
        time.sleep(1000)
    while not os.path.exists(view.jobs[0].name):
        time.sleep(0.01)
    os._exit(4)

def closes(view):
    os.closerange(0, 99)
    time.sleep(1000)

def eats(view):
    return bytearray(5 * 2**30)

def talks(view):
    return "A gets everything"

def lies(view):
    return Plan(workers={"A": {"n1": "many"}}, reason="")

not_callable = 3
'''
_NAMES = ["first_come", "raises", "leaves", "ends", "hangs", "talks", "lies", "not_callable"]
_NAMES += ["forks", "ends_alone", "closes", "eats"]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An outside package is installed, for this process and for those that it starts."""
    folder = tmp_path / "site"
    info = folder / "my_plans-1.0.dist-info"
    info.mkdir(parents=True)
    (folder / "my_plans.py").write_text(_ALGORITHMS)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-plans\nVersion: 1.0\n")
    lines = [f"{name} = my_plans:{name}" for name in _NAMES]
    lines += ["broken = my_plans:no_such_name", "fair = my_plans:raises"]
    (info / "entry_points.txt").write_text("\n".join(["[elastic_driver.algorithms]", *lines, ""]))
    monkeypatch.syspath_prepend(str(folder))
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path.rstrip(os.pathsep))


Ask = Callable[..., Planned | PlanFailed]


@pytest.fixture
def algorithms() -> Iterator[Algorithms]:
    found = Algorithms(LIMIT_S)
    yield found
    found.close()
    assert not found._thread.is_alive()


@pytest.fixture
def ask(algorithms: Algorithms) -> Ask:
    def asked(name: str, view: View = VIEW) -> Planned | PlanFailed:
        answers: queue.SimpleQueue[Planned | PlanFailed] = queue.SimpleQueue()
        algorithms.ask(7, name, view, answers.put)
        answer = answers.get(timeout=60)
        assert answer.request == 7
        return answer

    return asked


def test_the_built_in_algorithm_plans_as_it_does_in_this_process(
    algorithms: Algorithms, ask: Ask
) -> None:
    algorithms.check("")
    algorithms.check("fair")
    assert ask("") == Planned(7, fair(VIEW))


@pytest.mark.usefixtures("package")
def test_an_outside_package_s_algorithm_is_found_and_run_in_one_process(
    algorithms: Algorithms, ask: Ask
) -> None:
    algorithms.check("first_come")
    workers = {"A": {"n1": 4, "n2": 4}}
    assert ask("first_come") == Planned(7, Plan(workers=workers, reason="plan 1"))
    assert ask("first_come") == Planned(7, Plan(workers=workers, reason="plan 2"))


@pytest.mark.usefixtures("package")
def test_no_package_replaces_the_built_in_algorithm(ask: Ask) -> None:
    assert isinstance(ask("fair"), Planned)


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("raises", "raised ValueError: no plan (my_plans.py, line 19)"),
        ("leaves", "raised SystemExit: 3 (my_plans.py, line 22)"),
        ("ends", "its process has ended (exit status 4)"),
        ("talks", "returned no plan but a str"),
        ("closes", "its process has closed its pipes"),
        ("eats", "raised MemoryError"),
        ("lies", "returned a plan that cannot be read: Expected `int`, got `str`"),
    ],
)
def test_an_algorithm_that_fails_says_why_and_is_asked_again(
    ask: Ask, name: str, reason: str
) -> None:
    for _ in range(2):
        answer = ask(name)
        assert isinstance(answer, PlanFailed)
        assert answer.reason.startswith(reason)
        assert "\n" not in answer.reason


@pytest.mark.usefixtures("package")
def test_an_algorithm_that_hangs_is_killed_with_what_it_has_started(
    ask: Ask, tmp_path: Path
) -> None:
    for attempt in ("first", "second"):
        pids = tmp_path / attempt
        began = time.monotonic()
        answer = ask("hangs", View(now=0, triggers=(), jobs=(_named(pids),), hosts=()))
        assert answer == PlanFailed(7, f"took longer than {LIMIT_S:g} s")
        assert time.monotonic() - began < 30
        for pid in map(int, pids.read_text().split()):
            eventually(lambda pid=pid: not is_running(pid), within=10, what=f"the end of {pid}")


@pytest.mark.usefixtures("package")
def test_a_process_that_an_algorithm_forks_answers_nothing(ask: Ask) -> None:
    for _ in range(2):
        assert ask("forks") == Planned(7, Plan(workers={}, reason="of the parent"))


@pytest.mark.usefixtures("package")
def test_what_an_algorithm_has_started_ends_although_its_own_process_is_gone(
    ask: Ask, tmp_path: Path
) -> None:
    pids = tmp_path / "pids"
    answer = ask("ends_alone", View(now=0, triggers=(), jobs=(_named(pids),), hosts=()))
    assert answer == PlanFailed(7, f"took longer than {LIMIT_S:g} s"), "its pipes are still open"
    pid = int(pids.read_text())
    eventually(lambda: not is_running(pid), within=10, what=f"the end of {pid}")


@pytest.mark.usefixtures("package")
def test_a_child_that_was_killed_is_replaced(algorithms: Algorithms, ask: Ask) -> None:
    ask("first_come")
    child = algorithms._children["first_come"]
    child.kill()
    eventually(lambda: not child.lives, within=10, what="the end of the child")
    assert isinstance(ask("first_come"), Planned)


@pytest.mark.usefixtures("package")
def test_close_does_not_wait_for_an_algorithm_that_hangs(tmp_path: Path) -> None:
    algorithms = Algorithms(limit=100.0)
    answers: queue.SimpleQueue[Planned | PlanFailed] = queue.SimpleQueue()
    pids = tmp_path / "pids"
    view = View(now=0, triggers=(), jobs=(_named(pids),), hosts=())
    algorithms.ask(1, "hangs", view, answers.put)
    eventually(lambda: pids.exists() and pids.read_text().split(), within=60, what="pids")
    began = time.monotonic()
    algorithms.close()
    assert time.monotonic() - began < 10
    for pid in map(int, pids.read_text().split()):
        eventually(lambda pid=pid: not is_running(pid), within=10, what=f"the end of {pid}")


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("farir", "--algorithm farir: there is no such algorithm; did you mean fair?"),
        ("xyz", "--algorithm xyz: there is no such algorithm; there are broken, closes, eats, "),
        ("broken", "--algorithm broken: it cannot be loaded (AttributeError: "),
        ("not_callable", "--algorithm not_callable: it cannot be loaded (it is no function but a "),
    ],
)
def test_an_algorithm_that_cannot_be_used_is_a_usage_error(
    algorithms: Algorithms, name: str, said: str
) -> None:
    with pytest.raises(UsageError) as raised:
        algorithms.check(name)
    assert str(raised.value).startswith(said)
    assert raised.value.exit_code == ExitCode.USAGE


def _named(path: Path) -> JobView:
    return JobView(name=str(path), arrived=0.0, least=1)
