"""The settings of a job, frozen: what the command line, the environment and a file agreed on.

Times are seconds. The launcher fills them (flags > environment > file > defaults), the core
reads them. What each one means for a user is said once, in `elasticrun --help`.
"""

from msgspec import Struct

TfRoles = tuple[tuple[str, int | None], ...]
"""TensorFlow's roles, in the order in which they are handed out; (role, None): all the others."""


class Settings(Struct, frozen=True, kw_only=True):
    """The settings of one job's core; it takes nothing else from outside."""

    # size
    start_np: int = 1  # the first round waits for this many workers
    min_np: int = 1  # a later round needs at least this many
    max_np: int | None = None  # None: as many as there are slots
    start_min_np: int | None = None  # after start_timeout: settle for this many (None: start_np)
    node_unit: int = 1  # a world has a multiple of so many hosts
    min_hosts: int = 1  # and at least so many
    max_hosts: int | None = None  # and at most so many

    # policy
    reset_limit: int | None = None  # membership changes in all; None: no limit
    max_restarts: int | None = None  # failures in all; None: only fruitless ones count
    fruitless_restarts: int = 3  # failures in a row with no step finished in between
    host_failures: int | None = None  # None: 3 failures of workers that never finished a step
    host_failure_window: float = 60.0
    blacklist_cooldown: tuple[float, float] = (10.0, 600.0)  # first, and longest after doubling
    elastic_timeout: float = 600.0  # below min_np for this long: give up
    start_timeout: float = 600.0
    heartbeat_timeout: float = 30.0
    hang_timeout: float | None = None  # no progress for this long; None: adapts to the step, 0: off
    grace_period: float = 30.0  # after the first success for the rest; before SIGKILL: stop_grace
    stop_grace: float = 5.0
    last_call: float = 0.02  # coalesces changes that arrive together
    settle: float = 1.0  # before any step was finished: time to see whether every worker fails
    plain_after: float = 10.0  # no word from a started script for this long: it is a plain one
    replace_slow: bool = False  # a slow worker is replaced by one on another host
    slow_for: float = 5.0  # beyond the verdict, before it is
    replace_pause: float = 60.0  # from one slow host's replacements to the next one's
    fixed_hosts: bool = False  # no hosts can come but those that were given
    tf_roles: TfRoles | None = None  # of the workers in TF_CONFIG; None: they get none

    checked_hosts: tuple[str, ...] | None = None  # before the job; None: hosts are never checked


DEFAULT_HOST_FAILURES = 3
