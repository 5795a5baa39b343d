"""An agent whose driver dies keeps its workers, and goes on under the next driver."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import os
import threading
from collections.abc import Iterator

import pytest

from elastic_driver import contract
from elastic_driver.reachability import READ, Presence, announce, announcement
from elastic_driver.runtime.run_dir import RunLock
from elastic_driver.token_roles import agent_token, worker_token
from elastic_driver.words.orders import StartWorkerOrder
from elastic_driver.words.wire_events import (
    AgentReady,
    AgentReturned,
    RunningWorker,
    WorkerExited,
    WorkerStarted,
)
from rendezvous.wire import DeletePrefix
from tests.launcher.agent.harness import (
    HOST,
    TOKEN,
    WAIT,
    AgentProcess,
    Driver,
    agent_of,
    eventually,
    place,
)
from tests.support.processes import is_running

OURS = agent_token(TOKEN, HOST)

AWAY = "the driver is away"
# Each worker prints a line for each line of its own file, and ends with it.
SPEAKS = """
import os, pathlib, time
told, line = pathlib.Path("say-" + os.environ["ELASTIC_WORKER_ID"]), 0
print("up", flush=True)
while True:
    lines = told.read_text().splitlines() if told.exists() else []
    for text in lines[line:]:
        if text == "end":
            raise SystemExit(0)
        print(text, flush=True)
    line = len(lines)
    time.sleep(0.01)
"""
# Shows the signals of its end, and obeys the notice.
LEAVES = """
import signal, time
signal.signal(signal.SIGURG, lambda *_: print("marked", flush=True))
def leave(*_):
    print("told to leave", flush=True)
    raise SystemExit(0)
signal.signal(signal.SIGTERM, leave)
print("up", flush=True)
while True:
    time.sleep(0.01)
