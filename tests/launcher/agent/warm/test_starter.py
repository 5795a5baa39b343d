"""The warm starter: what it forks, what it leaves to the fallback, and that nothing stays."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.agent.processes import StartError, children, reap
from launcher.agent.warm import starter
from tests.launcher.agent.harness import ROOT
from tests.launcher.agent.warm.harness import Agent, agent, eventually, wait_for
from tests.support.processes import is_running, session_of

HELLO = "import sys; print('hello', 'preloaded' in sys.modules)"
FORKED, FRESH = "hello True\n", "hello False\n"


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Agent]:
    before = set(children())
    with agent(tmp_path) as fake:
        (tmp_path / "lib").mkdir()
        (tmp_path / "lib/preloaded.py").write_text("")
        (tmp_path / "job.py").write_text(HELLO)
        fake.env["PYTHONPATH"] = str(tmp_path / "lib")
        yield fake
    assert set(children()) <= before, "a process was left behind"


def preload(host: Agent, source: str) -> None:
    """Keep the job warm with a module that does this when it is imported."""
    (host.cwd / "lib/preloaded.py").write_text(textwrap.dedent(source))
    host.launch("job.py", preload=["preloaded"])


def test_a_worker_is_our_child_and_leads_its_session(host: Agent) -> None:
    (host.cwd / "job.py").write_text(
        "import os; print(os.getppid(), os.getpid() == os.getsid(0) == os.getpgid(0))"
    )
    host.launch("job.py")
    assert host.run("job.py").stdout == f"{os.getpid()} True\n"


def test_before_it_is_launched_everything_starts_fresh(host: Agent) -> None:
    assert host.run("job.py").stdout == FRESH
    assert host.starter.own_pids() == frozenset()


def test_whoever_does_not_wait_for_the_warm_parent_gets_a_fresh_worker(host: Agent) -> None:
    (host.cwd / "lib/preloaded.py").write_text(
        "import os, time\nwhile not os.path.exists('go'): time.sleep(0.01)"
    )
    host.starter.launch(host.plan("job.py", preload=["preloaded"]))
    assert not host.warm
    assert host.run("job.py").stdout == FRESH
    (host.cwd / "go").touch()
    asyncio.run(host.starter.ready())
    assert host.run("job.py").stdout == FORKED
    assert host.said == []


def test_several_can_wait_for_it_at_once(host: Agent) -> None:
    host.starter.launch(host.plan("job.py"))

    async def wait() -> None:
        await asyncio.wait_for(asyncio.gather(*(host.starter.ready() for _ in range(3))), 30)

    asyncio.run(wait())
    assert host.warm


def test_a_warm_up_that_takes_too_long_is_given_up(
    host: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starter, "WARM_UP_S", 0.2)
    monkeypatch.setattr(starter, "MOST_LAUNCHES", 1)
    preload(host, "import time; time.sleep(600)")
    assert host.run("job.py").stdout == FRESH
    assert "not warm after" in host.said[0]
    assert host.starter.own_pids() == frozenset()


def test_a_burst_of_starts_gives_as_many_workers(host: Agent) -> None:
    (host.cwd / "job.py").write_text("import os, sys; os.write(1, b'x'); sys.stdin.read()")
    host.launch("job.py")
    read, write = os.pipe()
    with open(read, "rb") as output:
        pids = [host.starter.start(host.spec("job.py", out=write, err=write)) for _ in range(6)]
        os.close(write)
        assert [wait_for(pid) for pid in pids] == [0] * 6
        assert output.read() == b"x" * 6
    assert len(set(pids)) == 6
    assert host.said == []


def test_only_the_descriptors_0_1_2_reach_a_worker(host: Agent) -> None:
    (host.cwd / "job.py").write_text("import os; print(sorted(os.listdir('/proc/self/fd')))")
    host.launch("job.py")
    assert host.run("job.py").stdout == "['0', '1', '2', '3']\n"  # 3 is the listing itself


def test_its_variables_are_shown_to_everyone_who_may_look(host: Agent) -> None:
    (host.cwd / "job.py").write_text("print(open('/proc/self/environ').read().split(chr(0)))")
    host.launch("job.py")
    shown = host.run("job.py", RANK="7", ELASTIC_WORKER_ID="a.1.2", GLOO_X="y" * 5000).stdout
    for wanted in ("'RANK=7'", "'ELASTIC_WORKER_ID=a.1.2'", "y" * 5000, "PATH=", "PYTHONPATH="):
        assert wanted in shown
    assert "WARM" not in shown
    assert "warm/parent" not in shown


def test_variables_that_are_not_text_and_long_ones_arrive(host: Agent) -> None:
    (host.cwd / "job.py").write_text(
        "import os; print(os.environb[b'RANK'], len(os.environ['TF_CONFIG']))"
    )
    host.launch("job.py")
    odd = os.fsdecode(b"\xff\xfe=1")
    assert host.run("job.py", RANK=odd, TF_CONFIG="x" * 120_000).stdout == (
        "b'\\xff\\xfe=1' 120000\n"
    )


def test_a_worker_has_the_context_of_its_first_tls_connection_already(host: Agent) -> None:
    (host.cwd / "job.py").write_text(
        "from rendezvous import tls\nprint(tls.context_without_chain.cache_info().currsize)"
    )
    host.launch("job.py", preload=["rendezvous.tls"])
    assert host.run("job.py").stdout == "1\n"


# ---- what it leaves to the fallback ------------------------------------------------------


def test_a_module_that_cannot_be_imported_is_said_once_and_the_rest_is_warm(host: Agent) -> None:
    host.launch("job.py", preload=["no_such_module", "preloaded"])
    assert host.run("job.py").stdout == FORKED
    (sentence,) = host.said
    assert "no_such_module" in sentence
    assert "ModuleNotFoundError" in sentence


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (
            "import threading; event = threading.Event()\n"
            "threading.Thread(target=event.wait, daemon=True).start()",
            "threads",
        ),
        ("import subprocess; child = subprocess.Popen(['sleep', '60'])", "processes"),
        ("import socket; held = socket.socket()", "socket"),
        ("import os; held = os.pipe()", "pipe"),
    ],
    ids=["thread", "process", "socket", "pipe"],
)
def test_imports_after_which_a_fork_is_unsafe_are_refused(
    host: Agent, source: str, reason: str
) -> None:
    preload(host, source)
    assert host.run("job.py").stdout == FRESH
    assert host.run("job.py").stdout == FRESH
    (sentence,) = host.said
    assert reason in sentence
    assert "preloaded" in sentence


def test_a_module_beside_the_script_that_hides_another_is_refused(host: Agent) -> None:
    (host.cwd / "socket.py").write_text("print('my socket')")
    (host.cwd / "job.py").write_text("import socket")
    host.launch("job.py")
    assert host.run("job.py").stdout == "my socket\n"
    assert "socket.py takes the place" in host.said[0]


def test_modules_beside_the_script_can_be_preloaded(host: Agent) -> None:
    (host.cwd / "model.py").write_text("import layers\nprint('slow import')")
    (host.cwd / "layers.py").write_text("")
    (host.cwd / "job.py").write_text("import sys, model; print(sys.path[0])")
    host.launch("job.py", preload=["model"])
    assert host.run("job.py").stdout == f"{host.cwd}\n"
    assert host.said == []


@pytest.mark.parametrize("end", ["import sys; sys.exit('no licence')", "import os; os.abort()"])
def test_an_import_that_ends_the_process_is_not_tried_for_ever(host: Agent, end: str) -> None:
    preload(host, end)
    assert host.run("job.py").stdout == FRESH
    assert host.said[-1].startswith("no warm workers from now on")
    assert ("no licence" in host.said[-1]) == ("no licence" in end)


def test_another_command_folder_or_variable_starts_fresh_and_says_so_once(host: Agent) -> None:
    host.launch("job.py", preload=["preloaded"])
    for _ in range(2):
        assert host.run("job.py", "more").stdout == FRESH
        assert host.run("job.py", MY_SETTING="1").stdout == FRESH
    assert len(host.said) == 2
    assert "MY_SETTING" in host.said[1]
    assert host.run("job.py", RANK="1", NCCL_DEBUG="INFO", MASTER_PORT="1").stdout == FORKED


def test_a_folder_that_is_gone_is_the_error_it_always_was(host: Agent) -> None:
    folder = host.cwd / "work"
    folder.mkdir()
    host.cwd = folder
    host.launch("../job.py")
    folder.rmdir()
    with pytest.raises(StartError, match="does not exist"):
        host.run("../job.py")


# ---- ends --------------------------------------------------------------------------------


def test_a_warm_parent_that_dies_is_replaced(host: Agent) -> None:
    host.launch("job.py", preload=["preloaded"])
    (parent,) = (pid for pid in host.starter.own_pids() if session_of(pid) == pid)
    os.kill(parent, signal.SIGKILL)
    assert eventually(lambda: not is_running(parent))
    assert host.run("job.py").stdout == FRESH
    asyncio.run(host.starter.ready())
    assert host.run("job.py").stdout == FORKED
    assert "lost" in host.said[0]


def test_those_that_do_not_want_the_next_warm_parent_are_free_when_the_first_is_lost(
    host: Agent,
) -> None:
    (host.cwd / "lib/preloaded.py").write_text("import time; time.sleep(600)")
    host.starter.launch(host.plan("job.py", preload=["preloaded"]))
    (parent,) = host.starter.own_pids()

    async def wait() -> None:
        waiting = asyncio.gather(*(host.starter.ready(for_next=False) for _ in range(3)))
        await asyncio.sleep(0)
        os.kill(parent, signal.SIGKILL)
        await asyncio.wait_for(waiting, 10)

    asyncio.run(wait())
    assert host.run("job.py").stdout == FRESH
    assert "starting another" in host.said[0]


def test_those_that_waited_too_long_do_not_end_the_next_warm_parent(
    host: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starter, "WARM_UP_S", 0.2)
    (host.cwd / "lib/preloaded.py").write_text("import time; time.sleep(600)")
    host.starter.launch(host.plan("job.py", preload=["preloaded"]))

    async def wait() -> None:
        await asyncio.gather(*(host.starter.ready() for _ in range(3)))

    asyncio.run(wait())
    assert host.starter._launches == 2


def test_a_spare_that_dies_is_replaced(host: Agent) -> None:
    host.launch("job.py", preload=["preloaded"])

    def spares() -> set[int]:
        return {
            pid for pid in host.starter.own_pids() if session_of(pid) != pid and is_running(pid)
        }

    assert eventually(lambda: len(spares()) == 1)
    (first,) = spares()
    os.kill(first, signal.SIGKILL)
    assert eventually(lambda: spares() not in ({first}, set()))
    assert host.run("job.py").stdout == FORKED
    assert host.said == []


def test_spares_that_keep_dying_are_not_replaced_for_ever(host: Agent) -> None:
    preload(
        host,
        """
        import os, socket
        def recv_fds(*_):  # by which a spare waits
            os._exit(1)
        socket.recv_fds = recv_fds
        """,
    )
    assert eventually(lambda: not host.warm)
    assert "died, one after another" in host.said[0]
    assert host.run("job.py").stdout == FRESH


def test_a_warm_parent_that_is_stopped_is_given_up_within_the_deadline(
    host: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starter, "START_S", 0.3)
    host.launch("job.py", preload=["preloaded"])
    for pid in host.starter.own_pids():
        os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    assert host.run("job.py").stdout == FRESH
    assert time.monotonic() - began < 5
    assert "does not answer" in host.said[0]


def request_by_hand(host: Agent) -> tuple[socket.socket, int]:
    """Ask the warm parent for a worker; return our end of the talk, and of the worker's output."""
    parent = host.starter._parent
    assert parent is not None
    ours, theirs = socket.socketpair()
    read, write = os.pipe()
    socket.send_fds(parent.queue, [b"start"], [write, write, theirs.fileno()])
    os.close(write)
    theirs.close()
    return ours, read


