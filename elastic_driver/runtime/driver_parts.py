"""What features do in the driver's process, and what they know of the job there.

The chapter `driver` of a feature may have `part(setup, began) -> DriverPart`, which each driver
calls once (`setup`: `resources.DriverSetup`; `began`: unix seconds). The chapter `companion` has
`begin(run: Run) -> Companion | None`, which is called when the job has begun; nothing of the job
waits for a companion before its end.

A `Watch` is a machine that reads the progress of all workers, so it knows how far the job is. The
scale of the gradients' noise says how much less a sample teaches in a larger batch. It follows from
the squared norms of each worker's gradient and of their mean (the appendix of McCandlish et al., An
Empirical Model of Large-Batch Training, 2018). Times are seconds.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Protocol, runtime_checkable

from elastic_driver.brain.grants import Speed
from elastic_driver.brain.store.records import Prior
from elastic_driver.job.job import Job
from elastic_driver.job.rounds import COMPLETE
from elastic_driver.job.status import SlowStatus
from elastic_driver.kernel.kernel import Handler, Kernel
from elastic_driver.kernel.machine import ForMachine
from elastic_driver.runtime.event_log import EventLog
from elastic_driver.runtime.mailbox import RunClock
from elastic_driver.words.orders import World
from elastic_driver.words.progress import GradientNorms, History, Measured, Progress
from rendezvous.wire import Entry

LEAST_NOISE, MOST_NOISE = 1e-6, 1e6  # batches; beyond these no size of a job makes a difference


@runtime_checkable
class Watch(Protocol):
    """A machine that watches the ranks of the newest complete round."""

    step: int  # committed steps, as the workers last reported
    round_step: int  # the same of this round: some steps may be trained again
    progress: dict[str, Progress]  # the newest of each member, by worker

    @property
    def world(self) -> World:
        """The world of the newest complete round."""

    @property
    def step_time(self) -> float:
        """Seconds of the usual rank's last step, waiting included; 0: not known yet."""

    @property
    def false_alarms(self) -> int:
        """The number of false alarms in the whole job: alarms that were soon withdrawn."""

    def status(self) -> tuple[SlowStatus, ...]:
        """Return the ranks that are slow now."""


@dataclass
class Unwatched:
    """A `Watch` that knows nothing, for a job that no machine watches."""

    step: int = 0
    round_step: int = 0
    progress: dict[str, Progress] = field(default_factory=dict)
    world: World = field(default_factory=lambda: World(0, (), "nobody watches the ranks"))
    step_time: float = 0.0
    false_alarms: int = 0

    def status(self) -> tuple[SlowStatus, ...]:
        """See `Watch.status`."""
        return ()


def watch_in(machines: Mapping[str, object]) -> tuple[str, Watch]:
    """Return the machine that watches the ranks, and its name; "": there is none."""
    found = ((name, each) for name, each in machines.items() if isinstance(each, Watch))
    return next(found, ("", Unwatched()))


def progress_of(job: Job, watch: Watch) -> Progress | None:
    """Return the progress of rank 0; None while a round forms, or before its first step."""
    world, current = watch.world, job.rounds.current
    if current.state is not COMPLETE or current.number != world.round:
        return None
    progress = watch.progress.get(world.members[0].worker)
    return None if progress is None or progress.round != world.round else progress


def steps_of(progress: Progress) -> int:
    """Return the steps of a worker, committed or only reported; -1: none."""
    return max(progress.step, -1 if progress.reported is None else progress.reported)


def speed_of(job: Job, watch: Watch) -> Speed | None:
    """Return how far the world has come; None while a round forms, or before its first step."""
    world, progress = watch.world, progress_of(job, watch)
    if progress is None:
        return None
    steps = steps_of(progress)
    return Speed(
        round=world.round,
        size=world.size,
        hosts=world.members[0].place.node_count,
        worker=world.members[0].worker,
        steps=steps,
        at=progress.at,
        rest=None if progress.total is None else max(0, progress.total - steps),
        micro_batches=progress.micro_batches,
        noise=_noise(watch),
    )


