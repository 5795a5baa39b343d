"""The command that a driver on another machine runs here over ssh, srun or mpirun.

    python -m launcher.agent.remote keep NAME ARGS…   start the agent (`launcher.agent`) and stay
    python -m launcher.agent.remote apart NAME ARGS…  the same, outside mpirun's process tree
    python -m launcher.agent.remote wait NAME         wait until that agent is gone
    python -m launcher.agent.remote end NAME          kill that agent and everything below it
    python -m launcher.agent.remote look FOLDER       print facts about this host

`keep` reads the agent's token and, in a second line, the fingerprint of the driver's certificate
from stdin, which is the only way that the token ever travels. It writes them to a 0600 file in a
private folder that is removed with the agent. `keep` does not depend on the session that started
it: it has its own session, and does not read its closed streams. It is the agent's parent and reaps
everything below the agent, as the local backend does on its machine, so that no process outlives
the agent. If `keep` dies, the agent's stdin closes and the agent ends. Times are seconds.

A login shell runs the user's login files before our command, with the same streams. They may print
anything, with or without a newline at its end, and may leave processes that go on printing. So the
driver knows our own words by *marks* (`BEGIN` and others), which count wherever they stand in the
stream. None of them stands in the command line, which a shell may be told to show. The driver sends
the token once the login files are over; empty lines before it are what it sent to login files.
"""

import asyncio
import contextlib
import json
import os
import platform
import re
import select
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from elastic_driver import contract
from elastic_driver.errors import ExitCode
from launcher import version
from launcher.agent import processes
from launcher.agent.folders import (
    held_folder,
    holder_of,
    process_of,
    sweep,
    sweep_scratch,
    wait_for_holder,
)
from launcher.agent.processes import become_subreaper, children, end_all, send_signal, state_of
from launcher.edge import keep_memory_private
from rendezvous.auth import MAX_FILE_BYTES, write_token_file

# ---- marks --------------------------------------------------------------------------------


REACHED = b"elastic-login-over"  # /bin/sh says it first: the login files are done
SAY_REACHED = "printf '%s-%s\\n' elastic login-over"
_REACHED = re.compile(re.escape(REACHED) + rb"\r?\n")

UP = "elastic-agent-up"  # `UP name empty`: the agent was started, or is waited for
LOOKED = "elastic-look"  # `LOOKED {…}`: the findings of `look`
DONE = "elastic-done"  # `DONE name status`: our command has ended, whatever holds its streams

NO_STDOUT = 83  # an exit status: what we print does not reach the driver


def after_login(said: bytes) -> tuple[bytes, bytes] | None:
    """Return what was printed before our command ran, and after; None: it does not run yet."""
    found = _REACHED.search(said)
    return None if found is None else (said[: found.start()], said[found.end() :])


def up_in(line: bytes, name: str) -> int | None:
    """Return how many empty lines have reached an agent that is up; None: it is not.

    Those that were sent and are missing were read by a login file.
    """
    found = re.search(rb"%s %s(?: (\d{1,6}))?\s*$" % (UP.encode(), re.escape(name.encode())), line)
    return None if found is None else int(found[1] or 0)


def done_in(line: bytes, name: str) -> tuple[bytes, int] | None:
    """Return what stands before the mark of our command's end, and its exit status."""
    found = re.search(rb"%s %s (\d{1,3})\s*$" % (DONE.encode(), re.escape(name.encode())), line)
    return None if found is None else (line[: found.start()], int(found[1]))


def say(mark: str, *words: object) -> None:
    """Print a mark and its words in one write; raises OSError if nobody is there to read it.

    `print` writes word by word with PYTHONUNBUFFERED, and a process that a login file has left
    could print between them.
    """
    os.write(1, (" ".join([mark, *map(str, words)]) + "\n").encode())


def say_done(name: str, status: int) -> None:
    """Print the mark of our command's end; nobody may be there to read it."""
    with contextlib.suppress(OSError):
        say(DONE, name, status)


