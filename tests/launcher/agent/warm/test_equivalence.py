"""A script cannot tell whether its worker was forked or started: the same output, the same end."""

from __future__ import annotations

import os
import re
import signal
import sys
import textwrap
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.agent.processes import start_fresh
from tests.launcher.agent.warm.harness import Agent, Outcome, agent, eventually


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Agent]:
    with agent(tmp_path) as fake:
        yield fake


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    """`python job.py` kept warm; a worker reads the file when it starts, so each test writes it."""
    with agent(tmp_path_factory.mktemp("job")) as fake:
        fake.launch("job.py")
        yield fake


def write(path: Path, source: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(source))


def both(host: Agent, *arguments: str, **variables: str) -> Outcome:
    """Run it fresh and warm; they must not differ. Returns what both did."""
    host.launch(*arguments)
    return compare(host, *arguments, **variables)


def compare(host: Agent, *arguments: str, reads: bytes | None = None, **variables: str) -> Outcome:
    fresh = host.run_fresh(*arguments, reads=reads, **variables)
    assert host.warm, host.said
    warm = host.run(*arguments, reads=reads, **variables)
    assert host.said == [], "it was not a fork"
    assert without_addresses(warm) == without_addresses(fresh)
    return fresh


def without_addresses(outcome: Outcome) -> list[str]:
    """Its lines, without what differs from process to process."""
    text = f"{outcome.stdout}\n{outcome.stderr}\nexit {outcome.code}"
    return re.sub(r"0x[0-9a-f]+|started \d+", "…", text).splitlines()


WHO_AM_I = """
    import sys
    first = sorted(globals())
    loaded = "sitecustomize" in sys.modules or "usercustomize" in sys.modules
    import gc, inspect, os, resource, signal, threading, traceback
    main = sys.modules["__main__"]
    print("argv", sys.argv, sys.orig_argv)
    print("python", sys.executable, sys.prefix, sys.flags, sys._xoptions, sys.warnoptions)
    print("path", sys.path)
    print("main", __name__, __file__, __spec__, __package__, type(__loader__), first, loaded)
    print("same", main.__dict__ is globals(), main.__builtins__)
    print("cwd", os.getcwd(), repr(sys.stdin.read()), repr(sys.stdin), oct(os.umask(0o22)))
    print("environ", sorted(os.environ.items()))
    shown = open("/proc/self/environ").read().split("\\0")
    print("shown", sorted(item for item in shown if item))
    print("cmdline", open("/proc/self/cmdline").read().split("\\0"))
    print("family", os.getpid() == os.getpgid(0) == os.getsid(0), os.getppid())
    print("files", os.listdir("/proc/self/fd"))
    for stream in sys.stdout, sys.stderr:
        print(repr(stream), stream.errors, stream.line_buffering, stream.write_through)
        print(stream.isatty(), stream.seekable(), type(stream.buffer), stream.newlines)
        print(stream is sys.__stdout__ or stream is sys.__stderr__)
    print("signals", [signal.getsignal(number) for number in signal.valid_signals()])
    print("mask", signal.pthread_sigmask(signal.SIG_BLOCK, []))
    print("limits", [resource.getrlimit(n) for n in range(resource.RLIMIT_NOFILE + 1)])
    print("threads", threading.enumerate(), len(os.listdir("/proc/self/task")))
    print("stack", len(traceback.extract_stack()), len(inspect.stack()), sys.getrecursionlimit())
    print("collector", gc.isenabled(), gc.get_threshold())
    print("ours", [m for m in sys.modules if "warm" in m or m.startswith(("launcher", "rendez"))])
    print("caches", [entry for entry in sys.path_importer_cache if "warm/parent" in entry])
"""


def test_everything_a_script_can_ask_about_itself_is_the_same(host: Agent) -> None:
    write(host.cwd / "job.py", WHO_AM_I)
    outcome = both(host, "job.py", "--epochs", "3", RANK="1", ELASTIC_WORKER_ID="a.1.2")
    assert outcome.code == 0
    assert "stack 1 1" in outcome.stdout
    assert "RANK=1" in outcome.stdout


