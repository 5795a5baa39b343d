"""The fields that the training thread and the heartbeat thread share, and the measured steps.

The training thread writes its progress at every commit and compares one integer; the heartbeat
thread reads the progress and writes the requests to leave. Each field has one writer and is
replaced as a whole, and the interpreter makes each assignment atomic, so no lock is needed.
`version` counts the committed steps of the whole job.

The kernel counts for each thread how long it ran, and how long it was ready to run and did not
(`schedstat`, see `proc(5)`). The second is time taken by other programs or by a CPU quota; time in
which a thread waits for data or for peers is in neither. `CpuSlowdown` is the slowdown of training.

The accounts of CPU time are for node checks. On a machine of its own, a host is slow if any other
program takes its processor. Where several hosts share a machine, any other program there takes time
from all of them, and a little more from the host that is being measured. There a node check
subtracts the time in which a thread was ready while another program ran. It does not subtract time
lost to a CPU quota: the kernel stops a host's processes though a processor may be free, and that is
the host's own slowness.

`in_short` and `new_leaf_mark` describe a state leaf by leaf, within the bounds of the messages that
carry it. Times are monotonic seconds.
"""

import contextlib
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

from msgspec import Struct

from elastic_driver.words import wire_events as events
from elastic_driver.words.orders import Allocation
from elastic_driver.words.progress import (
    MAX_DIGEST_CHARS,
    MAX_MARKS,
    MAX_SAMPLES,
    ODD_STEPS,
    Division,
    GradientNorms,
    Links,
    Sample,
    StepTimes,
)

NEVER = sys.maxsize  # a step that no job reaches
AT_ONCE = -1  # every step is later than this one
KEPT_TIMES = 101  # step times from which the median is taken
KEPT_BOUNDARIES = 13  # times of commits and checks, from which the time between two follows
SAMPLE_S = 0.075  # the least total time of the steps of one sample
COVERED_S = 4.0  # the time that the samples of one message cover: at least two heartbeats
LEAST_SAMPLES = 8  # in a message, however long steps are
LARGEST_BACKLOG = 4096  # steps between two heartbeats
HEARTBEATS_PER_S = 256.0  # of all workers of a world that trains
LONGEST_WAIT_S = 2.0  # between two heartbeats: the progress the driver reads is never older
SHORTEST_WAIT_S = 0.25

# ---- CPU time ----------------------------------------------------------------------------

LEAST_RUN_S = 0.02  # a shorter CPU time says nothing
_CGROUPS = Path("/sys/fs/cgroup")
_MAIN_THREAD = Path("/proc/self/schedstat")
_THIS_THREAD = Path("/proc/thread-self/schedstat")
_THREADS = Path("/proc/self/task")


class CpuTime(NamedTuple):
    """The kernel's account of a thread, or of several."""

    ran: float = 0.0
    waited: float = 0.0  # ready to run, while something else ran
    stops: int = 0  # by a CPU quota

    def since(self, before: "CpuTime") -> "CpuTime":
        """Return the account since an earlier one; `waited` is 0 where a quota has stopped us."""
        waited = self.waited - before.waited if self.stops == before.stops else 0.0
        return CpuTime(max(0.0, self.ran - before.ran), max(0.0, waited))


CpuAccount = Callable[[], CpuTime]  # returns the account so far


def read_cpu_time(*schedstats: Path) -> CpuTime:
    """Return the sum of the accounts in these `schedstat` files; 0 where the kernel keeps none.

    A file holds nanoseconds run, nanoseconds ready, and a number of time slices (`proc(5)`).
    """
    ran = waited = 0
    for path in schedstats:
        with contextlib.suppress(OSError, ValueError):  # the thread has ended
            own_ran, own_waited, _slices = map(int, path.read_text("ascii").split())
            ran, waited = ran + own_ran, waited + own_waited
    return CpuTime(ran / 1e9, waited / 1e9)


