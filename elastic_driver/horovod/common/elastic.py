"""Horovod's elastic API on our rounds: states, and `run`, which trains in each world.

A survivor of a change keeps its process. `restore()` goes back to exactly the last `commit()`,
because each commit copies the tensors, too, into memory that it keeps.

A script derives classes of its own from Horovod's states, with attributes of any name, and replaces
methods. So its object is an ordinary one (`State`), and what the driver's worlds need is an object
beside it (`Kept`). That calls the methods of the script where Horovod does, and does its own part
in any case.
"""

import functools
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from queue import Queue
from typing import Any, ClassVar, Concatenate, ParamSpec, TypeVar
from zlib import crc32

from elastic_driver.errors import HostsUpdatedInterrupt, UsageError
from elastic_driver.horovod.common import basics
from elastic_driver.horovod.common.exceptions import NotInYetError
from elastic_driver.words.world import source_of
from elastic_driver.worker import current, state
from elastic_driver.worker.current import say
from elastic_driver.worker.heartbeat.training_progress import AT_ONCE, NEVER
from elastic_driver.worker.positions import Advancing
from elastic_driver.worker.run import enter, training_loop
from elastic_driver.worker.state_sync.sharing import Agreement
from elastic_driver.worker.world import session

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")
_KEPT = "_kept_by_elastic_driver"  # the one name of a state that is not Horovod's


class HostUpdateResult:
    """The kinds of changes that `on_hosts_updated` gets, with Horovod's numbers."""

    no_update = 0
    removed = 1
    added = 2
    mixed = 3


def announce_change() -> None:
    """Tell all states of the script that the world changes after a step that is named."""
    now = time.time()
    for each in state.all_states():
        if isinstance(each, Kept) and each._owner() is not None:
            each.announce(now, HostUpdateResult.mixed)


