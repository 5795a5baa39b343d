"""`@elastic.run`: trains, and goes on in the next world when the world changes or breaks.

The decorated function is called again in each new world, with the state of the last commit. It
ends in two ways: by `HostsUpdatedInterrupt` at a step boundary, when nothing is lost and nothing
rolled back, or by a broken collective, after which the state goes back to the commit. So it does if
SIGTERM has ended processes of the script: those of a loader, or any after this worker has got a
notice itself. Any other exception is the script's own and propagates.

A batch system that ends a job sends SIGTERM to all of its processes, so also to those of loaders,
which die of it. That says nothing about the script. The error of the loop that waits for their data
is taken for a change of the world: the state goes back to the last commit, and the worker goes on
from there with new processes, or leaves if it has to.

torch notices such a death in its handler of SIGCHLD and raises there, wherever the main thread is
at that moment, be it in an optimizer's step or while a checkpoint is written. `watch_loaders` lets
it raise only while the loop waits for data. Otherwise the loader finds out itself, when it needs
that process, within its `MP_STATUS_CHECK_INTERVAL` (5 s).
"""

import functools
import gc
import itertools
import re
import signal
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from multiprocessing import connection
from types import FrameType, TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from torch.utils.data import DataLoader

from elastic_driver.errors import HostsUpdatedInterrupt, SwallowedError
from elastic_driver.failure_causes import in_short
from elastic_driver.words.world import StateVersion, source_of
from elastic_driver.worker import current, torch_seams
from elastic_driver.worker.current import say
from elastic_driver.worker.mistakes.watch import hint, tell_swallowed
from elastic_driver.worker.state import (
    State,
    all_states,
    begin_phase,
    reset_all,
    stop_clocks,
)
from elastic_driver.worker.state_sync.sharing import StateLostError, gather_rows
from elastic_driver.worker.state_sync.values import training_begins, training_ends
from elastic_driver.worker.world import session
from elastic_driver.worker.world.gloo import current_waits, tells_of_loss
from elastic_driver.worker.world.groups import RoundOverError, start_companions, stop_companions
from elastic_driver.worker.world.member import JobMembership
from rendezvous.errors import SealedError

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound=State)

MAX_STATES = 8  # that are made the same besides that of the training function


MAX_EQUAL_BREAKS = 3  # worlds of the same members that break without a step between


_GOES_ON = "the other workers have gone on to training function {}: going there"
NOBODY = -1  # in place of a state
_phases = itertools.count(1)  # the calls of training functions in this process


