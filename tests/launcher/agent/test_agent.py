"""A real agent process under a real rendezvous server: orders in, reports out."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from pathlib import Path

import psutil

from elastic_driver import contract
from elastic_driver.token_roles import agent_token, worker_token
from elastic_driver.words.orders import StartWorkerOrder
from elastic_driver.words.wire_events import AgentReady, WorkerExited, WorkerStarted
from rendezvous.wire import Set
from tests.launcher.agent.harness import (
    DAEMON,
    HOST,
    STUBBORN,
    TOKEN,
    WAIT,
    Driver,
    agent_of,
    eventually,
    place,
)
from tests.support.processes import is_running

HELLO = "import os; print('hello from', os.environ['RANK'])"


def test_a_worker_is_told_that_its_sigterm_is_the_agent_s(driver: Driver) -> None:
    driver.python(
        "import signal, time\n"
        "for n in (signal.SIGURG, signal.SIGTERM):\n"
        "    signal.signal(n, lambda n, _: print(signal.Signals(n).name, flush=True))\n"
        "print('up', flush=True)\n"
        "while True: time.sleep(0.01)\n"
    )
    with agent_of(driver) as agent:
        worker = driver.start_worker()
        eventually(lambda: "up" in agent.out)
        driver.stop_worker(worker, 60.0)
        eventually(lambda: "SIGURG" in agent.out and "SIGTERM" in agent.out)
        driver.stop_worker(worker, 0.0)
        driver.wait(WorkerExited, worker)


def test_an_agent_introduces_itself_and_keeps_its_lease(driver: Driver) -> None:
    driver.python(HELLO, heartbeat_timeout=1.5)
    with agent_of(driver) as agent:
        ready = driver.wait(AgentReady)
        assert (ready.host, ready.incarnation, ready.pid) == ("localhost", 1, agent.pid)
        assert ready.address == "127.0.0.1"
        assert len(set(ready.ports)) == 16
        assert ready.slot_ports == ()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", ready.ports[0]))
        eventually(driver.has_lease)
        until = time.monotonic() + 2.5  # longer than a lease lasts without renewal
        while time.monotonic() < until:
            assert driver.has_lease()
            assert driver.expired.empty()
        driver.shutdown()
        assert agent.wait() == 0


def test_an_agent_offers_ports_for_slots_where_the_job_asks_for_them(driver: Driver) -> None:
    driver.python(HELLO, slot_ports=3)
    with agent_of(driver):
        ready = driver.wait(AgentReady)
        assert len(ready.slot_ports) == 3
        assert not set(ready.slot_ports) & set(ready.ports)
        driver.shutdown()


def test_a_worker_runs_and_its_lines_carry_its_rank(driver: Driver) -> None:
    driver.python(HELLO + "; import sys; print('oops', file=sys.stderr)")
    with agent_of(driver) as agent:
        workers = [driver.start_worker(rank, 2) for rank in range(2)]
        exits = [driver.wait(WorkerExited, worker) for worker in workers]
        assert [e.exit_code for e in exits] == [0, 0]
        assert all("oops" in e.log_tail and not e.victim for e in exits)
        for worker in workers:
            started = driver.wait(WorkerStarted, worker)
            assert not is_running(started.pid)
            assert driver.events.index(started) < driver.events.index(
                driver.wait(WorkerExited, worker)
            )
        driver.shutdown()
        assert agent.wait() == 0
        assert sorted(agent.out.splitlines()) == [
            "[0]<stdout>:hello from 0",
            "[1]<stdout>:hello from 1",
        ]
        assert sorted(agent.err.splitlines()) == ["[0]<stderr>:oops", "[1]<stderr>:oops"]


def test_the_prefix_follows_the_newest_ranks_and_files_are_linked_by_rank(driver: Driver) -> None:
    script = """
import pathlib, time
print("one", flush=True)
while not pathlib.Path("go").exists():
    time.sleep(0.01)
