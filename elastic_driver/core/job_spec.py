"""The job's specification: the launcher writes it, and agents run workers by it. Pure data."""

from dataclasses import dataclass

from elastic_driver.options import (
    BIND,
    FLAG,
    NUMBERS,
    PORTS,
    STREAMS,
    Heading,
    names,
    option,
    text,
    whole,
    whole_or,
)


# fmt: off
@dataclass(frozen=True)
class JobSpec:
    """The command that every worker of the job runs, and its settings; no secrets."""

    run_id: str
    command: tuple[str, ...]  # argv of a worker
    cwd: str
    env: dict[str, str]  # added to the agent's own environment
    heartbeat_timeout: float  # seconds
    max_restarts: int  # shown to workers as TORCHELASTIC_MAX_RESTARTS
    heartbeat_interval: float = 0.0  # seconds between an agent's heartbeats; 0: it sends none
    hang_timeout: float | None = None  # seconds without progress; None: adapts, 0: never
    grace_period: float = 0.0  # seconds; the time to leave a host that is about to go; 0: none
    driver_timeout: float = 0.0  # seconds to wait for the next driver; 0: end with this one
    log_dir: str | None = option(Heading.OUTPUT, text("DIR"), None,
        "Also write each worker's output to files below DIR.", aliases=("--output-filename",))
    tee: str | None = option(Heading.OUTPUT, STREAMS, None,
        "With --log-dir: streams that go both to the terminal and to files.", aliases=("-t",),
        shown="those that are not redirected")
    redirects: str = option(Heading.OUTPUT, STREAMS, "0",
        "With --log-dir: streams that go to files only. 0 none, 1 stdout, 2 stderr, 3 both; per "
        "local rank as 0:3,1:1.", aliases=("-r",))
    local_ranks_filter: tuple[int, ...] | None = option(Heading.OUTPUT, NUMBERS, None,
        "Show only these local ranks of each host on the terminal.")
    timestamp: bool = option(Heading.OUTPUT, FLAG, False,
        "Put the time in front of every line of the workers.",
        flag="prefix-output-with-timestamp", aliases=("--prefix-timestamp", "-prefix-timestamp"))
    horovod: bool = option(Heading.HOROVOD, FLAG, False,
        "Run a script that says 'import horovod.torch' as it is: the name then means "
        "elastic_driver.horovod.torch (docs/horovod.md).")
    keep_output: int = option(Heading.OUTPUT, whole("MIB"), 64,
        "MiB of the workers' output that the run's folder keeps for elasticctl logs; 0: none.")
    preload: tuple[str, ...] = option(Heading.START, names("MODULES"), ("torch",),
        "Modules that a warm process has imported before a worker is forked from it, with commas "
        "between them (docs/warm-workers.md).")
    warm: int | None = option(Heading.START, whole_or("auto"), None,
        "Processes kept warm on each host for new workers; 0: every worker starts as a new "
        "process.",
        shown="auto: one, if the command is Python and imports more than the standard library; "
        "none with --tf-config")
    ports: tuple[int, int] | None = option(Heading.START, PORTS, None,
        "Listen at these ports only, on all hosts: rendezvous, probes, torch's stores, gloo, "
        "TensorFlow. 64 are enough for hosts of 8 workers (docs/firewalls.md).",
        shown="any free ports")
    bind: str = option(Heading.START, BIND, "none",
        "Bind each worker to processors. numa: those of the NUMA node of its GPU, or its part of "
        "the nodes; core: cores of its own there (docs/binding.md).",
        aliases=("--numa-binding", "--bind-to", "-bind-to"))
    virtual_local_rank: bool = option(Heading.START, FLAG, False,
        "Each worker sees only the GPU of its slot, and its LOCAL_RANK is 0 (as in torchrun).")
    verify_state: bool = option(Heading.POLICY, FLAG, True,
        "Compare what the ranks keep after every change of the world, and every so many commits "
        "(docs/verify-state.md), or do not.", shown="on")
    rehearse: bool = True  # a warm parent takes a tiny training step
    devices_of_a_worker: int = 1  # with virtual_local_rank
    slot_ports: int = 0  # free ports that each agent offers for its workers' servers
# fmt: on
