"""What the workers of a job hold of one state of Horovod's kind.

A script derives classes of its own from Horovod's states, with attributes of any name, and replaces
methods. So its object is an ordinary one, and what the driver's worlds need is an object beside it.
That calls the methods of the script where Horovod does, and does its own part in any case.
"""

import time
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any
from zlib import crc32

from elastic_driver.horovod.common.exceptions import NotInYetError
from elastic_driver.words.world import source_of
from elastic_driver.worker import state
from elastic_driver.worker.current import say
from elastic_driver.worker.heartbeat.progress import AT_ONCE, NEVER
from elastic_driver.worker.positions import Advancing
from elastic_driver.worker.state_sync.sharing import Agreement
from elastic_driver.worker.world import session

if TYPE_CHECKING:
    from elastic_driver.horovod.common.elastic import State


MIXED = 3  # Horovod's number of a change by which hosts may come and go


def announce_change() -> None:
    """Tell all states of the script that the world changes after a step that is named."""
    now = time.time()
    for each in state.all_states():
        if isinstance(each, Kept) and each._owner() is not None:
            each.announce(now, MIXED)


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
        """Whether the script is being told of a change that is followed anyway."""
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