class Kept(state.State):
    """The attributes that a state of Horovod's kind was given, and its part in the worlds.

    Args:
        owner: the script's object.
    """

    def __init__(self, owner: "State") -> None:
        self._owner = weakref.ref(owner)
        self._calls: dict[str, bool] = {}  # a method of the script that runs → it has called ours
        self._is_saving = False  # by a call of the script
        self._announces = False  # see below
        self._source = 0  # the rank with the newest state, while a world begins
        self._elsewhere: set[str] = set()  # values that are attributes or properties of the owner
        super().__init__(snapshot=True)

    @property
    def owner(self) -> "State":
        """The script's object."""
        owner = self._owner()
        assert owner is not None  # noqa: S101 - it holds this object
        return owner

    # ---- values --------------------------------------------------------------------------

    def hold(self, values: Mapping[str, Any], *, snapshot: bool) -> None:
        """Keep these values from now on; see `ObjectState`."""
        owner = self.owner
        self._tree.leaves.copy_all = snapshot
        for name, value in values.items():
            self._take_in(owner, name, value)
        self._identity = self._number << 32 | crc32(",".join(values).encode())
        self._arrange()
        owner._saved_state = dict(values)
        super().save()

    def _take_in(self, owner: "State", name: str, value: Any) -> None:
        owner.__dict__.pop(name, None)
        if hasattr(type(owner), name):  # a property, or a value of the class
            self._elsewhere.add(name)
            setattr(owner, name, value)
            value = getattr(owner, name)
        self._values[name] = value

    def holds(self, name: str) -> bool:
        """Return whether a name is that of a value here."""
        return name in self._values and name not in self._elsewhere

    def value(self, name: str) -> Any:
        """Return a value; raises `KeyError`."""
        return self._values[name]

    def put(self, name: str, value: Any) -> None:
        """Set a value that is held here."""
        before = self._values.get(name)
        self._values[name] = value
        if before is not value and (hasattr(value, "state_dict") or hasattr(before, "state_dict")):
            self._arrange()

    def drop(self, name: str) -> None:
        """Hold a value no more."""
        del self._values[name]
        self.owner._saved_state.pop(name, None)
        self._arrange()

    def _read_owner(self) -> None:
        """Take the values that are the owner's, and those that the script has added."""
        owner = self.owner
        for name in self._elsewhere:
            self._values[name] = getattr(owner, name)
        for name in [name for name in owner._saved_state if name not in self._values]:
            self._take_in(owner, name, getattr(owner, name))

    def _write_owner(self) -> None:
        for name in self._elsewhere:
            setattr(self.owner, name, self._values[name])

    # ---- what the script may replace -----------------------------------------------------

    def _through(self, method: str, ours: Callable[[], None]) -> None:
        """Call a method of the script, and do our part if it has not called ours."""
        self._calls[method] = False
        try:
            getattr(self.owner, method)()
        finally:
            called = self._calls.pop(method)
        if not called:
            ours()

    def save(self) -> None:
        """Let the script save: a commit calls this."""
        if self._is_saving:
            self._keep_values()
        else:
            self._through("save", self._keep_values)

    def saved_by_owner(self) -> None:
        """Keep the values. A call of the script itself counts as a commit that stays here."""
        if "save" in self._calls:
            self._calls["save"] = True
            self._keep_values()
        elif self._last.version == state.UNTRAINED or not session.is_in_job():
            self._keep_values()
        else:
            self._is_saving = True
            try:
                self._commit()
            finally:
                self._is_saving = False

    def _keep_values(self) -> None:
        self._read_owner()
        super().save()
        self.owner._saved_state = dict(self._values)

    def restore(self) -> None:
        """Let the script go back to its last commit."""
        self._through("restore", self._put_back)

    def restored_by_owner(self) -> None:
        """Put the values of the last commit back."""
        if "restore" in self._calls:
            self._calls["restore"] = True
        self._put_back()

    def _put_back(self) -> None:
        super().restore()
        self._write_owner()

    def sync(self) -> None:
        """Let the script make this state the same on all ranks: a world begins."""
        met = self._met
        self._source = (source_of(met[1]) or 0) if met is not None else 0
        try:
            self._through("sync", self._make_equal)
        finally:
            self._source = 0

    def synced_by_owner(self) -> None:
        """Make the values the same on all ranks. Collective."""
        if "sync" in self._calls:
            self._calls["sync"] = True
        self._make_equal()

    def _make_equal(self) -> None:
        member = session.membership()
        if member is None or member.world is None:
            raise NotInYetError("state.sync() needs a world; call hvd.init() first")
        world = member.world
        self._read_owner()
        if session.is_in_job() and world.round != self._round:
            super().sync()
            self._progress.on_planned = announce_change
            if self._progress.leave_after not in (NEVER, AT_ONCE):
                announce_change()
        else:
            others = frozenset(range(1, world.size))
            self._carry_out(Agreement(0, others, max(self._last.version, 0), fresh=True), world)
        self._write_owner()
        self.owner._saved_state = dict(self._values)

    def on_reset(self) -> None:
        """Reset positions, and let the script adapt itself: the world has changed."""
        for position in self._all(Advancing):
            position.reset()
        self.owner.on_reset()

    # ---- messages ------------------------------------------------------------------------

    @property
    def newest(self) -> int:
        """The rank that has the newest state, while a world begins; else 0."""
        return self._source

    @property
    def announces(self) -> bool:
        """True while the script is told of a change that is followed anyway."""
        return self._announces

    def announce(self, timestamp: float, change: int) -> None:
        """Tell the script of a change that the driver has planned; it is followed anyway."""
        self._announces = True
        try:
            self.owner.on_hosts_updated(timestamp, change)
        except Exception as error:  # of any kind: the heartbeats of this thread must go on
            say(f"on_hosts_updated() of {type(self.owner).__name__} has failed: {error!r}")
        finally:
            self._announces = False

    @property
    def leave_after(self) -> int:
        """The boundary after which this round is to be left."""
        return self._progress.leave_after

    def leave_at_next(self, boundary: int) -> None:
        """Leave this round at the next commit or check after this boundary."""
        self._progress.leave_after = boundary


class _Framework:
    """The mutable field of this module: `broadcast_object` of the framework that is used."""

    broadcast_object: Callable[..., Any] | None = None