def test_a_request_that_was_given_up_starts_nothing(host: Agent) -> None:
    host.launch("job.py", preload=["preloaded"])
    ours, read = request_by_hand(host)
    with open(read, "rb") as output:
        ours.close()  # nobody waits for an answer any more
        assert output.read() == b""
    assert host.run("job.py").stdout == FORKED


def test_an_answer_that_is_not_confirmed_starts_nothing(host: Agent) -> None:
    host.launch("job.py", preload=["preloaded"])
    ours, read = request_by_hand(host)
    with open(read, "rb") as output:
        ours.sendall(json.dumps({"env": host.env}).encode() + b"\n")
        pid = json.loads(ours.recv(100))["pid"]
        ours.close()
        assert wait_for(pid) == 0
        assert output.read() == b""
    assert host.run("job.py").stdout == FORKED


def test_closing_frees_every_process_and_descriptor(host: Agent) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    host.launch("job.py")
    own = host.starter.own_pids()
    assert len(own) >= 1
    host.starter.close()
    assert [pid for pid in own if is_running(pid)] == []
    assert descriptors() == before
    assert host.run("job.py").stdout == FRESH


def test_started_workers_outlive_the_starter(host: Agent) -> None:
    (host.cwd / "job.py").write_text("import time\nprint('up', flush=True)\ntime.sleep(60)")
    host.launch("job.py")
    read, write = os.pipe()
    with open(read, "rb") as output:
        pid = host.starter.start(host.spec("job.py", out=write, err=write))
        os.close(write)
        assert output.readline() == b"up\n"
        assert pid not in host.starter.own_pids()
        host.starter.close()
        assert is_running(pid)
        os.kill(pid, signal.SIGTERM)
        assert wait_for(pid) == -signal.SIGTERM