# ---- commands -----------------------------------------------------------------------------


FOLDER_PREFIX = "elastic-agent-"
PATIENCE_S = 5.0  # for killed processes to be gone
OF_A_RANK = ("OMPI_", "PMIX_", "PMI_", "ORTE_", "PRTE_")  # mpirun's variables for a rank
_TOKEN = "token"  # noqa: S105 - a file's name
_MAX_TOKEN = 4096
_LOOK_AGAIN_S = 0.01


def folder_of(name: str) -> Path:
    """Return the private folder of an agent; the same for every process of this user here."""
    return Path(tempfile.gettempdir(), FOLDER_PREFIX + name)


# ---- keep --------------------------------------------------------------------------------


def keep(name: str, arguments: Sequence[str]) -> int:
    """Start the agent with these arguments, wait for its end, leave nothing; return its status."""
    empty = 0
    while (line := _line_of_stdin()) == "\n":
        empty += 1
    token = line.strip()
    fingerprint = _line_of_stdin().strip()
    if not token:
        print("elasticrun: no token came over stdin", file=sys.stderr)
        return int(ExitCode.BUG)
    keep_memory_private()
    # Outlive the session we were started in: no terminal, none of its signals, no stdin.
    with contextlib.suppress(PermissionError):  # sshd has made us a session leader already
        os.setsid()
    with open(os.devnull, "rb") as null:
        os.dup2(null.fileno(), 0)
    # A handler, not SIG_IGN: an ignored signal would stay ignored in the agent and its workers.
    signal.signal(signal.SIGHUP, lambda _number, _frame: None)
    sweep(FOLDER_PREFIX)
    end(name)  # an agent of this name that an earlier driver has started, if it is still here
    folder = folder_of(name)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(held_folder(folder))
        except FileExistsError:
            hint = "does another user own it? remove it, or set TMPDIR to a folder of your own"
            print(f"elasticrun: {folder} cannot be made: {hint}", file=sys.stderr)
            return int(ExitCode.UNAVAILABLE)
        become_subreaper()
        token_file = write_token_file(folder / _TOKEN, token, fingerprint)
        agent = start_agent(arguments, token_file)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, lambda received, _frame: agent.send_signal(received))
        try:
            say(UP, name, empty)
        except OSError:  # the driver's program has gone, and will be started again
            agent.kill()
        code = agent.wait()
        # What has lost its agent comes to us, and we have no other children.
        asyncio.run(end_all(children, PATIENCE_S))
        sweep_scratch()
    return code if code >= 0 else 128 - code


def _line_of_stdin() -> str:
    return sys.stdin.buffer.readline(MAX_FILE_BYTES).decode("ascii", "replace")


def keep_apart(name: str, arguments: Sequence[str]) -> int:
    """Do `keep` in a process that mpirun does not know of: when mpirun ends, it kills its ranks.

    mpirun's variables for ranks are removed, because nothing below this process is a rank.
    """
    for variable in [v for v in os.environ if v.startswith(OF_A_RANK)]:
        del os.environ[variable]
    keeper = os.fork()
    if keeper == 0:
        os.setsid()
        return keep(name, arguments)
    pidfd = os.pidfd_open(keeper)

    def pass_on(received: int, _frame: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, received)

    for number in (signal.SIGUSR1, signal.SIGUSR2):  # mpirun passes these two on
        signal.signal(number, pass_on)
    _, status = os.waitpid(keeper, 0)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def start_agent(
    arguments: Sequence[str], token_file: Path, cwd: Path | None = None
) -> subprocess.Popen[bytes]:
    """Start an agent that ends with this process, since its stdin is a pipe that only we hold."""
    argv = [sys.executable, "-m", "launcher.agent", *arguments]
    argv += ["--token-file", str(token_file), "--orphan-file", str(token_file)]
    argv += ["--lifeline", "--kept"]
    env = {**os.environ, contract.JOB_MARK: str(token_file)}
    with processes.stdin_for_workers() as given:
        fds = () if given is None else (given,)
        if given is not None:
            env[processes.STDIN_VARIABLE] = str(given)
        return subprocess.Popen(
            argv, cwd=cwd, env=env, stdin=subprocess.PIPE, pass_fds=fds, start_new_session=True
        )