WHAT_I_READ = """
    import os, sys
    stdin = sys.stdin
    print(repr(stdin), stdin is sys.__stdin__, stdin.mode, stdin.newlines, stdin.errors)
    print(stdin.line_buffering, stdin.write_through, stdin.isatty(), stdin.seekable())
    print(type(stdin.buffer), repr(stdin.buffer.raw), os.get_inheritable(0))
    print(repr(input()), [line for line in stdin], stdin.read(), os.read(0, 9))
"""


@pytest.mark.parametrize("flags", [(), ("-u",), ("-Xutf8",)])
def test_what_a_script_reads_is_the_same(host: Agent, flags: tuple[str, ...]) -> None:
    write(host.cwd / "job.py", WHAT_I_READ)
    host.launch(*flags, "job.py")
    outcome = compare(host, *flags, "job.py", reads="one\r\ntwö\rthree\nfour".encode())
    assert outcome.code == 0
    assert "'one\\r' ['twö\\rthree\\n', 'four']" in outcome.stdout, outcome


@pytest.mark.parametrize(
    "flags",
    [
        ("-u",),
        *([("-P",)] if sys.version_info >= (3, 11) else []),
        ("-O",),
        ("-OO", "-B"),
        ("-W", "error"),
        ("-X", "dev"),
        ("-Xutf8", "-bq"),
        ("-s",),
    ],
    ids=" ".join,
)
def test_the_interpreters_flags_mean_the_same(host: Agent, flags: tuple[str, ...]) -> None:
    write(host.cwd / "job.py", WHO_AM_I + "    assert False, 'asserts count'\n")
    outcome = both(host, *flags, "job.py")
    assert outcome.code == (0 if "-O" in flags or "-OO" in flags else 1)


def test_a_module_is_found_and_run_the_same(host: Agent) -> None:
    write(host.cwd / "pkg/__init__.py", "print('package')\n")
    write(host.cwd / "pkg/__main__.py", "from . import part\n" + textwrap.dedent(WHO_AM_I))
    write(host.cwd / "pkg/part.py", "print('part')\n")
    outcome = both(host, "-m", "pkg", "-x", "--lr=1")
    assert outcome.stdout.startswith("package\npart\n")


def test_a_module_that_fails_shows_the_same_traceback(host: Agent) -> None:
    write(host.cwd / "module.py", "def f():\n    1 / 0\nf()\n")
    outcome = both(host, "-um", "module")
    assert "runpy" in outcome.stderr
    assert outcome.code == 1


def test_code_folders_and_archives_run_the_same(host: Agent) -> None:
    both(host, "-c", "import sys; print(sys.argv, sys.path, __name__)", "a")
    write(host.cwd / "app/__main__.py", "import part, sys; print(sys.path, __file__, sys.argv)\n")
    write(host.cwd / "app/part.py", "print(__file__)\n")
    both(host, "app", "b")
    with zipfile.ZipFile(host.cwd / "app.pyz", "w") as archive:
        archive.write(host.cwd / "app/__main__.py", "__main__.py")
        archive.write(host.cwd / "app/part.py", "part.py")
    assert "app.pyz" in both(host, "app.pyz", "c").stdout


def test_a_script_elsewhere_finds_what_lies_beside_it(host: Agent) -> None:
    write(host.cwd / "src/rendezvous.py", "print('my own', __file__)\n")
    write(host.cwd / "src/launcher/__init__.py", "print('mine too')\n")
    write(host.cwd / "src/elastic_driver.py", "print('and this')\n")
    write(
        host.cwd / "src/job.py",
        "import sys, launcher, rendezvous, elastic_driver\nprint(sys.path, __file__)\n",
    )
    (host.cwd / "link.py").symlink_to("src/job.py")
    assert "my own" in both(host, "src/job.py").stdout
    assert "mine too" in both(host, "./link.py").stdout


