"""Marks of a state: short digests by which the driver compares what the ranks hold.

A mark is made right after a commit, of every leaf that the ranks are to have alike, at the same
commits on every rank: the second of a round, the fourth, eighth and sixteenth, and then each so
many that the marks take at most a thousandth of the training time, but for the first few
milliseconds of them in a round. This number is a power of two, so ranks that choose different ones
have commits in common. The marks travel with the heartbeats.
Where they differ, the driver asks for the leaves of a mark, and names the first one that differs.

When a script ends, its last commit is marked as well, and the leaves of that mark go along in
short: nobody can be asked then. What has changed since that commit is no part of it.
"""

import os
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any

from torch import Tensor

from elastic_driver import contract
from elastic_driver.words import counted
from elastic_driver.words.progress import BUFFERS_DIGEST_CHARS, BUFFERS_OF, MAX_BUFFERS
from elastic_driver.worker.heartbeat.training_progress import Leaf, TrainingProgress, usual_pause
from elastic_driver.worker.state_sync.contents import UnkeptError, contents
from elastic_driver.worker.state_sync.message import Reader
from elastic_driver.worker.state_sync.tree import Tree

FIRST = (2, 4, 8, 16)  # commits of a round
SHARE = 0.0006  # of the training time
EARLY_S = 0.005  # of marks in a round that may take more than this share: each `EARLY`th commit
EARLY = 16
LONGEST = 1 << 20  # commits between two marks
MARKS_IN_A_PAUSE = 8  # of heartbeats, at most
LAST_S = 0.05  # that the last mark may take, however short the training was
KEPT = 4  # marks whose leaves are kept, for the driver's question
LARGEST = 4096  # bytes of a value whose text is kept
_TEXT = 120  # characters of a value that are shown
Compared = tuple[Tree, frozenset[str]]  # a state, and the names that are left out


