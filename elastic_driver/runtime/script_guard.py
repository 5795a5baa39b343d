"""Runs a user's program, and leaves no process of it: `python -I -S script_guard.py FD PROGRAM …`.

`runtime.probe` starts this file as a process of its own, without the package: it has to start fast.
The process is the reaper of everything that the program starts (its parent has made it a child
subreaper). When the program has exited, or its own stdin ends, which also shows the death of the
driver, it kills and reaps whatever is left, helpers in sessions of their own included. Then it
writes `exit STATUS` (as `os.waitstatus_to_exitcode` gives it) or `error ERRNO` to the descriptor
FD.
"""

import os
import select
import signal
import sys
import time

REAP_S = 1.0  # a killed process is gone in milliseconds, unless the kernel holds it
_LOOK_AGAIN_S = 0.001


def main(report: int, argv: list[str]) -> None:
    """Run the program to its end and report it."""
    os.set_inheritable(report, False)
    program = os.fork()
    if program == 0:
        _become(argv, report)
    ended = os.pidfd_open(program)
    select.select([0, ended], [], [])
    status = end_all(program)
    os.write(report, f"exit {status}".encode())


def _become(argv: list[str], report: int) -> None:
    """Become the program; report the error if that is impossible."""
    try:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and ignored it stays
        os.execv(argv[0], argv)  # noqa: S606 - a user's program, without a shell
    except OSError as error:
        os.write(report, f"error {error.errno} ".encode())
    finally:
        os._exit(127)


def end_all(program: int) -> int:
    """Kill and reap all descendants; return the program's exit status."""
    deadline = time.monotonic() + REAP_S
    found = -signal.SIGKILL
    while True:
        for child in _children():  # unreaped, so that their numbers are still theirs
            _kill(child)
        try:
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == program:
                    found = os.waitstatus_to_exitcode(ended[1])
        except ChildProcessError:
            return found
        if time.monotonic() > deadline:
            return found
        time.sleep(_LOOK_AGAIN_S)


def _children() -> list[int]:
    own = os.getpid()
    try:
        with open(f"/proc/self/task/{own}/children", encoding="ascii") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:  # a kernel without these lists
        return [
            int(name) for name in os.listdir("/proc") if name.isdigit() and _parent(name) == own
        ]


def _parent(pid: str) -> int:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return int(file.read().rpartition(")")[2].split()[1])
    except OSError:  # it has ended
        return 0


def _kill(child: int) -> None:
    try:  # noqa: SIM105 - one import less, so that it starts fast
        os.kill(child, signal.SIGKILL)
    except OSError:  # it has another user's rights
        pass


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
