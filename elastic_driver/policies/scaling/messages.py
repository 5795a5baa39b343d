"""The events of the machines that search the best number of workers, in all and on a host."""

from typing import ClassVar

from msgspec import Struct

from elastic_driver.job.decisions import Announce
from elastic_driver.job.events import Tick
from elastic_driver.kernel.machine import Declaration
from elastic_driver.policies.messages import SendEvent

WRONG = 0.2  # a prior that differs so much from what is measured is dropped


class PriorFound(Struct, frozen=True, kw_only=True, tag="prior_found"):
    """Similar jobs have finished before: `jobs` of them.

    `step_times`: seconds of a step, by size and hosts; there is at least one.
    """

    machine: ClassVar[str] = "scaling"

    jobs: int
    step_times: tuple[tuple[int, int, float], ...]


class SpeedSeen(Struct, frozen=True, kw_only=True, tag="speed_seen"):
    """The speed of a job that trains now.

    `steps` were done until `at`, by the clock of the worker that is rank 0. `slots` are those of
    each usable host, in the order in which hosts are used. `unit`: a world has a multiple of so
    many hosts. `most`: the most workers; None: no limit. `held`: a user has asked for a size.
    `rest`: the steps until the end, if the script says so. `micro_batches`: into which it divides
    a step, if it does. `noise`: the scale of the gradients' noise, see `policies.scaling.noise`;
    None: not known.
    """

    machine: ClassVar[str] = "scaling"

    round: int
    size: int
    wanted: int | None
    worker: str
    steps: int
    at: float
    slots: tuple[int, ...]
    least: int
    most: int | None = None
    unit: int = 1
    held: bool = False
    rest: int | None = None
    micro_batches: int | None = None
    noise: float | None = None


class HostLoad(Struct, frozen=True, kw_only=True):
    """A host that trains: its workers, and the seconds that they compute in a step (the median).

    `cpu`: the share of its processors that worked. `pressure`: the share of the last ten seconds in
    which a process waited for one; None: not known.
    """

    host: str
    workers: int
    compute: float
    cpu: float
    pressure: float | None = None


class LoadsSeen(Struct, frozen=True, kw_only=True, tag="loads_seen"):
    """The load of the hosts that train now; `held`: a user has asked for a size."""

    machine: ClassVar[str] = "starvation"

    round: int
    hosts: tuple[HostLoad, ...]
    held: bool = False


# Of `autoscaler.AutoScaler`, whose module loads SciPy: most jobs do without.
AUTO_SCALER = Declaration(
    name="scaling", events=SpeedSeen | PriorFound | Tick, decisions=SendEvent | Announce
)