def broadcast_with(broadcast_object: Callable[..., Any]) -> None:
    """Use this function for states that were given none."""
    _Framework.broadcast_object = staticmethod(broadcast_object)


class _HostMessages(Queue[tuple[float, int]]):
    """Answers whether the driver has announced a change that this process has not followed yet.

    A script that asks stands still until there is one, and expects that its next commit follows
    it. The step that the driver has named lies further ahead: it counts on ranks that train. The
    others cannot finish a step without this rank, so they go on from the same commit.
    """

    def __init__(self, kept: Kept) -> None:
        super().__init__()
        self._kept = kept

    def empty(self) -> bool:
        """Return whether no change is announced."""
        if self._kept.leave_after == NEVER:
            return super().empty()
        self._kept.leave_at_next(AT_ONCE)
        return False


class _FromNewest:
    """`bcast_object` of a state: while a world begins, it sends what the newest state has.

    Horovod sends from rank 0 what another rank may have trained further.
    """

    def __init__(self, kept: Kept, bcast_object: Callable[..., Any] | None) -> None:
        self._kept, self._given = kept, bcast_object

    def __call__(self, obj: Any, root_rank: int = 0, *args: Any, **kwargs: Any) -> Any:
        root = root_rank or self._kept.newest
        broadcast = self._given or _Framework.broadcast_object
        if broadcast is None:
            raise UsageError("State(bcast_object=…) is needed: hvd.broadcast_object")
        if root or args or kwargs:
            return broadcast(obj, root, *args, **kwargs)
        return broadcast(obj)


def kept_of(owner: "State") -> Kept:
    """Return what the workers hold of a state."""
    found = owner.__dict__.get(_KEPT)
    if found is None:  # before `__init__`: a class of the script may have attributes first
        found = owner._kind_of_kept(owner)
        object.__setattr__(owner, _KEPT, found)
    return found