# ---- wait --------------------------------------------------------------------------------


def wait(name: str) -> int:
    """Wait until an agent is gone, or until our stdin ends: then nobody waits for our answer."""

    def leave_with_stdin() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, _MAX_TOKEN):
                pass
        os._exit(int(ExitCode.UNAVAILABLE))

    if holder_of(folder_of(name)) is not None:
        say(UP, name)
    threading.Thread(target=leave_with_stdin, daemon=True).start()
    wait_for_holder(folder_of(name))
    return 0


# ---- end ----------------------------------------------------------------------------------


def end(name: str) -> int:
    """Kill an agent, its keeper and everything below them; return 0 when nothing of it is left."""
    folder = folder_of(name)
    with process_of(folder) as keeper:
        if keeper is not None and not _kill_below(*keeper):
            print(f"elasticrun: process {keeper[0]} could not be killed", file=sys.stderr)
            return int(ExitCode.UNAVAILABLE)
    shutil.rmtree(folder, ignore_errors=True)
    sweep_scratch()
    return 0


def _kill_below(pid: int, pidfd: int) -> bool:
    """Kill a keeper and its descendants; return whether they are gone.

    It is stopped first: it is the reaper of all of them, so that a process that loses its parent
    meanwhile stays below it and is found by the next look.
    """
    deadline = time.monotonic() + PATIENCE_S
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGSTOP)
        keeper = psutil.Process(pid)
        while time.monotonic() < deadline:
            below = keeper.children(recursive=True)
            if all(state_of(process.pid) in ("zombie", "gone") for process in below):
                break
            for process in below:
                send_signal(process, signal.SIGKILL)
            time.sleep(_LOOK_AGAIN_S)
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except (ProcessLookupError, psutil.NoSuchProcess):
        return True
    return bool(select.select([pidfd], [], [], PATIENCE_S)[0])


# ---- look --------------------------------------------------------------------------------


def look(folder: str) -> int:
    """Print the facts that a driver checks before it uses this host, as one JSON object."""
    given = sys.stdin.buffer.read(_MAX_TOKEN)  # to its end: nothing but empty lines
    found = {
        "version": version(),
        "python": platform.python_version(),
        "folder": os.path.isdir(folder),
        "temporary": os.access(tempfile.gettempdir(), os.W_OK),
        "empty": given.count(b"\n"),
    }
    say(LOOKED, json.dumps(found))
    return 0


def _is_heard() -> bool:
    """Return whether what we print can reach the driver; a login file may send it elsewhere."""
    kind = os.fstat(1).st_mode
    return stat.S_ISFIFO(kind) or stat.S_ISSOCK(kind) or os.isatty(1)


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the first argument says, say that it is done, and return the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] in (["keep"], ["apart"], ["look"]) and not _is_heard():
        print("elasticrun: stdout leads elsewhere, so the driver cannot hear us", file=sys.stderr)
        return NO_STDOUT
    status = _carry_out(words)
    say_done("look" if words[:1] == ["look"] else "".join(words[1:2]), status)
    return status


def _carry_out(words: Sequence[str]) -> int:
    match words:
        case ["keep", name, *arguments]:
            return keep(name, arguments)
        case ["apart", name, *arguments]:
            return keep_apart(name, arguments)
        case ["wait", name]:
            return wait(name)
        case ["end", name]:
            return end(name)
        case ["look", folder]:
            return look(folder)
        case _:
            print(__doc__, file=sys.stderr)
            return int(ExitCode.USAGE)


if __name__ == "__main__":
    sys.exit(main())