def _noise(watch: Watch) -> float | None:
    """Return the noise scale of the gradients; None before all workers have measured theirs."""
    world, norms = watch.world, []
    for member in world.members:
        progress = watch.progress.get(member.worker)
        if progress is None or progress.round != world.round or progress.gradients is None:
            return None
        norms.append(progress.gradients)
    return noise_scale(norms)


def noise_scale(norms: Sequence[GradientNorms]) -> float | None:
    """Return the scale in batches of one worker, by the norms of all; None: they do not tell.

    It is the variance of one worker's gradient over the square of the mean gradient.
    """
    size = len(norms)
    if size < 2:
        return None
    own, mean = fmean(n.own for n in norms), fmean(n.mean for n in norms)
    variance = (own - mean) * size / (size - 1)
    signal = (size * mean - own) / (size - 1)
    if own <= 0 or variance < 0:
        return None
    most = signal <= variance / MOST_NOISE
    return MOST_NOISE if most else max(LEAST_NOISE, variance / signal)


class DriverThread(Protocol):
    """The driver's thread, as its parts use it."""

    job: Job | None  # None: not begun yet
    clock: RunClock
    kernel: Kernel
    watch: Watch

    def call(self, act: Callable[[], object]) -> None:
        """Have `act` called soon in the driver's thread; any thread may ask for that."""

    def post(self, event: ForMachine) -> None:
        """Put an event into the mailbox; any thread may do so."""

    def read(self, keys: tuple[str, ...], found: Callable[[dict[str, Entry]], None]) -> None:
        """Read keys of the store; `found` gets what there is, in the server's thread."""

    def journal_states(self) -> None:
        """Write the machines' states down: one has begun that is journalled."""

    def tell_measured(self, document: Callable[[], Measured]) -> Callable[[], None]:
        """Tell all parts of a new measurement.

        Returns what then tells the machines: how long they think counts for nobody.
        """

    def tell_prior(self, prior: Prior) -> None:
        """Tell all parts what similar jobs have measured; any thread may do so."""


class DriverPart:
    """A part of a feature in the driver's thread, which calls all methods. These do nothing."""

    def attach(self, thread: DriverThread) -> None:
        """Take the thread; this comes first."""

    def handlers(self) -> Mapping[type[Any], Handler]:
        """Return what carries out decisions of the feature's machines, or instead of others."""
        return {}

    def job_begins(self, job: Job) -> None:
        """Take part in a job that begins, or goes on."""

    @property
    def due(self) -> float | None:
        """The time at which `look` is to be called; None: not yet."""
        return None

    def look(self, now: float) -> None:
        """Do what is due."""

    def measured(self, _document: Callable[[], Measured]) -> list[ForMachine]:
        """Return what follows from a measurement for machines that run."""
        return []

    def prior(self, _prior: Prior) -> list[ForMachine]:
        """Return what follows from measurements of similar jobs; any thread may call this."""
        return []

    def before_job(self) -> dict[str, Any]:
        """Return what the status shows before the job."""
        return {}

    def status(self) -> dict[str, Any]:
        """Return what the status of the job shows."""
        return {}

    def close(self, exit_code: int | None) -> None:
        """End: the job is over, or another driver goes on with it (None)."""


class Measuring(DriverPart):
    """The part that measures the job; this one measures nothing. Any thread may call `history`."""

    @property
    def job(self) -> Measured:
        """The job as a whole, without workers and hosts; any thread may ask."""
        return Measured()

    def history(self, _since: float) -> History:
        """Return how the job has trained since then (unix seconds), in the last hour."""
        return History()

    def idle_memory(self) -> tuple[tuple[str, int], ...]:
        """Return the hosts whose idle memory is known, with it in bytes."""
        return ()


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run, as its companions know it."""

    run_id: str
    began: float  # unix seconds
    environ: Mapping[str, str]  # the variables of `elasticrun`
    log: EventLog
    say: Callable[[str], None]  # shows a line to the user; any thread may call it


class Companion(Protocol):
    """Something that runs beside the job."""

    @property
    def busy(self) -> bool:
        """Return whether it still does something."""

    def close(self) -> None:
        """End it, within seconds: the job is over."""