AGENT = """
    import asyncio, os, sys
    from pathlib import Path
    from tests.launcher.agent.warm.harness import agent
    with agent(Path(sys.argv[1])) as fake:
        fake.launch("job.py")
        null = os.open("/dev/null", os.O_WRONLY)
        pid = fake.starter.start(fake.spec("job.py", out=null, err=null))
        print(pid, *fake.starter.own_pids(), flush=True)
        sys.stdin.read()
"""


def test_when_the_agent_is_killed_nothing_stays(host: Agent) -> None:
    before = set(children())  # a server of other tests may be ours, too
    (host.cwd / "job.py").write_text("import time\ntime.sleep(60)")
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(AGENT), str(host.cwd)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    with process:
        assert process.stdout is not None
        pids = [int(word) for word in process.stdout.readline().split()]
        assert len(pids) >= 2
        process.kill()
    assert eventually(lambda: not any(is_running(pid) for pid in pids))

    def all_gone() -> bool:  # we are a subreaper in this test: they have come to us
        return all(reap(pid) is not None for pid in set(children()) - before)

    assert eventually(all_gone)


NO_SUBREAPER = "import tests.launcher.agent.warm.harness as h; h.become_subreaper = print"


def test_without_a_subreaper_no_worker_is_lost_to_init(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(HELLO)
    script = textwrap.dedent(AGENT).replace("with agent", f"{NO_SUBREAPER}\nwith agent")
    script = script.replace("print(pid, *fake.starter.own_pids()", "print(fake.said")
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=60,
        cwd=ROOT,
        check=True,
    )
    assert "subreaper" in done.stdout