class Marks:
    """Makes the marks of one state."""

    def __init__(self) -> None:
        self._progress: TrainingProgress | None = None  # of the membership
        self._kept: OrderedDict[int, list[tuple[str, str, Any]]] = OrderedDict()
        self._every = LONGEST
        self._cost = 0.0  # seconds of the last mark
        self._spent = 0.0  # seconds of the marks of this round, but for the `FIRST`
        self._commits = 0  # in this round
        self._due = min(FIRST)  # the commit of the next mark
        self._began = time.monotonic()

    def enter(self, progress: TrainingProgress, size: int) -> None:
        """Begin a round of so many workers; alone, a rank is compared with nobody."""
        wanted = size > 1 and os.environ.get(contract.VERIFY_STATE) != "0"
        self._progress = progress if wanted else None
        self._commits = 0
        self._due = min(FIRST)
        self._spent = 0.0
        self._kept.clear()
        progress.leaves = self.leaves

    def mark_if_due(self, step: int, states: Callable[[], Sequence[Compared]]) -> None:
        """Make a mark of a committed step where one is due; `states` are those to compare."""
        self._commits += 1
        progress = self._progress
        if self._commits < self._due or progress is None:
            return
        began = time.perf_counter()
        marked = states()
        buffers = [leaf for tree, local in marked for leaf in _buffers_of(tree, local)]
        found = [leaf for tree, local in marked for leaf in _leaves_of(tree, local)]
        self._mark(step, found, buffers[:MAX_BUFFERS])
        self._choose(time.perf_counter() - began, progress)
        count, every = self._commits, self._every
        self._due = min((n for n in FIRST if n > count), default=count - count % every + every)

    def end(self, step: int, states: Callable[[], Sequence[Compared]]) -> None:
        """Mark the last commit of a script, as far as that is still known and takes no time."""
        progress = self._progress
        if progress is None or not self._commits or step in dict(progress.marks):
            return
        if self._cost > max(LAST_S, SHARE * (time.monotonic() - self._began)):
            return
        ((tree, local), *others) = states()
        if not others and tree.is_clean():  # several states are not committed at one moment
            self._mark(step, _leaves_of(tree, local, as_committed=True))

    def _mark(
        self,
        step: int,
        found: list[tuple[str, str, Any]],
        buffers: Sequence[tuple[str, str, Any]] = (),
    ) -> None:
        assert self._progress is not None  # noqa: S101 - the callers have looked
        root = blake2b(digest_size=8)
        for name, digest, _ in sorted(found, key=lambda leaf: leaf[:2]):  # in any order, as leaves
            root.update(name.encode(errors="replace"))
            root.update(digest.encode())
        self._kept[step] = [*found, *buffers]
        while len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        self._progress.record_mark(step, root.hexdigest(), "".join(each[1] for each in buffers))

    def _choose(self, cost: float, progress: TrainingProgress) -> None:
        """Choose the commits from one mark to the next, by what marks and steps take."""
        self._cost = cost if not self._cost else min(cost, 2 * self._cost)
        times = sorted(progress.step_times)
        usual = times[len(times) // 2] if times else 0.0
        pause = usual_pause(progress.size)  # a heartbeat carries the newest marks only
        self._spent += self._cost if self._commits > max(FIRST) else 0.0
        least = EARLY if self._spent < EARLY_S else LONGEST  # whatever its share
        every = 2
        while every < LONGEST and (
            (every < least and every * usual * SHARE < self._cost)
            or every * usual * MARKS_IN_A_PAUSE < pause
        ):
            every *= 2
        self._every = every

    def leaves(self, step: int) -> list[Leaf] | None:
        """Return the leaves of a mark, for the heartbeat thread; None where they are gone."""
        found = self._kept.get(step)
        if found is None:
            return None
        return [(name, digest, _text(value)) for name, digest, value in found]


def _leaves_of(
    tree: Tree, local: frozenset[str], *, as_committed: bool = False
) -> list[tuple[str, str, Any]]:
    """Return name, digest and what to show of each leaf."""
    small, large = tree.compared(local, as_committed=as_committed)
    tensors: list[Tensor] = []
    rows: list[tuple[str, bytes, int]] = []
    for name, value in small:
        try:
            data, inside = tree.digest_input(value, name)
        except UnkeptError:  # what is refused at the next commit
            continue
        rows.append((name, data, len(inside)))
        tensors += inside
    numbers = contents([*tensors, *(tensor for _, tensor in large)])
    found: list[tuple[str, str, Any]] = []
    at = 0
    for name, data, count in rows:
        own = numbers[at : at + count]
        at += count
        digest = blake2b(data + repr(own).encode(), digest_size=6).hexdigest()
        found.append((name, digest, data if len(data) <= LARGEST else f"{len(data)} bytes"))
    for (name, tensor), number in zip(large, numbers[at:], strict=True):
        digest = f"{number:08x}"
        shown = tensor.tolist() if tensor.numel() == 1 and tensor.device.type == "cpu" else tensor
        found.append((name, digest, _shape(tensor) if shown is tensor else shown))
    return found


def _buffers_of(tree: Tree, local: frozenset[str]) -> list[tuple[str, str, Any]]:
    """Return name, digest and what to show of the groups of buffers that ranks may have apart."""
    groups = tree.unsure_buffers(local)
    numbers = contents([tensor for _, buffers in groups for tensor in buffers])
    found, at = [], 0
    for name, buffers in groups:
        own = numbers[at : at + len(buffers)]
        at = at + len(buffers)
        digest = f"{zlib.crc32(repr(own).encode()):0{BUFFERS_DIGEST_CHARS}x}"
        found.append((f"{BUFFERS_OF}{name!r}", digest, counted(len(own), "tensor")))
    return found


def _shape(tensor: Tensor) -> str:
    kind = str(tensor.dtype).removeprefix("torch.")
    return f"{kind}{list(tensor.shape)}"


def _text(shown: Any) -> str:
    """Return what was kept of a leaf as text for people."""
    if isinstance(shown, bytes):
        import msgspec  # noqa: PLC0415 - only when the driver asks

        shown = _plainly(msgspec.msgpack.decode(shown))
    text = shown if isinstance(shown, str) else repr(shown)
    return text if len(text) <= _TEXT else f"{text[: _TEXT - 1]}…"


_NAMED = {"tensor": "a tensor", "array": "an array", "random": "a random generator"}


def _plainly(data: Any) -> Any:
    """Return tagged data without its tags, as far as that is short to say."""
    if type(data) is not list or not data:
        return data
    tag, *rest = data
    if tag in ("list", "tuple", "set", "frozenset", "deque", "Size"):
        return [_plainly(item) for item in rest[-1]]
    if tag in ("dict", "OrderedDict", "defaultdict", "Counter", "Namespace", "SimpleNamespace"):
        items = rest[-1]
        half = len(items) // 2
        keys = [_plainly(key) for key in items[:half]]
        return dict(zip(map(str, keys), map(_plainly, items[half:]), strict=True))
    if tag in _NAMED:
        return _NAMED[tag]
    if tag == "scalar":
        return Reader(()).read(data).item()
    if tag == "str":
        return bytes(rest[0]).decode("utf-8", "backslashreplace")
    return rest[0] if len(rest) == 1 else f"{tag} {rest}"
