"""The edge of our commands: errors become a line and an exit status, signals are handled.

Only a bug in our code shows a traceback. `launcher.cli` and `launcher.ctl` call `run_command`.

`rendezvous` and `elastic_driver` are names that a user's files may have too. Python looks into the
current folder (with `-m`), the script's folder and PYTHONPATH first, and would import such a file
in place of our package. `run_command` protects this process; `find_shadow` lets the launcher refuse
a job whose workers would import the wrong file. A user's `launcher.py` is no problem: no worker
imports ours.
"""

import contextlib
import errno
import importlib.util
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from typing import ClassVar

ROOT = Path(__file__).resolve().parent.parent
_PR_SET_DUMPABLE = 4
_M_MMAP_THRESHOLD = -3
_LARGE = 1 << 20
NAMES = ("elastic_driver", "rendezvous")
TO_LEAVE = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)  # sent to all processes, and again
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO)


class _Process:
    """The mutable field of this module."""

    is_command = False  # it ends with the command; it is no program that calls us
    over: ClassVar[set[int]] = set()  # signals that are ignored now, as the command ends


def run_command(name: str, act: Callable[[], int], *, ends: bool = False) -> int:
    """Call `act`, the body of the command `name`; return the exit status.

    `ends`: this process does nothing after the command but end with that status.
    """
    _Process.is_command = ends
    open_streams()
    _pin_packages()
    from elastic_driver.errors import ElasticError, ExitCode  # noqa: PLC0415 - now ours is found
    from elastic_driver.words import printable  # noqa: PLC0415

    try:
        status = act()
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:  # before a job has begun; a running one has its own handlers
        return int(ExitCode.INTERRUPTED)
    except BrokenPipeError:  # the reader of our output (`elasticrun --help | head`) has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except ElasticError as error:
        print(f"{name}: {printable(str(error))}", file=sys.stderr)
        return int(error.exit_code)
    except OSError as error:
        if error.filename is not None or error.errno not in _FULL:
            return _bug(name)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(f"{name}: cannot write to stdout: {error.strerror}", file=sys.stderr)
        return int(ExitCode.UNAVAILABLE)
    except Exception:
        return _bug(name)
    finally:
        _Process.is_command = False


def _bug(name: str) -> int:
    """Show the error that is handled now as a bug of ours; return the exit status."""
    from elastic_driver.errors import ExitCode  # noqa: PLC0415 - see `run_command`

    bug = f"this is a bug of {name}, not of your script; please report it with the lines above"
    traceback.print_exc()
    print(f"{name}: {bug}", file=sys.stderr)
    return int(ExitCode.BUG)


def _pin_packages() -> None:
    """Load our packages from the folder of this file, so that later imports find ours.

    Only the packages are loaded now, which is fast; Python finds their modules through them.
    """
    for name in NAMES:
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is not None and Path(file).resolve().parent.parent == ROOT:
            continue
        spec = PathFinder.find_spec(name, [str(ROOT)])
        if spec is None or spec.loader is None:
            raise ImportError(f"the installation at {ROOT} is incomplete: no package {name}")
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


def open_streams() -> None:
    """Open /dev/null in place of each standard stream that was closed (`2>&-`, some services).

    The next file that is opened would get its number, and the lines of workers.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            os.set_inheritable(number, True)
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False, errors="backslashreplace")


def refuse_bytes(what: str, text: str) -> None:
    """Raise UsageError for a text from the system that is not UTF-8 (`what` names it)."""
    from elastic_driver.errors import UsageError  # noqa: PLC0415 - see `run_command`

    try:
        text.encode()
    except UnicodeEncodeError:
        shown = text.encode(errors="surrogateescape").decode(errors="backslashreplace")
        hint = "rename it, or have the script read it from a file"
        raise UsageError(f"{what} is not UTF-8 text: {shown}; {hint}") from None


def keep_memory_private() -> None:
    """Forbid core dumps of this process, which knows a token; programs that it starts may dump."""
    import ctypes  # noqa: PLC0415 - not for --help

    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def give_memory_back() -> None:
    """Let the system have the memory of a large message as soon as it is freed.

    By default glibc raises the size above which memory is given back at once, and the driver would
    keep tens of MiB after a burst of large requests. Does nothing with another C library.
    """
    import ctypes  # noqa: PLC0415 - not for --help

    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE)


def find_shadow(folders: Iterable[Path]) -> Path | None:
    """Return the first file in these folders that Python would import in place of our packages."""
    for folder in folders:
        if folder.resolve() == ROOT:
            return None  # ours is found here, before anything in a later folder
        for name in NAMES:
            if (folder / name / "__init__.py").is_file():
                return folder / name
            if (folder / f"{name}.py").is_file():
                return folder / f"{name}.py"
    return None


@contextlib.contextmanager
def handled(numbers: Iterable[signal.Signals], handler: Callable[[int], None]) -> Iterator[None]:
    """Call `handler` with each of these signals, in the main thread, while the context is open.

    A signal that is ignored stays ignored: `nohup elasticrun …` must survive its terminal. In
    another thread (`elasticrun()` in a program of a user's) signals are left to that program. A
    process that ends with its command does so with the command's status, also if it is told to
    leave, or interrupted again, at that moment.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    over = _Process.over
    heard = set[int]()
    ours = [n for n in numbers if n in over or signal.getsignal(n) is not signal.SIG_IGN]

    def act(number: int, _frame: object) -> None:
        heard.add(number)
        handler(number)

    before = {number: signal.signal(number, act) for number in ours}
    try:
        yield
    finally:
        for number, former in before.items():
            again = number in TO_LEAVE or number in heard
            ends = again and _Process.is_command
            signal.signal(number, signal.SIG_IGN if ends else former)
            over.update([number] if ends else ())