"""
WAITS = {"warm": 0, "driver_timeout": 60.0, "heartbeat_timeout": 3.0}


@pytest.fixture
def driver(tmp_path: object) -> Iterator[Driver]:
    driver = Driver(tmp_path, term=1)  # type: ignore[arg-type]
    try:
        yield driver
    finally:
        driver.close()


def known(driver: Driver) -> Presence:
    """The agent as its drivers know it."""
    return Presence(OURS, HOST, driver.incarnation)


async def send(address: str, port: int, line: bytes) -> bytes:
    """What the agent answers at its port for probes."""
    reader, writer = await asyncio.open_connection(address, port)
    writer.write(line)
    answer = await asyncio.wait_for(reader.read(), 5.0)
    writer.close()
    return answer


@contextlib.contextmanager
def next_driver(driver: Driver, term: int = 2, *, elsewhere: bool = False) -> Iterator[Driver]:
    following = driver.replaced(term, elsewhere=elsewhere)
    try:
        yield following
    finally:
        following.close()


def say(driver: Driver, worker: str, *lines: str) -> None:
    with (driver.folder / f"say-{worker}").open("a") as file:
        file.write("".join(f"{line}\n" for line in lines))


def away(agent: AgentProcess) -> None:
    """Wait until the agent has noticed that its driver is away."""
    eventually(lambda: AWAY in agent.err, what="the agent notices it")


def test_the_next_driver_hears_what_ended_and_what_runs_and_gives_orders(driver: Driver) -> None:
    driver.python(SPEAKS, **WAITS)
    with agent_of(driver) as agent:
        ready = driver.wait(AgentReady)
        stays, ends = driver.start_worker(0, 2), driver.start_worker(1, 2)
        pid = driver.wait(WorkerStarted, stays).pid
        gone = driver.wait(WorkerStarted, ends).pid
        driver.close()
        say(driver, ends, "end")
        eventually(lambda: not is_running(gone))
        away(agent)
        assert "wait up to 60 s" in agent.err
        with next_driver(driver) as following:
            returned = following.wait(AgentReturned)
            assert returned.workers == (RunningWorker(stays, pid),)
            assert returned.term == 2
            for name in ("host", "incarnation", "pid", "address", "ports", "probe_port"):
                assert getattr(returned, name) == getattr(ready, name)
            kinds = [type(event) for event in following.events]
            assert kinds.index(WorkerExited) < kinds.index(AgentReturned)
            assert following.told(WorkerExited, ends)[0].exit_code == 0
            following.stop_worker(stays, 5.0)
            following.wait(WorkerExited, stays)
            following.shutdown()
            assert agent.wait() == 0
            assert following.told(AgentReady) == []


def test_a_worker_is_started_once_however_often_it_is_ordered(driver: Driver) -> None:
    driver.python(SPEAKS, **WAITS)
    with agent_of(driver) as agent:
        running, ended = driver.start_worker(0, 2), driver.start_worker(1, 2)
        pid = driver.wait(WorkerStarted, running).pid
        say(driver, ended, "end")
        driver.wait(WorkerExited, ended)
        with next_driver(driver) as following:
            following.wait(AgentReturned)
            for rank, worker in enumerate((running, ended)):
                order = StartWorkerOrder(worker, place(rank, 2), 1, 0, "127.0.0.1", 29500)
                following.order(order)
            again = following.wait(WorkerExited, ended)
            assert again.exit_code == 0
            assert "earlier driver" in again.log_tail
            assert following.told(WorkerStarted) == []
            assert is_running(pid)
            following.shutdown()
            assert agent.wait() == 0


def test_orders_of_a_driver_that_was_replaced_are_not_obeyed(driver: Driver) -> None:
    driver.python(SPEAKS, **WAITS)
    with agent_of(driver) as agent:
        pid = driver.wait(WorkerStarted, driver.start_worker()).pid
        with next_driver(driver, term=3) as third:
            third.wait(AgentReturned)
            with next_driver(third, term=2) as second:
                second.shutdown()
                away(agent)
                assert agent.process.poll() is None
                assert is_running(pid)
                with next_driver(second, term=4) as fourth:
                    assert fourth.wait(AgentReturned).term == 4
                    fourth.shutdown()
                    assert agent.wait() == 0


def test_the_driver_s_pipe_closes_and_the_agent_stays(driver: Driver) -> None:
    driver.python(SPEAKS, **WAITS)
    read, write = os.pipe2(os.O_CLOEXEC)
    extra = ("--lifeline", "--orphan-file", str(driver.endpoint_file))
    with agent_of(driver, *extra, stdin=read) as agent:
        os.close(read)
        pid = driver.wait(WorkerStarted, driver.start_worker()).pid
        os.close(write)
        away(agent)
        with next_driver(driver) as following:
            assert following.wait(AgentReturned).workers[0].pid == pid
            assert driver.endpoint_file.exists()
            following.shutdown()
            assert agent.wait() == 0


def test_an_agent_ends_with_its_keeper_however_long_it_waits_for_drivers(driver: Driver) -> None:
    driver.python(SPEAKS, **WAITS)
    read, write = os.pipe2(os.O_CLOEXEC)
    with agent_of(driver, "--lifeline", "--kept", stdin=read) as agent:
        os.close(read)
        pid = driver.wait(WorkerStarted, driver.start_worker()).pid
        os.close(write)
        assert agent.wait() == 75
        assert not is_running(pid)


def test_when_no_driver_comes_the_workers_are_told_to_leave_and_what_they_said_is_shown(
    driver: Driver,
) -> None:
    driver.python(LEAVES, **{**WAITS, "driver_timeout": 2.5, "grace_period": 30.0})
    extra = ("--orphan-file", str(driver.endpoint_file), "--resumable")
    with agent_of(driver, *extra) as agent:
        driver.wait(WorkerStarted, driver.start_worker())
        eventually(lambda: "up" in agent.out)
        driver.close()
        assert agent.wait() == 75
        assert "told to leave" in agent.out
        assert "marked" not in agent.out
        assert "the driver is gone: no other came within 2.5 s" in agent.err
        assert not driver.endpoint_file.exists()


def test_an_agent_that_gives_up_leaves_the_files_of_a_driver_that_lives(driver: Driver) -> None:
    """The next driver of the run has the same token, and perhaps the same address."""
    driver.python(WAIT, warm=0)
    lock = RunLock(driver.folder / "lock", "run-for-tests")
    lock.acquire("")
    read, write = os.pipe2(os.O_CLOEXEC)
    files = [driver.token_file, driver.endpoint_file]
    extra = [word for path in files for word in ("--orphan-file", str(path))]
    with contextlib.ExitStack() as stack:
        stack.callback(lock.release, remove=True)
        agent = stack.enter_context(agent_of(driver, "--lifeline", *extra, stdin=read))
        os.close(read)
        driver.wait(AgentReady)
        os.close(write)
        assert agent.wait() == 75
        assert all(path.exists() for path in files)


def test_sigterm_without_a_driver_is_a_notice_to_the_workers(driver: Driver) -> None:
    driver.python(LEAVES, **WAITS, grace_period=30.0)
    with agent_of(driver) as agent:
        driver.wait(WorkerStarted, driver.start_worker())
        eventually(lambda: "up" in agent.out)
        driver.close()
        away(agent)
        agent.process.terminate()
        assert agent.wait() == 143
        assert "told to leave" in agent.out
        assert "marked" not in agent.out


def test_an_agent_that_was_given_up_meanwhile_ends(driver: Driver) -> None:
    driver.python(WAIT, **WAITS)
    with agent_of(driver) as agent:
        pid = driver.wait(WorkerStarted, driver.start_worker()).pid
        with next_driver(driver) as following:
            prefix = contract.agent_prefix(HOST, driver.incarnation)
            following.server.apply([DeletePrefix(prefix, seal=True)])
            assert agent.wait() == 75
            assert not is_running(pid)
            assert "given this agent up" in agent.err


def test_an_agent_of_a_job_that_waits_for_no_driver_ends_with_it(driver: Driver) -> None:
    driver.python(WAIT, warm=0, heartbeat_timeout=1.0)
    with agent_of(driver) as agent:
        pid = driver.wait(WorkerStarted, driver.start_worker()).pid
        driver.close()
        assert agent.wait() == 75
        assert not is_running(pid)
        assert AWAY not in agent.err


# ---- a driver at another address ---------------------------------------------------------


def test_a_driver_elsewhere_calls_the_agent_and_its_later_workers_begin_there(
    driver: Driver,
) -> None:
    show = "import os, pathlib, time\nprint(os.environ['ELASTIC_RENDEZVOUS'], flush=True)\n"
    show += "print(pathlib.Path(os.environ['ELASTIC_DRIVER_FILE']).exists(), flush=True)\n"
    driver.python(show + "time.sleep(600)", **WAITS)
    with agent_of(driver) as agent:
        ready = driver.wait(AgentReady)
        driver.wait(WorkerStarted, driver.start_worker(0, 2))
        eventually(lambda: f"{driver.server.url}\n" in agent.out and "False" in agent.out)
        where = ready.address, ready.probe_port
        with next_driver(driver, elsewhere=True) as following:
            url = following.server.url
            for run, term, token in (
                ("run-for-tests", 2, "another token"),
                ("run-for-tests", 2, worker_token(OURS, f"{HOST}.0.1")),
                ("another-run", 2, OURS),
                ("run-for-tests", 1, OURS),
            ):
                assert asyncio.run(send(*where, announcement(run, term, url, token))) == READ
            away(agent)
            assert following.events == []
            told = announce(*where, known(driver), run_id="run-for-tests", term=2, url=url)
            assert asyncio.run(told)
            following.wait(AgentReturned, within=2.0)
            worker = contract.worker_id(HOST, 1, 9)
            following.order(StartWorkerOrder(worker, place(1, 2), 2, 0, "127.0.0.1", 29500))
            following.wait(WorkerStarted, worker)
            eventually(lambda: "[1]<stdout>:True" in following.printed_lines())
            assert f"[1]<stdout>:{url}" in following.printed_lines()
            following.shutdown()
            assert agent.wait() == 0


def test_an_agent_follows_a_driver_that_has_taken_over_though_the_old_one_answers(
    driver: Driver,
) -> None:
    driver.python(WAIT, **WAITS)
    with agent_of(driver) as agent:
        ready = driver.wait(AgentReady)
        second = Driver(driver.folder, driver.incarnation, term=2)
        with contextlib.closing(second):
            asyncio.run(
                announce(
                    ready.address,
                    ready.probe_port,
                    known(driver),
                    run_id="run-for-tests",
                    term=2,
                    url=second.server.url,
                )
            )
            second.wait(AgentReturned)
            driver.shutdown()
            second.stop_worker("unknown", 1.0)
            second.shutdown()
            assert agent.wait() == 0


@pytest.mark.parametrize(
    ("line", "answer"),
    [(b"x" * 5000, b""), (b"{}\n", READ), (b"\xff\xfe\n", READ), (b"\n", READ), (b"?\n", READ)],
)
def test_other_lines_change_nothing(driver: Driver, line: bytes, answer: bytes) -> None:
    driver.python(WAIT, **WAITS)
    with agent_of(driver) as agent:
        ready = driver.wait(AgentReady)
        assert asyncio.run(send(ready.address, ready.probe_port, line)) == answer
        driver.shutdown()
        assert agent.wait() == 0


def test_a_program_that_took_the_driver_s_port_is_no_driver(driver: Driver) -> None:
    class Stranger(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_error(404)

        def log_message(self, *_: object) -> None:
            pass

    driver.python(SPEAKS, **WAITS)
    with agent_of(driver) as agent:
        worker = driver.start_worker()
        pid = driver.wait(WorkerStarted, worker).pid
        driver.close()
        say(driver, worker, "end")
        eventually(lambda: not is_running(pid))
        with http.server.HTTPServer(("127.0.0.1", driver.server.port), Stranger) as stranger:
            serving = threading.Thread(target=stranger.serve_forever)
            serving.start()
            away(agent)
            stranger.shutdown()
            serving.join()
        with next_driver(driver) as following:
            following.wait(AgentReturned)
            assert following.told(WorkerExited, worker)
            following.shutdown()
            assert agent.wait() == 0


# ---- output ------------------------------------------------------------------------------


def test_output_goes_to_the_console_and_then_to_the_next_driver_in_order(driver: Driver) -> None:
    driver.python(SPEAKS, **WAITS, log_dir="logs")
    with agent_of(driver) as agent:
        worker = driver.start_worker()
        driver.wait(WorkerStarted, worker)
        say(driver, worker, "one", "two")
        eventually(lambda: "two" in agent.out)
        driver.close()
        away(agent)
        say(driver, worker, "three", "four")
        log = driver.folder / "logs" / worker / "stdout.log"
        eventually(lambda: "four" in log.read_text())
        with next_driver(driver) as following:
            following.wait(AgentReturned)
            say(driver, worker, "five")
            eventually(lambda: any("five" in line for line in following.printed_lines()))
            said = [line.removeprefix("[0]<stdout>:") for line in following.printed_lines()]
            assert [line for line in said if "elasticrun" not in line] == ["three", "four", "five"]
            assert "three" not in agent.out
            following.shutdown()
            assert agent.wait() == 0
            assert log.read_text().split() == ["up", "one", "two", "three", "four", "five"]


def test_output_for_a_console_that_breaks_goes_to_the_driver(driver: Driver) -> None:
    driver.python(SPEAKS, **WAITS)
    read, write = os.pipe2(os.O_CLOEXEC)
    with agent_of(driver, stdout=write) as agent:
        os.close(write)
        worker = driver.start_worker()
        driver.wait(WorkerStarted, worker)
        assert os.read(read, 100) == b"[0]<stdout>:up\n"
        os.close(read)
        say(driver, worker, *(f"line {n}" for n in range(2000)))
        eventually(lambda: len(driver.printed_lines()) == 2000)
        assert driver.printed_lines() == [f"[0]<stdout>:line {n}" for n in range(2000)]
        driver.shutdown()
        assert agent.wait() == 0