print("two", flush=True)
"""
    driver.python(script, log_dir="logs")
    with agent_of(driver) as agent:
        worker = driver.start_worker()
        eventually(lambda: "[0]<stdout>:one" in agent.out)
        driver.ranks(7, {worker: 5, "localhost.9.9": 6})
        link = driver.folder / "logs" / "by-rank" / "7" / "5"
        eventually(link.exists)
        (driver.folder / "go").touch()
        driver.wait(WorkerExited, worker)
        eventually(lambda: "[5]<stdout>:two" in agent.out)
        assert (link / "stdout.log").read_text() == "one\ntwo\n"
        assert (driver.folder / "logs" / worker / "stderr.log").read_text() == ""


BORN_WITH = """
import json, os, pathlib
file = pathlib.Path(os.environ["ELASTIC_TOKEN_FILE"])
print(json.dumps({**os.environ, "mode": oct(file.stat().st_mode), "token": file.read_text()}))
"""


def test_a_worker_is_born_with_the_contracts_variables_and_without_the_token(
    driver: Driver,
) -> None:
    driver.python(BORN_WITH, log_dir="logs")
    with agent_of(driver, env={**os.environ, "TORCHELASTIC_USE_AGENT_STORE": "True"}) as agent:
        worker = driver.start_worker()
        driver.wait(WorkerExited, worker)
        env = json.loads((driver.folder / "logs" / worker / "stdout.log").read_text())
        assert env["ELASTIC_WORKER_ID"] == worker
        assert env["ELASTIC_RENDEZVOUS"] == driver.server.url
        token = worker_token(agent_token(TOKEN, HOST), worker)
        assert (env.pop("token").strip(), env.pop("mode")) == (token, "0o100600")
        assert not Path(env["ELASTIC_TOKEN_FILE"]).exists(), "the worker's token goes with it"
        assert "TORCHELASTIC_USE_AGENT_STORE" not in env
        assert not any(TOKEN in value or "worker:" in value for value in env.values())
        assert TOKEN not in Path(f"/proc/{agent.pid}/cmdline").read_text()


def test_nonsense_among_the_orders_is_passed_over(driver: Driver) -> None:
    driver.python("print('up')")
    with agent_of(driver) as agent:
        driver.wait(AgentReady)
        nonsense = b"\xff", b"[" * 100_000, b'{"type":"start_worker","worker":1}'
        for number, value in enumerate(nonsense, driver.orders + 1):
            key = contract.agent_order(HOST, driver.incarnation, number)
            driver.server.apply([Set(key, value), Set(contract.JOB_DRIVER, value)])
        driver.orders += len(nonsense)
        worker = driver.start_worker()
        driver.wait(WorkerExited, worker)
        eventually(lambda: "passed over what is in agents/" in agent.err)
        assert agent.err.count("passed over what is in job/driver") == 1
        driver.shutdown()
        assert agent.wait() == 0


def test_a_stubborn_worker_is_killed_after_its_grace(driver: Driver) -> None:
    driver.python(STUBBORN)
    with agent_of(driver) as agent:
        worker = driver.start_worker()
        eventually(lambda: "up" in agent.out)
        began = time.monotonic()
        driver.stop_worker(worker, 0.5)
        assert driver.wait(WorkerExited, worker).exit_code == -signal.SIGKILL
        assert 0.5 <= time.monotonic() - began < 3.0
        assert "[0]<stdout>:not yet" in agent.out


def test_a_grace_of_zero_kills_at_once_even_a_stopped_worker(driver: Driver) -> None:
    driver.python(WAIT)
    with agent_of(driver) as agent:
        worker = driver.start_worker()
        eventually(lambda: "up" in agent.out)
        os.kill(driver.wait(WorkerStarted, worker).pid, signal.SIGSTOP)
        driver.stop_worker(worker, 0.0)
        assert driver.wait(WorkerExited, worker, within=3).exit_code == -signal.SIGKILL


def test_a_later_order_may_shorten_a_stop_but_not_lengthen_it(driver: Driver) -> None:
    driver.python(STUBBORN)
    with agent_of(driver) as agent:
        worker = driver.start_worker()
        eventually(lambda: "up" in agent.out)
        driver.stop_worker(worker, 600.0)
        eventually(lambda: "not yet" in agent.out)
        driver.stop_worker(worker, 0.3)
        driver.stop_worker(worker, 600.0)
        driver.wait(WorkerExited, worker, within=5)


def test_a_daemonised_grandchild_ends_with_its_worker(driver: Driver) -> None:
    driver.python(DAEMON)
    with agent_of(driver):
        worker = driver.start_worker()
        assert driver.wait(WorkerExited, worker).exit_code == 0
        assert not is_running(int((driver.folder / "daemon").read_text()))


def test_orders_for_unknown_workers_and_repeated_starts_are_harmless(driver: Driver) -> None:
    driver.python(HELLO)
    order = StartWorkerOrder("localhost.0.1", place(), 1, 0, "127.0.0.1", 29500)
    with agent_of(driver) as agent:
        driver.stop_worker("localhost.3.3", 0.0)
        driver.ranks(1, {"localhost.3.3": 0})
        driver.order(order)
        driver.wait(WorkerExited, "localhost.0.1")
        driver.order(order)
        driver.shutdown()
        assert agent.wait() == 0
        assert len(driver.told(WorkerStarted)) == 1
        assert agent.out.count("hello") == 1


def test_a_command_that_does_not_exist_is_a_clear_end_with_127(driver: Driver) -> None:
    driver.publish("no-such-command-anywhere")
    with agent_of(driver):
        end = driver.wait(WorkerExited, driver.start_worker())
        assert end.exit_code == 127
        assert "command not found: 'no-such-command-anywhere'" in end.log_tail
        assert "\n" not in end.log_tail


def test_a_file_that_is_not_executable_is_a_clear_end_with_126(driver: Driver) -> None:
    path = driver.folder / "data.txt"
    path.write_text("not a program")
    driver.publish(str(path))
    with agent_of(driver):
        end = driver.wait(WorkerExited, driver.start_worker())
        assert end.exit_code == 126
        assert "permission denied" in end.log_tail


def test_a_missing_working_directory_is_named(driver: Driver) -> None:
    driver.publish("true", cwd="/no/such/folder")
    with agent_of(driver):
        end = driver.wait(WorkerExited, driver.start_worker())
        assert end.exit_code == 126
        assert "/no/such/folder" in end.log_tail


def test_a_failing_scripts_traceback_travels_in_the_report_and_is_not_printed(
    driver: Driver,
) -> None:
    driver.python("print('before', flush=True)\nraise ValueError('a typo')")
    with agent_of(driver) as agent:
        workers = [driver.start_worker(rank, 2) for rank in range(2)]
        for worker in workers:
            end = driver.wait(WorkerExited, worker)
            assert end.exit_code == 1
            assert end.log_tail.startswith("Traceback (most recent call last):")
            assert end.log_tail.endswith("ValueError: a typo")
        driver.shutdown()
        assert agent.wait() == 0
        assert agent.err == ""
        assert agent.out.count("before") == 2


def test_a_traceback_is_not_printed_while_its_worker_is_busy_ending(driver: Driver) -> None:
    driver.python(
        "import atexit, time\n"
        "def tear_down():\n"
        "    while time.process_time() < 1.5: pass\n"
        "atexit.register(tear_down)\n"
        "raise ValueError('a typo')\n"
    )
    with agent_of(driver) as agent:
        end = driver.wait(WorkerExited, driver.start_worker())
        assert end.log_tail.endswith("ValueError: a typo")
        driver.shutdown()
        assert agent.wait() == 0
        assert agent.err == ""


def test_a_traceback_of_a_worker_that_lives_on_is_printed(driver: Driver) -> None:
    script = "import logging, time\ntry: 1/0\nexcept Exception: logging.exception('survived')\n"
    driver.python(script + WAIT)
    with agent_of(driver) as agent:
        driver.start_worker()
        eventually(lambda: "[0]<stderr>:ZeroDivisionError" in agent.err)


def test_a_worker_that_fell_because_a_peer_was_lost_is_a_victim(driver: Driver) -> None:
    driver.python(
        "raise RuntimeError('[x/gloo/transport/tcp/pair.cc:547] Connection closed by peer')"
    )
    with agent_of(driver):
        assert driver.wait(WorkerExited, driver.start_worker()).victim


def test_a_terminal_that_nobody_reads_does_not_hold_training_up_for_ever(driver: Driver) -> None:
    driver.python("for n in range(100_000): print('x' * 60, n)", log_dir="logs")
    read, write = os.pipe2(os.O_CLOEXEC)
    with agent_of(driver, stdout=write) as agent:
        os.close(write)
        worker = driver.start_worker()
        assert driver.wait(WorkerExited, worker, within=20).exit_code == 0
        lines = (driver.folder / "logs" / worker / "stdout.log").read_text().splitlines()
        assert lines[-1].endswith(" 99999")
        assert len(lines) == 100_000
        driver.shutdown()
        assert agent.wait(10) == 0
        assert len(agent.err.splitlines()) == 1
        assert "nothing has read our stdout" in agent.err
    os.close(read)


def test_a_terminal_that_is_closed_does_not_end_anything(driver: Driver) -> None:
    driver.python("for n in range(100_000): print('x' * 60, n)")
    read, write = os.pipe2(os.O_CLOEXEC)
    with agent_of(driver, stdout=write) as agent:
        os.close(write)
        os.close(read)
        assert driver.wait(WorkerExited, driver.start_worker()).exit_code == 0
        driver.shutdown()
        assert agent.wait(10) == 0
        assert "Broken pipe" in agent.err


def test_a_flood_of_lines_arrives_whole_and_quickly(driver: Driver) -> None:
    lines = 300_000
    driver.python(f"for n in range({lines}): print('step', n)", env={"PYTHONUNBUFFERED": ""})
    with agent_of(driver) as agent:
        driver.wait(AgentReady)
        began = time.monotonic()
        driver.wait(WorkerExited, driver.start_worker())
        assert time.monotonic() - began < lines / 50_000
        driver.shutdown()
        assert agent.wait() == 0
        assert agent.out.splitlines() == [f"[0]<stdout>:step {n}" for n in range(lines)]


def test_warm_workers_are_children_of_the_agent_and_nothing_outlives_it(driver: Driver) -> None:
    script = "import psutil, os\nprint('ppid', os.getppid(), flush=True)\n" + WAIT
    driver.python(script, warm=1, preload=("psutil",))
    with agent_of(driver) as agent:
        workers = [driver.start_worker(rank, 2) for rank in range(2)]
        pids = [driver.wait(WorkerStarted, worker).pid for worker in workers]
        eventually(lambda: agent.out.count(f"ppid {agent.pid}") == 2)
        below = [child.pid for child in psutil.Process(agent.pid).children(recursive=True)]
        assert set(pids) < set(below)  # and the warm parent with its spare
        driver.stop_worker(workers[0], 1.0)
        assert driver.wait(WorkerExited, workers[0]).exit_code == -signal.SIGTERM
        assert is_running(pids[1])
        agent.process.kill()
        agent.wait()
        eventually(lambda: not any(map(is_running, below)), within=3)


def test_a_worker_that_is_stopped_while_the_warm_parent_warms_up_is_never_started(
    driver: Driver,
) -> None:
    (driver.folder / "slow_module.py").write_text("import time; time.sleep(1.5)")
    driver.python("import slow_module", warm=1, preload=("slow_module",))
    with agent_of(driver) as agent:
        stopped, kept = driver.start_worker(0, 2), driver.start_worker(1, 2)
        driver.stop_worker(stopped, 5.0)
        end = driver.wait(WorkerExited, stopped)
        assert (end.exit_code, end.log_tail) == (-15, "stopped before it was started")
        assert driver.wait(WorkerExited, kept).exit_code == 0
        assert [e.worker for e in driver.told(WorkerStarted)] == [kept]
        driver.shutdown()
        assert agent.wait() == 0


def test_a_worker_without_memory_says_so_with_its_peak(driver: Driver) -> None:
    driver.python(
        "import resource\n"
        "held = b'x' * 80_000_000\n"
        "resource.setrlimit(resource.RLIMIT_AS, (2**29, 2**29))\n"
        "more = bytes(2**30)\n"
    )
    with agent_of(driver):
        event = driver.wait(WorkerExited, driver.start_worker())
    assert event.exit_code == 1
    assert event.out_of_memory is not None
    assert event.out_of_memory.peak is not None
    assert 80_000_000 < event.out_of_memory.peak < 2**29
    assert event.out_of_memory.idle is not None


def test_a_killed_worker_is_not_short_of_memory(driver: Driver) -> None:
    driver.python(WAIT)
    with agent_of(driver) as agent:
        worker = driver.start_worker()
        eventually(lambda: "up" in agent.out)
        os.kill(driver.wait(WorkerStarted, worker).pid, signal.SIGKILL)
        event = driver.wait(WorkerExited, worker)
    assert (event.exit_code, event.out_of_memory) == (-9, None)