def test_the_jobs_pythonpath_and_customizations_hold(host: Agent) -> None:
    write(host.cwd / "lib/sitecustomize.py", "import sys; print('site', sys.argv)\n")
    write(host.cwd / "lib/extra.py", "print('extra')\n")
    write(host.cwd / "job.py", "import extra, sitecustomize, sys; print(sys.path)\n")
    host.env["PYTHONPATH"] = f"lib{os.pathsep}{host.cwd}/lib2"
    outcome = both(host, "job.py")
    assert outcome.stdout.startswith("site ['job.py']\nextra\n")


def test_a_customization_that_fails_is_reported_the_same(host: Agent) -> None:
    write(host.cwd / "lib/sitecustomize.py", "raise ValueError('broken')\n")
    write(host.cwd / "job.py", "print('runs')\n")
    host.env["PYTHONPATH"] = "lib"
    assert "broken" in both(host, "job.py").stderr


ENDINGS = {
    "falls off the end": "print('done')",
    "exit 3": "import sys; sys.exit(3)",
    "exit none": "import sys; sys.exit(None)",
    "exit text": "import sys; sys.exit('cannot go on')",
    "exit 300": "import sys; sys.exit(300)",
    "exit -1": "import sys; sys.exit(-1)",
    "raise SystemExit": "raise SystemExit(7)",
    "_exit": "import os, sys; sys.stdout.write('lost'); os._exit(5)",
    "abort": "import os; os.abort()",
    "kill": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "interrupt": "raise KeyboardInterrupt",
    "error": "def f(n):\n    return f(n - 1) if n else {}['key']\nf(3)",
    "chained": "try:\n    1 / 0\nexcept Exception as e:\n    raise ValueError('no') from e",
    "group": "import sys\nsys.excepthook = lambda *a: print('hook', a[0])\n1 / 0",
    "syntax": "print('never')\nx = = 1",
    "unicode": "print('grün \\N{SNOWMAN}'); raise ValueError('weiß')",
    "recursion": "import sys\nsys.setrecursionlimit(60)\ndef f():\n    f()\nf()",
    "atexit": "import atexit\natexit.register(print, 'one')\natexit.register(lambda: 1 / 0)",
    "thread": "import threading, time\n"
    "threading.Thread(target=lambda: (time.sleep(0.1), print('late'))).start()\nprint('early')",
    "thread error": "import threading\nt = threading.Thread(target=lambda: 1 / 0, name='t')\n"
    "t.start(); t.join()",
    "unflushed": "import sys; sys.stdout.write('out'); sys.stderr.write('err'); print('ü', end='')",
    "broken stdout": "import os, sys; print('x'); os.close(1)",
    "destructor": "class A:\n    def __del__(self): print('gone')\na = A()\nb = [a]; b.append(b)",
    "warning": "import warnings; warnings.warn('careful')",
    "own module": "import __main__ as me, sys; print(me.__file__, me is sys.modules['__main__'])",
}


@pytest.mark.parametrize("source", ENDINGS.values(), ids=ENDINGS.keys())
def test_every_way_to_end_ends_the_same(job: Agent, source: str) -> None:
    write(job.cwd / "job.py", source)
    compare(job, "job.py")


def test_a_script_that_is_missing_fails_the_same(host: Agent) -> None:
    assert both(host, "nowhere.py").code == 2
    assert both(host, "-m", "nowhere").code == 1