class CpuSlowdown:
    """The slowdown of this process's main thread, which trains, over the newest interval.

    The heartbeat thread reads it, so it costs training nothing.
    """

    def __init__(self) -> None:
        self._before: CpuTime | None = None
        self._factor = 1.0

    def factor(self) -> float:
        """Return the seconds that pass for each second of CPU time; 1.0 if they are not known."""
        now = read_cpu_time(_MAIN_THREAD)
        passed = now.since(self._before or now)
        if self._before is None or passed.ran >= LEAST_RUN_S:
            self._before = now
        if passed.ran >= LEAST_RUN_S:
            self._factor = 1.0 + passed.waited / passed.ran
        return self._factor


def cpu_of_thread() -> CpuAccount:
    """Return the account of the thread that calls it."""
    return partial(_account, lambda: (_THIS_THREAD,), tuple(_quota_files()))


def cpu_of_process() -> CpuAccount:
    """Return the account of all threads of this process together."""
    return partial(_account, lambda: _THREADS.glob("*/schedstat"), tuple(_quota_files()))


def _account(schedstats: Callable[[], Iterable[Path]], quotas: tuple[Path, ...]) -> CpuTime:
    """Return the account so far; `waited` is 0 where the kernel does not report quotas."""
    ran, waited, _ = read_cpu_time(*schedstats())
    return CpuTime(ran, waited if quotas else 0.0, sum(map(_stops, quotas)))


def _stops(stat: Path) -> int:
    """Return how often the quota of a control group has stopped it so far."""
    with contextlib.suppress(OSError):
        lines = stat.read_text("ascii").splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith("nr_throttled "))
    return 0


