"""Options that say what to do when workers and hosts fail."""

from __future__ import annotations

from elastic_driver.settings import Settings
from launcher.options import kinds
from launcher.options.option import POLICY, Option

_DEFAULTS = Settings()

RESET_LIMIT: Option[int | None] = Option(
    "reset-limit",
    kinds.whole(),
    _DEFAULTS.reset_limit,
    POLICY,
    "End the job after this many membership changes of any kind.",
    shown="no limit",
)
MAX_RESTARTS: Option[int | None] = Option(
    "max-restarts",
    kinds.whole(),
    _DEFAULTS.max_restarts,
    POLICY,
    "End the job after this many failures in all.",
    shown="no limit as long as training gets anywhere between failures",
)
FRUITLESS_RESTARTS: Option[int] = Option(
    "fruitless-restarts",
    kinds.whole(),
    _DEFAULTS.fruitless_restarts,
    POLICY,
    "End the job after this many failures in a row without a finished step in between.",
)
HOST_FAILURES: Option[int | None] = Option(
    "host-failures",
    kinds.whole("K", least=1),
    _DEFAULTS.host_failures,
    POLICY,
    "A host that fails K times within --host-failure-window is put in cool-down.",
    shown="3 failures of workers that never finished a step",
)
HOST_FAILURE_WINDOW: Option[float] = Option(
    "host-failure-window",
    kinds.seconds(),
    _DEFAULTS.host_failure_window,
    POLICY,
    "The window in which a host's failures count.",
)
BLACKLIST_COOLDOWN_RANGE: Option[tuple[float, float]] = Option(
    "blacklist-cooldown-range",
    kinds.seconds_range(),
    _DEFAULTS.blacklist_cooldown,
    POLICY,
    "A host's first cool-down, and the longest one after doubling.",
)
ELASTIC_TIMEOUT: Option[float] = Option(
    "elastic-timeout",
    kinds.seconds(),
    _DEFAULTS.elastic_timeout,
    POLICY,
    "Give up when fewer than --min-np workers were to be had for this long.",
)
START_TIMEOUT: Option[float] = Option(
    "start-timeout",
    kinds.seconds(),
    _DEFAULTS.start_timeout,
    POLICY,
    "Wait this long for -np workers before settling for --min-np, or giving up.",
)
HEARTBEAT_TIMEOUT: Option[float] = Option(
    "heartbeat-timeout",
    kinds.seconds(),
    _DEFAULTS.heartbeat_timeout,
    POLICY,
    "An agent or worker that is silent for this long is lost.",
)
HANG_TIMEOUT: Option[float | None] = Option(
    "hang-timeout",
    kinds.seconds(positive=False),
    _DEFAULTS.hang_timeout,
    POLICY,
    "A worker that lives but makes no progress for this long hangs; 0: never (docs/hangs.md).",
    shown="20 times the usual step, at least 60",
)
GRACE_PERIOD: Option[float] = Option(
    "grace-period",
    kinds.seconds(positive=False),
    _DEFAULTS.grace_period,
    POLICY,
    "After the first worker finished: time for the others to finish too. After an agent was sent "
    "SIGTERM, SIGUSR1 or SIGUSR2 (preemption, Slurm's --signal): time for its host to be left. "
    "After elasticrun itself was sent SIGUSR1 or SIGUSR2: time to leave and write a checkpoint.",
)
STOP_GRACE: Option[float] = Option(
    "stop-grace",
    kinds.seconds(positive=False),
    _DEFAULTS.stop_grace,
    POLICY,
    "Time between SIGTERM and SIGKILL for a worker that is told to stop.",
)
LAST_CALL: Option[float] = Option(
    "last-call",
    kinds.seconds(positive=False),
    _DEFAULTS.last_call,
    POLICY,
    "Changes that arrive within this time of each other become one round.",
)