def test_a_crash_dumps_the_same_frames(host: Agent) -> None:
    write(host.cwd / "job.py", "import faulthandler\ndef f():\n    faulthandler._sigsegv()\nf()\n")
    fresh = host.run_fresh("-Xfaulthandler", "job.py")
    host.launch("-Xfaulthandler", "job.py")
    warm = host.run("-Xfaulthandler", "job.py")
    frames = [
        re.sub("0x[0-9a-f]+", "", o.stderr.partition("\n\nExtension")[0]) for o in (fresh, warm)
    ]
    assert frames[0] == frames[1]
    assert fresh.code == warm.code == -signal.SIGSEGV


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_signals_find_the_default_dispositions(job: Agent, number: signal.Signals) -> None:
    write(job.cwd / "job.py", "import time\nprint('up', flush=True)\ntime.sleep(60)\n")

    def asleep(pid: int) -> bool:
        with open(f"/proc/{pid}/wchan", encoding="ascii") as file:
            place = file.read()
        return any(call in place for call in ("nanosleep", "select", "poll"))

    def send(pid: int) -> None:
        assert eventually(lambda: asleep(pid))  # past its start: it waits for nothing else
        os.kill(pid, number)

    warm = job.run("job.py", then=send)
    assert warm == job.run("job.py", start=start_fresh, then=send)
    assert job.said == []
    assert warm.code == -number


MULTIPROCESSING = """
    import multiprocessing, os, sys
    from concurrent.futures import ProcessPoolExecutor

    def work(number):
        return number * 2, __name__, multiprocessing.parent_process().pid == int(os.environ["UP"])

    if __name__ == "__main__":
        os.environ["UP"] = str(os.getpid())
        for method in "fork", "spawn", "forkserver":
            context = multiprocessing.get_context(method)
            with ProcessPoolExecutor(1, mp_context=context) as pool:
                print(method, pool.submit(work, 21).result(), flush=True)
        print(len(multiprocessing.current_process().authkey))
"""


def test_processes_of_every_kind_can_be_made(host: Agent) -> None:
    write(host.cwd / "job.py", MULTIPROCESSING)
    outcome = both(host, "job.py")
    assert outcome.stdout.count("(42, ") == 3
    write(host.cwd / "pkg/__init__.py", "")
    write(host.cwd / "pkg/job.py", MULTIPROCESSING)
    assert both(host, "-m", "pkg.job").stdout.count("(42, ") == 3


def test_output_to_a_file_is_buffered_as_ever(host: Agent) -> None:
    write(
        host.cwd / "job.py",
        "import sys\nprint(sys.stdout.seekable(), sys.stdout.tell(), sys.stdout.buffer.raw)\n",
    )
    texts = []
    host.launch("job.py")
    for name in "warm", "fresh":
        with open(host.cwd / "out", "w+b") as out:
            out.write(b"before\n")
            out.flush()
            spec = host.spec("job.py", out=out.fileno(), err=out.fileno())
            os.waitpid(host.starter.start(spec), 0)
            out.seek(0)
            texts.append(out.read())
        if name == "warm":
            host.starter.close()
    assert texts[0] == texts[1]
    assert texts[0].startswith(b"before\nTrue 7")


def test_output_to_a_terminal_is_line_buffered(host: Agent) -> None:
    source = "import sys; print(sys.stdout.isatty(), sys.stdout.line_buffering)"
    write(host.cwd / "job.py", source)
    host.launch("job.py")
    control, terminal = os.openpty()
    try:
        pid = host.starter.start(host.spec("job.py", out=terminal, err=terminal))
        os.waitpid(pid, 0)
        assert os.read(control, 100) == b"True True\r\n"
    finally:
        os.close(control)
        os.close(terminal)
    assert host.said == []


def test_siblings_do_not_share_their_randomness(host: Agent) -> None:
    write(
        host.cwd / "job.py",
        "import random, uuid, multiprocessing, tempfile\n"
        "print(random.random(), uuid.uuid4(), multiprocessing.current_process().authkey.hex(),\n"
        "      next(tempfile._get_candidate_names()))\n",
    )
    host.launch("job.py", preload=["random", "uuid", "multiprocessing", "tempfile"])
    first, second = (host.run("job.py").stdout.split() for _ in range(2))
    assert host.said == []
    assert len(first) == 4
    assert not set(first) & set(second)