def run(function: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Return `function(state, ...)` as an elastic training loop that returns its value.

    It joins the job if `elastic.init()` was not called. `function` starts over in every new world:
    it reads the progress of the training from the state, and creates what belongs to one world
    (`elastic.wrap`, loaders) inside.

    Raises the script's own exceptions, and a broken collective where the same members break three
    times without a step between: no peer was lost then.
    """
    return training_loop(function, _join)


def _join(state: State, phase: int) -> bool | None:
    return False if enter(state, phase) else None


def enter(state: State, phase: int) -> bool:
    """Join the job for the training function of this number, unless the others are further.

    Returns False where this process is to skip the function.
    """
    member = session.start()
    member.phase = phase
    if member.group is not None:
        return True
    if phase < (furthest := member.phase_of_others()):
        say(_GOES_ON.format(furthest))
        return False
    member.join("started", state)
    return True


def training_loop(
    function: Callable[Concatenate[S, P], R], join: Callable[[S, int], bool | None]
) -> Callable[Concatenate[S, P], R]:
    """Return `function` as `run` does; `join` joins the first world.

    `join` gets the state and the number of the call. It returns whether the reset callbacks are to
    be called in that world already; None: this process is to skip the function.
    """

    @functools.wraps(function)
    def train(state: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        phase = next(_phases)
        begin_phase(phase)
        rejoined = join(state, phase)
        if rejoined is None:
            return cast("R", None)  # the others have ended this function before
        member = session.start()
        watch_loaders()
        breaks: deque[object] = deque(maxlen=MAX_EQUAL_BREAKS)
        while True:
            try:
                start_companions()
                if rejoined:
                    reset_all()
                with member.exchanging():
                    met = meet(state, phase)
                if not met:
                    return cast("R", None)
                training_begins()
                state._arrange()  # its steps are measured from now on
                try:
                    result = function(state, *args, **kwargs)
                finally:
                    training_ends()
                    stop_clocks()
                state._mark_end()
                return result
            except StateLostError as lost:
                if not current.is_initialized() or current.rank() == 0:
                    say(str(lost))
                raise SystemExit(lost.exit_code) from lost
            except (Exception, SwallowedError) as raised:
                change = _change_of(raised, member, state, breaks)
                if change is None:
                    raise
                reason, broken = change
                clear_frames(raised)
            member.join(reason, state, broken=broken)
            rejoined = True

    return train


def _change_of(
    raised: BaseException, member: JobMembership, state: State, breaks: deque[object]
) -> tuple[str, bool] | None:
    """Return why the world is left, and whether it is broken; None for the script's own errors.

    `breaks`: the last worlds that broke, with the steps they had come to. The error is in no
    variable of a frame that it passes through: it would hold itself, and the state.
    """
    error = _cause(raised)
    why = error
    if isinstance(error, SwallowedError):
        tell_swallowed(error)
        why = error.__cause__ or error
    broken = not isinstance(why, HostsUpdatedInterrupt)
    if broken:
        members = member.world and [m.worker for m in member.world.members]
        breaks.append((members, state.version))
        ended = loaders_were_ended(error)
        if member.has_notice and not broke_the_world(error):
            say(f"the script failed after this worker was told to leave: {describe(error)}")
        elif not (ended or broke_the_world(error)) or breaks.count(breaks[0]) == MAX_EQUAL_BREAKS:
            hint(error, member.progress)
            return None
        if ended:
            forget_loaders(error)
        stop_companions(broken=True)  # it may still write into the state
    return describe(error), broken


def meet(state: State, phase: int) -> bool:
    """Make all states of this process the same on every rank of a new world. Collective.

    `phase` is the number of this call of a training function. Ranks that are in an earlier one than
    others are newcomers: they skip it, and come to the one in which the others wait for them here.
    Returns False where this rank has to skip.
    """
    member = session.start()
    if member.group is None or member.world is None:
        return True
    world = member.world
    if state._round == world.round:
        return True
    while True:
        others = [s for s in all_states() if s is not state and s._round != world.round]
        mine = [state, *others[:MAX_STATES]]
        row = [phase]
        for each in mine:
            row += [each._identity, *each.state_version(), each._is_over]
        row += [NOBODY, 0, 0, 0] * (1 + MAX_STATES - len(mine))
        rows = gather_rows(row, world.size)
        phases = [each[0] for each in rows]
        if phase < max(phases):
            say(_GOES_ON.format(max(phases)))
            return False
        if phase == min(phases):
            break
    # The state of this function comes first, whatever its number: it is that of the others, too.
    versions = [StateVersion(each[2], bool(each[3])) for each in rows]
    state._expect(versions, world.round, leads=True)
    state.sync()
    tables = [{each[at]: each[at + 1 : at + 4] for at in range(1, len(each), 4)} for each in rows]
    for other in mine[1:]:
        found = [table[other._identity] for table in tables if other._identity in table]
        if len(found) == world.size and not all(clean == 0 and over for _, clean, over in found):
            versions = [StateVersion(steps, bool(clean)) for steps, clean, _ in found]
            if source_of(versions) is not None or not any(over for *_, over in found):
                other._expect(versions, world.round, leads=False)
                other.sync()
    for each in mine:
        if each._round == world.round:  # what several of them have was written to again
            each._tree.leaves.note()
    return True


def _cause(error: BaseException) -> BaseException:
    waits = current_waits()
    if waits is None or not isinstance(error, Exception):
        return error
    return waits.cause_of(error)


def broke_the_world(error: BaseException) -> bool:
    """Return whether `error`, or a cause of it, is a collective that lost a peer or a link.

    All others are the script's own.
    """
    return any(
        tells_of_loss(link) or isinstance(link, RoundOverError | SealedError)
        for link in _chain(error, contexts=False)
    )


def describe(error: BaseException) -> str:
    """Return one line for the event log."""
    text = str(error).strip().partition("\n")[0]
    if isinstance(error, HostsUpdatedInterrupt) and text:
        return text
    if tells_of_loss(error):
        return f"a collective broke: {in_short(text) or type(error).__name__}"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def clear_frames(error: BaseException) -> None:
    """Clear the frames that an exception holds, so that wrappers and loader processes end now.

    Frames still running keep their variables.
    """
    for link in _chain(error, contexts=True):
        traceback.clear_frames(link.__traceback__)


def _chain(error: BaseException, *, contexts: bool) -> Iterator[BaseException]:
    """Yield `error` and its causes, and with `contexts` the exceptions it was raised during."""
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        link = pending.pop()
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        pending += [link.__cause__, link.__context__ if contexts else None]


# ---- processes of loaders that SIGTERM has ended ---------------------------------------

_KILLED = re.compile(r"DataLoader worker \(pid \d+\) is killed by signal: ([^.]*)\.")
_OF_DATA_SET = re.compile(r"Caught \w+ in DataLoader worker process")
ENDS_S = 1.0  # for a process to end whose connection has broken off
_LOADERS = torch_seams.IteratorWithProcesses.__module__
_WAIT = torch_seams.code_of_wait()
_TERM = signal.strsignal(signal.SIGTERM)


def watch_loaders() -> None:
    """Let torch's handler raise for a process that SIGTERM has ended only where that is safe."""
    check = torch_seams.check_of_ends()
    if check is not None and check.__name__ != _guarded.__name__:
        torch_seams.replace_check_of_ends(_guarded(check))


def _guarded(check: Callable[[], None]) -> Callable[[], None]:
    def check_loaders() -> None:
        try:
            check()
        except RuntimeError as error:
            if not _says_so(error) or _waits_for_data(sys._getframe(1)):
                raise

    check_loaders.__name__ = _guarded.__name__
    return check_loaders


def _says_so(error: BaseException) -> bool:
    found = _KILLED.match(str(error))
    return found is not None and found[1] == _TERM


def _waits_for_data(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code is _WAIT:
            return True
        frame = frame.f_back
    return False


def loaders_were_ended(error: BaseException) -> bool:
    """Return whether a loop has failed because SIGTERM has ended processes of its loader.

    The loop may see that only by a connection that breaks off, while the process is about to end.
    An error of the data set, which torch raises again here, is the script's own.
    """
    if _says_so(error):
        return True
    if _OF_DATA_SET.match(str(error)):
        return False
    ended = set[int | None]()
    for iterator in _iterators(error.__traceback__):
        by_sentinel = {process.sentinel: process for process in torch_seams.processes_of(iterator)}
        for sentinel in connection.wait(by_sentinel, ENDS_S):
            by_sentinel[sentinel].join(ENDS_S)  # the sentinel comes a little before the status
        ended |= {process.exitcode for process in torch_seams.processes_of(iterator)}
    return ended - {None, 0} == {-signal.SIGTERM}


def forget_loaders(error: BaseException) -> None:
    """Let a loader with `persistent_workers` begin anew; else it would fail again."""
    broken = list(_iterators(error.__traceback__))
    for found in gc.get_objects():
        # Not `isinstance`: proxies of other libraries act when their `__class__` is asked for.
        is_loader = issubclass(type(found), DataLoader)
        if is_loader and any(torch_seams.kept_iterator(found) is each for each in broken):
            torch_seams.drop_iterator(found)


def _iterators(trace: TracebackType | None) -> Iterator[Any]:
    while trace is not None:
        # Of torch's frames alone: the dictionary that is asked for would keep what a script holds.
        if trace.tb_frame.f_globals.get("__name__") == _LOADERS:
            owner = trace.tb_frame.f_locals.get("self")
            if isinstance(owner, torch_seams.IteratorWithProcesses):
                yield owner
        trace = trace.tb_next
