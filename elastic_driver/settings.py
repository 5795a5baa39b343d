"""The settings of a job's core, frozen. Times are seconds.

A field made by `option` is an option of `elasticrun`, explained by its help text. The launcher
fills the fields, the rules of the core read them.
"""

from dataclasses import dataclass

from elastic_driver import options as o
from elastic_driver.contract import PortRange, listening_ports
from elastic_driver.options import Heading, TfRoles, ValueKind, option, whole
from rendezvous.limits import Limits, read_limits

POLICY = Heading.POLICY
LIMITS = ValueKind(read_limits, "NAME=N", repeat=True)
DEFAULT_HOST_FAILURES = 3


# fmt: off
@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The settings of one job's core; the core takes nothing else from outside."""

    # size
    start_np: int = 1  # the first round waits for this many workers
    min_np: int = 1  # a later round needs at least this many
    max_np: int | None = None  # None: as many as there are slots
    start_min_np: int | None = None  # after start_timeout this many are enough (None: start_np)
    min_hosts: int = 1  # a world has at least this many hosts
    max_hosts: int | None = None  # and at most this many
    node_unit: int = option(Heading.SIZE, whole(least=1), 1,
        "Train on a multiple of N hosts. Workers of surplus hosts wait until they make up a unit, "
        "or replace one that fails; with fewer than N hosts the job waits.")
    replace_slow: bool = option(Heading.SIZE, o.FLAG, False,
        "Replace a worker that computes slowly for a long time by one on another host, if --max-np "
        "leaves a slot free; no step is lost.")
    auto_scale: bool = option(Heading.SIZE, o.FLAG, False,
        "Find the number of workers at which the job trains fastest, between --min-np and --max-np "
        "or the slots there are; begin with -np or --min-np (docs/auto-scale.md).")
    spares: int = option(Heading.SIZE, whole(), 0,
        "Keep N more workers on each host that have run the script up to @elastic.run, and take a "
        "lost worker's slot at once (docs/warm-workers.md).")

    # policy
    reset_limit: int | None = option(POLICY, whole(), None,
        "End the job after this many membership changes that nobody asked for.", shown="no limit")
    max_restarts: int | None = option(POLICY, whole(), None,
        "End the job after this many failures in all.",
        shown="no limit as long as steps are finished between failures")
    fruitless_restarts: int = option(POLICY, whole(), 3,
        "End the job after this many failures in a row without a finished step in between.")
    restart_from_scratch: bool = option(POLICY, o.FLAG, False,
        "If all workers that held a trained state are lost and it has no checkpoint, begin anew; "
        "by default the job ends with status 75.", shown="on with --horovod")
    host_failures: int | None = option(POLICY, whole("K", least=1), None,
        "A host that fails K times within --host-failure-window is put in cool-down.",
        shown="3 failures of workers that never finished a step")
    failed_hosts: str | None = option(POLICY, o.choice("keep", "leave"), None,
        "What becomes of a host of an elastic job on which a worker fails. keep: a new worker is "
        "started there. leave: it is put in cool-down at once, or after --host-failures, and its "
        "other workers leave, as with horovodrun; the job ends if no host is left. The only host "
        "of a job is kept.", shown="leave with --horovod, else keep")
    host_failure_window: float = option(POLICY, o.SECONDS, 60.0,
        "The window in which a host's failures count.")
    blacklist_cooldown: tuple[float, float] = option(POLICY, o.SECONDS_RANGE, (10.0, 600.0),
        "The first cool-down of a host, and the longest one after doubling.",
        flag="blacklist-cooldown-range")
    on_difference: str | None = option(POLICY, o.choice("stop", "repair", "warn"), None,
        "What to do when ranks hold different states (docs/verify-state.md). stop: end the job, "
        "with status 65. repair: all ranks take over the state of the oldest one. warn: only say "
        "so.", shown="repair if it began at a change of the world, else stop")
    elastic_timeout: float = option(POLICY, o.SECONDS, 600.0,
        "Give up when fewer than --min-np workers have been available for this long.")
    start_timeout: float = option(POLICY, o.SECONDS, 600.0,
        "Wait this long for -np workers. Then start with --min-np, or give up.")
    heartbeat_timeout: float = option(POLICY, o.seconds_or("auto", 30.0), 30.0,
        "An agent or worker that is silent for this long is lost. An agent usually is sooner: as "
        "soon as its heartbeats are late and its host answers no probe (docs/hosts.md). auto is "
        "30.", shown="auto")
    hang_timeout: float | None = option(POLICY, o.SECONDS_OR_0, None,
        "A worker that lives but makes no progress for this long hangs; 0: never (docs/hangs.md).",
        shown="20 times the usual step, at least 60")
    grace_period: float = option(POLICY, o.SECONDS_OR_0, 30.0,
        "Time for the other workers to finish after the first one has. Also the time to leave a "
        "host whose agent gets SIGTERM, SIGUSR1 or SIGUSR2 (preemption, Slurm's --signal), and the "
        "time to leave and write a checkpoint when elasticrun gets one of them.")
    finish_timeout: float = option(POLICY, o.SECONDS_OR_0, 1800.0,
        "End a job of a plain script this long after a rank has ended with 0 and others have not; "
        "0: never. An elastic script is watched by --hang-timeout.")
    stop_grace: float = option(POLICY, o.SECONDS_OR_0, 30.0,
        "Time between SIGTERM and SIGKILL for a worker that has to stop, so that a script can save "
        "its state.",
        aliases=("--shutdown-timeout",))
    last_call: float = option(POLICY, o.SECONDS_OR_0, 0.02,
        "Changes that arrive within this time of each other become one round.")
    notice_spread: float = 0.0  # between the first and the last notice to the parts of a job
    start_together: float = 0.0  # time to wait for more hosts and workers that start
    settle: float = 1.0  # before any step was finished: time to see whether every worker fails
    own_values: bool = False  # floats of a state may differ between ranks, as in Horovod's
    plain_after: float = 10.0  # a script that never calls our API for this long is a plain one
    slow_for: float = 5.0  # a worker is slow for this long before it is replaced
    replace_pause: float = 60.0  # between the replacements of two slow hosts
    expects: str = ""  # why the job waits for so many, and how to say otherwise
    fixed_hosts: bool = False  # the hosts were listed; no others can come
    one_host_per_machine: bool = False  # two names of a machine are one host
    tf_roles: TfRoles | None = option(Heading.TENSORFLOW, o.TF_ROLES, None,
        "The roles of the workers, given out in this order, the oldest worker first; worker=* are "
        "all others. Implies --tf-config.", shown="worker=*")

    # Hosts that refused us, or lacked something, before the job began; that has been said.
    refused_hosts: tuple[tuple[str, str], ...] = ()  # with the reason
    # Hosts checked before the job; (): the job checks all of them itself. None: no checks.
    checked_hosts: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class DriverOptions:
    """The driver's own options; they do not reach the core."""

    bind_host: str = "127.0.0.1"  # a numeric address; 0.0.0.0: all
    bind_port: int = 0  # 0: any free one
    ports: PortRange | None = None  # --ports: the only ones to listen at
    given_host: str = ""  # as the user names it; "": the user does not
    discovery_interval: float = option(Heading.HOSTS, o.SECONDS, 1.0,
        "Seconds between two runs of the discovery script, or two reads of the hostfile.")
    insecure: bool = option(Heading.TRUST, o.FLAG, False,
        "Speak plain HTTP to other hosts, too. By default, what leaves this machine is TLS, with a "
        "certificate that is made for the job and that only its own processes know.")
    tls_cert: str | None = option(Heading.TRUST, o.text("FILE"), None,
        "A certificate of your own for the job's rendezvous, with its chain (PEM).",
        shown="one is made for each job that listens beyond this machine")
    tls_key: str | None = option(Heading.TRUST, o.text("FILE"), None,
        "The key of --tls-cert (PEM, without a password).")
    tls_ca: str | None = option(Heading.TRUST, o.text("FILE"), None,
        "Certificates of your CA (PEM): agents, workers and nodes that join check the chain of "
        "--tls-cert, and the host of --rdzv-endpoint or --join.",
        shown="they take the certificate itself and no other")

    @property
    def any_port(self) -> tuple[int, ...]:
        """The ports for what has none of its own, in the order to try them; 0: any free one."""
        return (0,) if self.ports is None else listening_ports(self.ports)
    limit: Limits = option(Heading.TRUST, LIMITS, Limits(),
        "Another bound for what clients may use of the driver, such as store_bytes=8589934592; may "
        "be repeated (docs/security.md).", shown="fits 10,000 members")
    debug: bool = option(Heading.OTHER, o.FLAG, False,
        "Check the driver's own invariants after every event.")