def _quota_files() -> Iterator[Path]:
    """Yield the `cpu.stat` files of our control groups, from our own up to the root."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text("utf-8", "replace").splitlines():
            _number, controllers, group = line.split(":", 2)
            if not controllers or "cpu" in controllers.split(","):
                root = _CGROUPS / "cpu" if controllers else _CGROUPS  # version 1, or 2
                own = Path(group.lstrip("/"))
                stats = (root / folder / "cpu.stat" for folder in (own, *own.parents))
                yield from filter(Path.is_file, stats)


# ---- measured steps ----------------------------------------------------------------------


class StepCost(Struct, frozen=True):
    """The cost of one step to this rank, in seconds.

    `compute`: of one forward-backward pass and the optimizer; `one_pass`: of the pass alone;
    `exchange`: CPU time that exchanging gradients took while this rank waited for others.
    `worked`: of all passes and the optimizer; `waited`: from the gradients to the optimizer.
    """

    compute: float
    one_pass: float
    exchange: float = 0.0
    worked: float = 0.0
    waited: float = 0.0


Cost = Callable[[], StepCost | None]  # computes it; None: not known


class StepTiming(NamedTuple):
    """What is known of the times of one step, in seconds."""

    cost: Cost
    data: float  # waiting for the next batch; 0: not known
    commit: float

    def times(self) -> StepTimes:
        """Return the parts of the step."""
        cost = self.cost()
        if cost is None:
            return StepTimes(self.data or None, commit=self.commit)
        worked = max(cost.worked - self.commit - self.data, 0.0)
        return StepTimes(self.data or None, worked, cost.waited, self.commit)


class Done(NamedTuple):
    """The last step of this process: when it ended, and all steps and samples until then."""

    at: float = 0.0
    steps: int = 0
    samples: int = 0


class StepSamples:
    """The measured steps of this process in one round, for the driver's comparison.

    Steps may take a millisecond while heartbeats are seconds apart and their messages small. So for
    steps shorter than `SAMPLE_S`, a sample is the mean over 2ⁿ steps. It is a mean because other
    programs that take the processor now and then slow some of these steps a lot and the others not
    at all. All ranks end their samples at the same steps, because n follows from the step time they
    share. Where n differs by one, every second sample of one rank ends with a sample of the other.
    The samples of the last seconds are repeated in each heartbeat, so a lost message does no harm.

    The training thread records, the heartbeat thread collects: a deque's `append` and `popleft` are
    atomic, so no lock is needed.
    """

    def __init__(self) -> None:
        self._recorded: deque[tuple[int, Cost]] = deque(maxlen=LARGEST_BACKLOG)
        # The fields below belong to the heartbeat thread.
        self._kept: deque[Sample] = deque(maxlen=MAX_SAMPLES)
        self._slowdown = CpuSlowdown()
        self._unfinished: list[tuple[float, float, float]] = []  # steps of the next sample

    def record(self, step: int, cost: Cost) -> None:
        """Record the cost of a committed step; called by the training thread."""
        self._recorded.append((step, cost))

    def collect(self, step_time: float) -> tuple[Sample, ...]:
        """Return the samples to report, oldest first; for the heartbeat thread.

        `step_time`: seconds of a whole step, waiting included.
        """
        every = steps_per_sample(step_time)
        slowdown = self._slowdown.factor()
        while self._recorded:
            step, known = self._recorded.popleft()
            if (cost := known()) is None:
                continue
            self._unfinished.append((cost.compute, cost.one_pass, cost.exchange * slowdown))
            if step % every == 0:
                means = map(fmean, zip(*self._unfinished, strict=True))
                self._kept.append(Sample(step, *(round(mean, 6) for mean in means)))
                self._unfinished.clear()
        needed = COVERED_S / (every * step_time) if step_time > 0 else MAX_SAMPLES
        return tuple(self._kept)[-max(LEAST_SAMPLES, math.ceil(needed)) :]


def steps_per_sample(step_time: float) -> int:
    """Return the smallest power of two of steps that takes `SAMPLE_S`, up to the backlog."""
    every = 1
    while every * step_time < SAMPLE_S and every < LARGEST_BACKLOG:
        every *= 2
    return every


# ---- progress ------------------------------------------------------------------------------


def usual_pause(size: int) -> float:
    """Return the seconds between two heartbeats of a worker that trains in a world of `size`.

    The pause is longer in a larger world, to bound the driver's load. Marks of the state should not
    follow each other faster: a heartbeat carries `MAX_MARKS`, and those of all ranks have to meet.
    """
    return min(max(size / HEARTBEATS_PER_S, SHORTEST_WAIT_S), LONGEST_WAIT_S)


@dataclass(slots=True, eq=False)
class TrainingProgress:
    """The progress of this process, and when it has to leave its round."""

    # Written by the training thread.
    round: int = 0  # 0: in no round
    size: int = 1  # members of the round
    rank: int = 0  # in the round
    steps: int = 0  # commits in this round, or in the one left last
    steps_of: int = 0  # that round
    version: int = -1  # committed steps of the whole job
    committed_at: float = field(default_factory=time.monotonic)
    synced_at: float = field(default_factory=time.monotonic)  # the state was that of all ranks
    step_time: float = 0.0  # seconds of the last step
    checks: int = 0  # of changes of the hosts, in this round; a commit is none
    # The times of the last commits and checks: the boundaries at which a round may be left.
    boundaries: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_BOUNDARIES))
    # The last commit, report or end of a `busy` block.
    active_at: float = field(default_factory=time.monotonic)
    busy_until: float = 0.0  # silence until then is not a stall
    reported_steps: int = 0  # commits and reported steps in this round
    optimizer_steps: int = 0  # finished steps of optimizers in this round
    # The newest marked steps of this round with the digests of the state, oldest first.
    marks: deque[tuple[int, str]] = field(default_factory=lambda: deque(maxlen=MAX_MARKS))
    buffers: dict[int, str] = field(default_factory=dict)  # digests of buffers, of these steps
    step_times: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_TIMES))
    samples: StepSamples = field(default_factory=StepSamples)
    # The next ones are only shown. Samples that are counted and reported count once.
    done: Done = field(default_factory=Done)  # at the last step
    steps_done: int = 0  # by this process, since it started
    trained: int = 0  # samples that samplers and batches have counted in this process
    reported_samples: int = 0  # samples that the script has reported in this process
    reported_step: int | None = None  # the number that the script gave its last step
    step_reported: bool = False  # by the script, and not committed yet
    total: int | None = None  # steps in all, as the script said
    numbers: dict[str, float] = field(default_factory=dict)  # the script's last ones
    timing: StepTiming | None = None  # of the last step
    micro_batches: int | None = None  # of a step of a `FixedBatch`
    batch: int | None = None  # its samples
    parameters: int | None = None  # of the models of the state
    gradients: GradientNorms | None = None  # measured in this round
    on_first_step: Callable[[], None] = lambda: None  # called at the first step of a round
    on_first_mark: Callable[[], None] = lambda: None  # called at the first mark of a round
    on_no_commit: Callable[[], None] = lambda: None  # called after `ODD_STEPS` without a commit
    on_end: Callable[[], None] = lambda: None  # called when the script is over
    # Describes the state of a marked step: name, digest and value of every leaf; None: not kept.
    leaves: Callable[[int], list[tuple[str, str, str]] | None] = lambda _step: None
    on_difference: Callable[[], None] = lambda: None  # the driver has asked for these: ranks differ
    on_planned: Callable[[], None] = lambda: None  # the driver has named a step to leave after
    links: Callable[[], Links | None] = lambda: None  # reads the usage of the group's links
    collectives: Callable[[], int] = lambda: 0  # counts those of the whole world, in this round
    division: Division | None = None  # set by a FixedBatch with `balance`
    wants_allocations: bool = False  # set by it, too: watch for new allocations
    # Written by the heartbeat thread.
    allocation: Allocation | None = None  # the newest one
    leave_after: int = NEVER  # leave the round at this boundary; see `boundary`
    leave_reason: str = ""  # written before `leave_after`

    @property
    def times(self) -> StepTimes | None:
        """The parts of the last step."""
        return None if self.timing is None else self.timing.times()

    @property
    def boundary(self) -> int:
        """The number of the last boundary: that of commits of the job, and checks of this round.

        All ranks commit and check alike, so a number means the same place in each script.
        """
        return max(self.version, 0) + self.checks

    @property
    def must_leave(self) -> bool:
        """Whether the round has to be left at the boundary of now."""
        return self.boundary >= self.leave_after

    def record_check(self) -> bool:
        """Record a check for changes; return whether the round has to be left now."""
        self.checks += 1
        self.boundaries.append(time.monotonic())
        return self.must_leave

    def boundary_time(self) -> float:
        """Return the seconds from one boundary to the next one; 0: not known yet.

        It is a median over pairs: a script may check right after each commit.
        """
        at = tuple(self.boundaries)
        if len(at) < 3:
            return max(0.0, at[-1] - (at[0] if len(at) == 2 else self.synced_at)) if at else 0.0
        return median((later - earlier) / 2 for earlier, later in zip(at, at[2:], strict=False))

    def since_boundary(self) -> float:
        """Return the seconds since the last boundary, or since the state was that of all ranks."""
        at = tuple(self.boundaries)
        return time.monotonic() - max(self.synced_at, at[-1] if at else 0.0)

    def record_commit(self, version: int) -> bool:
        """Record a committed step; return whether the round has to be left now."""
        now = time.monotonic()
        self.step_time = now - self.committed_at
        self.committed_at = now
        self.version = version
        self.boundaries.append(now)
        self.steps += 1
        if self.step_reported:  # it counts once
            self.step_reported = False
        else:
            self.step_times.append(now - self.active_at)
            self.reported_steps += 1
            self.steps_done += 1
        self.active_at = now
        self._done(now)
        if self.steps == 1:
            self.on_first_step()
        return max(version, 0) + self.checks >= self.leave_after  # `must_leave`, in fewer calls

    def record_step(self, now: float) -> None:
        """Record a step that was committed or only reported."""
        self.step_times.append(now - self.active_at)
        self.active_at = now
        self.reported_steps += 1
        self.steps_done += 1
        self._done(now)

    def _done(self, now: float) -> None:
        samples = max(self.trained, self.reported_samples)
        self.done = Done(now, self.steps_done, samples)

    def record_reported_step(self, now: float, step: int) -> None:
        """Record a step that the script reports; it may commit it as well."""
        self.reported_step, self.step_reported = step, True
        self.record_step(now)
        if self.reported_steps == 1:
            self.on_first_step()

    def record_optimizer_step(self) -> None:
        """Record a finished step of an optimizer."""
        self.optimizer_steps += 1
        if self.optimizer_steps == ODD_STEPS and not self.reported_steps:
            self.on_no_commit()

    def record_mark(self, step: int, digest: str, buffers: str = "") -> None:
        """Record the digest of the state after a committed step, for the comparison of ranks.

        `buffers`: digests of what ranks may have apart; see `words.progress.StateMark`.
        """
        self.buffers = {each: self.buffers.get(each, "") for each, _ in self.marks}
        self.buffers[step] = buffers
        self.marks.append((step, digest))
        if len(self.marks) == 1:
            self.on_first_mark()

    def enter(self, round_id: int, version: int, size: int = 1, rank: int = 0) -> None:
        """Record a new round, without a commit and without a request to leave so far."""
        self.size = size
        self.rank = rank
        self.version = version
        self.committed_at = self.active_at = self.synced_at = time.monotonic()
        self.leave_after = NEVER
        self.steps = 0
        self.reported_steps = 0
        self.checks = 0
        self.optimizer_steps = 0
        self.marks.clear()
        self.reported_step = None
        self.step_reported = False
        self.timing = None
        self.gradients = None
        self.division = None
        self.wants_allocations = False
        self.samples = StepSamples()
        self.round = self.steps_of = round_id

    def leave(self) -> None:
        """Record that this process is in no round."""
        self.round = 0
        self.links, self.collectives = lambda: None, lambda: 0


# ---- descriptions of a state -----------------------------------------------------------

Leaf = tuple[str, str, str]  # name, digest, and value as text


def new_leaf_mark(name: str, digest: str, text: str) -> events.LeafMark:
    """Return the description of a leaf within the bounds of the message, in characters it takes."""
    short = name[: events.MAX_LEAF_NAME_CHARS], text[: events.MAX_LEAF_TEXT_CHARS]
    name, text = (each.encode(errors="replace").decode() for each in short)
    return events.LeafMark(name, digest[:MAX_DIGEST_CHARS], text)


def in_short(leaves: Sequence[Leaf], most: int) -> list[Leaf]:
    """Return leaves as at most so many; of more, those of an object or an attribute become one."""
    if len(leaves) <= most:
        return list(leaves)
    groups: dict[str, list[Leaf]] = {}
    for leaf in leaves:
        words = leaf[0].split(".")
        is_setting = " " in leaf[0]  # of an optimizer's group, or a flag
        name = leaf[0] if is_setting else ".".join(words[: 2 if words[0] == "state" else 1])
        groups.setdefault(name, []).append(leaf)
    return [_as_one(name, inside) for name, inside in groups.items()][:most]


def _as_one(name: str, inside: Sequence[Leaf]) -> Leaf:
    if len(inside) == 1:
        return name, *inside[0][1:]
    root = blake2b(digest_size=8)
    for leaf, digest, _ in sorted(inside):
        root.update(f"{leaf} {digest} ".encode(errors="replace"))
    return name, root.hexdigest(), f"{len(inside)} tensors and values"