class State:
    """The base of Horovod's states: a script derives its own, with `save`, `restore` and `sync`.

    An attribute of any name is the script's own, and travels only if `sync` sends it. Changes of
    the hosts are followed all the same.

    Args:
        bcast_object: of rank 0 to all; `_bcast_object` is this one, from the rank with the newest
            commit where a world begins. None: `hvd.broadcast_object`.
        get_rank: None: `hvd.rank`.
    """

    _kind_of_kept: ClassVar[type[Kept]] = Kept

    def __init__(
        self,
        bcast_object: Callable[..., Any] | None = None,
        get_rank: Callable[[], int] | None = None,
    ) -> None:
        kept = kept_of(self)
        self._bcast_object = _FromNewest(kept, bcast_object)
        self._rank = get_rank or current.rank
        self._host_messages = _HostMessages(kept)
        self._last_updated_timestamp: float = 0
        self._reset_callbacks: list[Callable[[], None]] = []
        self.__dict__.setdefault("_saved_state", {})

    # ---- called by users ------------------------------------------------------------------

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Call these, in order, after every change of the world."""
        self._reset_callbacks.extend(callbacks)

    def commit(self) -> None:
        """Save; raise `HostsUpdatedInterrupt`, on all ranks, when the world is about to change."""
        kept_of(self).commit()
        self._raise_if_told()

    def check_host_updates(self) -> None:
        """Commit, and raise `HostsUpdatedInterrupt`, if the world changes now; else do nothing.

        Sends no message. Every rank has to call it at the same places.
        """
        kept_of(self).check_host_updates()
        self._raise_if_told()

    def _raise_if_told(self) -> None:
        """Raise `HostsUpdatedInterrupt` for a change that the script itself has announced."""
        before, seen = self._last_updated_timestamp, HostUpdateResult.no_update
        while self._host_messages.qsize():
            timestamp, result = self._host_messages.get()
            self._last_updated_timestamp = max(self._last_updated_timestamp, timestamp)
            seen |= result
        if self._last_updated_timestamp > before:
            removed = seen == HostUpdateResult.removed
            raise HostsUpdatedInterrupt("on_hosts_updated() was called", skip_sync=removed)

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Have the next commit or check raise `HostsUpdatedInterrupt`.

        The driver calls it, too, on all ranks, when it has planned a change. A class of the script
        may do more here, in another thread. That change is followed at the boundary that the driver
        has named, whatever this method does.
        """
        if not kept_of(self).announces:
            self._host_messages.put((timestamp, update_res))

    def local(self, *names: str) -> None:
        """Leave attributes out of the comparison between ranks; see `elastic.State.local`."""
        kept_of(self).local(*names)

    # ---- for classes of the script ---------------------------------------------------------

    def save(self) -> None:
        """Keep what `restore` puts back."""
        kept_of(self).saved_by_owner()

    def restore(self) -> None:
        """Go back to the last commit."""
        kept_of(self).restored_by_owner()

    def sync(self) -> None:
        """Make this state the same on every rank.

        In a new world of a running job the newest commit is sent. Any other call sends the state
        of rank 0, as Horovod does. Collective.
        """
        kept_of(self).synced_by_owner()

    def reset(self) -> None:
        """Do nothing; a script's own state may adapt itself here to a new world."""

    def on_reset(self) -> None:
        """Call `reset` and the callbacks: the world has changed."""
        self._host_messages = _HostMessages(kept_of(self))
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    # ---- attributes ----------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        kept = self.__dict__.get(_KEPT)
        if kept is not None and kept.holds(name):
            return kept.value(name)
        raise AttributeError(f"the state {type(self).__name__} has no {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        kept = self.__dict__.get(_KEPT)
        if kept is not None and kept.holds(name):
            kept.put(name, value)
        else:
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        kept = self.__dict__.get(_KEPT)
        if kept is not None and kept.holds(name):
            kept.drop(name)
        else:
            super().__delattr__(name)


_METHODS = frozenset(
    name for name in vars(State) if callable(getattr(State, name)) and name != "local"
)


class ObjectState(State):
    """Plain values by name: each keyword argument becomes an attribute, which is copied.

    Attributes that are set later are the script's own, as in Horovod: no commit keeps them.

    Args:
        bcast_object: as for `State`.
        get_rank: as for `State`.
        snapshot: copy all tensors at each commit; False makes a commit free, and `restore()`
            leaves tensors that a step has changed to the next `sync()`.
        attributes: the values and objects to keep.

    Raises `UsageError` for an attribute that is named like a method of `State`.
    """

    def __init__(
        self,
        bcast_object: Callable[..., Any] | None = None,
        get_rank: Callable[[], int] | None = None,
        *,
        snapshot: bool = True,
        **attributes: Any,
    ) -> None:
        for name in attributes:
            if name in _METHODS:
                raise UsageError(f"a state has a method {name!r}; choose another name")
        super().__init__(bcast_object, get_rank)
        kept_of(self).hold(attributes, snapshot=snapshot)


def run(func: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Return `func(state, ...)` as a loop that goes on when the world changes or breaks.

    A newcomer joins the job here, not in `hvd.init()`. If its rank or the size of the world are
    not those that `hvd.init()` has told, its reset callbacks run before the function.
    """

    @functools.wraps(func)
    def train(state_: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        def of_owner(_kept: state.State, /, *args: P.args, **kwargs: P.kwargs) -> R:
            return func(state_, *args, **kwargs)

        return training_loop(of_owner, _join)(_held(state_), *args, **kwargs)

    return train


def run_fn(
    func: Callable[Concatenate[S, P], R], _reset: Callable[[], None], /
) -> Callable[Concatenate[S, P], R]:
    """Return `run(func)`; Horovod's `reset` forms the next world, which is done here already."""
    return run(func)


def _held(given: object) -> state.State:
    if isinstance(given, state.State):
        return given
    if isinstance(given, State):
        return kept_of(given)
    raise UsageError(
        f"hvd.elastic.run() needs a state as its first argument, not a {type(given).__name__}"
    )


def _join(kept: state.State, phase: int) -> bool | None:
    """Join the job; return whether this process has another place than it was told before.

    None: the other workers are in a later training function.
    """
    told = (current.rank(), current.size()) if basics.is_initialized() else None
    basics.enter_job()
    if not enter(kept, phase):
        return None
    return told is not None and told != (current.rank(), current.size())
