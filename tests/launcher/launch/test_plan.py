"""From a command line to settings and hosts: the rules of horovodrun and torchrun."""

from __future__ import annotations

import pytest

from elastic_driver.errors import ClusterError, ElasticError, UsageError
from launcher.launch.host_source import DiscoveredHosts, Facts, FixedHosts, MachineFacts
from launcher.launch.plan import LaunchPlan, make_plan
from launcher.options.given import resolve

SCRIPT = ("--host-discovery-script", "./find.sh")


def plan(
    *argv: str,
    command: tuple[str, ...] = ("train.py",),
    machine: MachineFacts = MachineFacts(cpus=8, gpus=0),
    hostfile: str | None = None,
    **environ: str,
) -> LaunchPlan:
    facts = Facts("run", "/state", "/work", "/usr/bin/py", machine, hostfile, environ)
    return make_plan(resolve([*argv, "--", *command], environ), facts)


def sizes(*argv: str, **more: str) -> tuple[int, int, int | None, int | None]:
    s = plan(*argv, **more).settings
    return s.start_np, s.min_np, s.max_np, s.start_min_np


# ---- sizes -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "start", "least", "most", "start_least", "hosts"),
    [
        # this machine
        ((), 1, 1, None, None, [("localhost", 1)]),
        (("-np", "3"), 3, 1, 3, None, [("localhost", 3)]),
        (("-np", "2", "--max-np", "4"), 2, 1, 4, None, [("localhost", 4)]),
        (("-np", "4", "--min-np", "2"), 4, 2, 4, 2, [("localhost", 4)]),
        (("--min-np", "2", "--max-np", "4"), 4, 2, 4, 2, [("localhost", 4)]),
        (("--slots-per-host", "4"), 4, 1, None, None, [("localhost", 4)]),
        (("-np", "2", "--slots-per-host", "4"), 2, 1, 2, None, [("localhost", 4)]),
        (("--standalone", "--nproc-per-node", "2"), 2, 1, None, None, [("localhost", 2)]),
        (("--nnodes", "1", "--nproc-per-node", "2"), 2, 2, 2, 2, [("localhost", 2)]),
        (("--nnodes", "1:4", "--nproc-per-node", "2"), 2, 2, 8, 2, [("localhost", 2)]),
        # fixed lists
        (("-H", "a:2,b:2"), 4, 1, None, None, [("a", 2), ("b", 2)]),
        (("-H", "a:2,b:2", "-np", "3"), 3, 1, 3, None, [("a", 2), ("b", 2)]),
        (("-H", "a:2,b:2", "--max-np", "3"), 3, 1, 3, None, [("a", 2), ("b", 2)]),
        (("-H", "a,b", "--slots-per-host", "3"), 6, 1, None, None, [("a", 3), ("b", 3)]),
        (("-H", "a,b", "--nnodes", "1:2", "--nproc-per-node", "2"), 4, 2, 4, 2,
         [("a", 2), ("b", 2)]),
    ],
)  # fmt: skip
def test_sizes_on_known_hosts(
    argv: tuple[str, ...],
    start: int,
    least: int,
    most: int | None,
    start_least: int | None,
    hosts: list[tuple[str, int]],
) -> None:
    made = plan(*argv)
    assert isinstance(made.hosts, FixedHosts)
    assert list(made.hosts.hosts) == hosts
    assert sizes(*argv) == (start, least, most, start_least)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ((), (1, 1, None, None)),
        (("-np", "3"), (3, 1, None, None)),
        (("--min-np", "2"), (2, 2, None, 2)),
        (("-np", "4", "--min-np", "2", "--max-np", "8"), (4, 2, 8, 2)),
        (("--nnodes", "2:4", "--nproc-per-node", "3"), (6, 6, 12, 6)),
    ],
)
def test_sizes_with_discovered_hosts(
    argv: tuple[str, ...], expected: tuple[int, int, int | None, int | None]
) -> None:
    assert sizes(*SCRIPT, *argv) == expected


@pytest.mark.parametrize(
    ("wanted", "machine", "slots"),
    [
        ("auto", MachineFacts(8, 0), 8),
        ("auto", MachineFacts(8, 2), 2),
        ("gpu", MachineFacts(8, 2), 2),
        ("cpu", MachineFacts(8, 2), 8),
    ],
)
def test_workers_of_a_node_are_counted_here(wanted: str, machine: MachineFacts, slots: int) -> None:
    made = plan("--nproc-per-node", wanted, machine=machine)
    assert made.settings.start_np == slots


def test_a_list_with_too_few_slots_is_told_at_once() -> None:
    with pytest.raises(ClusterError, match=r"need 4 slots, found 3 \(a:2, b:1 \(--hosts"):
        plan("-H", "a:2,b:1", "-np", "4")
    with pytest.raises(ClusterError, match="need 4 slots, found 2"):
        plan("--nnodes", "2", "--nproc-per-node", "2")


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ((), (1, 1, None)),
        (("--nnodes", "2:4"), (1, 2, 4)),
        (("--nnodes", "2:4", "--node-unit", "2"), (2, 2, 4)),
        (("--min-np", "2", "--node-unit", "2"), (2, 1, None)),
    ],
)
def test_bounds_on_the_number_of_hosts(
    argv: tuple[str, ...], expected: tuple[int, int, int | None]
) -> None:
    s = plan(*SCRIPT, *argv).settings
    assert (s.node_unit, s.min_hosts, s.max_hosts) == expected


def test_bounds_on_hosts_that_can_never_be_kept_are_told_at_once() -> None:
    with pytest.raises(UsageError, match="--node-unit 4: no multiple of it lies between 2 and 3"):
        plan(*SCRIPT, "--nnodes", "2:3", "--node-unit", "4")
    with pytest.raises(ClusterError, match=r"need 2 hosts .*, found 1 "):
        plan("-H", "a:4", "--node-unit", "2")


def test_a_short_list_that_is_enough_for_the_minimum_starts_without_waiting() -> None:
    made = plan("-H", "a:2,b:1", "-np", "4", "--min-np", "2")
    assert made.settings.start_np == 3
    assert made.notes == (
        "starting with 3 workers instead of 4: a:2, b:1 (--hosts) has no more slots",
    )


# ---- hosts -------------------------------------------------------------------------------


def test_a_hostfile_is_read_with_the_default_slots() -> None:
    made = plan("--hostfile", "hf", "--slots-per-host", "2", hostfile="a\nb slots=3 # big\n\n")
    assert made.hosts == DiscoveredHosts("hostfile", "hf", 2, 30.0, (("a", 2), ("b", 3)))
    assert made.settings.start_np == 5


def test_a_discovery_script_carries_its_interval_and_deadline() -> None:
    made = plan(*SCRIPT, "--discovery-interval", "0.5", "--discovery-timeout", "3", "--slots", "2")
    assert made.hosts == DiscoveredHosts("script", "./find.sh", 2, 3.0)
    assert made.driver.discovery_interval == 0.5


def test_of_two_sources_of_hosts_the_nearer_one_counts() -> None:
    made = plan("-H", "a:1", ELASTICRUN_HOST_DISCOVERY_SCRIPT="./find.sh")
    assert made.hosts == FixedHosts((("a", 1),), "--hosts")
    assert isinstance(plan("--standalone", ELASTICRUN_HOSTS="a:1").hosts, FixedHosts)


@pytest.mark.parametrize(
    ("argv", "gpus", "workers", "said"),
    [
        ((), 4, 4, "4 workers, one for each GPU of this machine; -np N starts N"),
        (("--standalone",), 1, 1, "1 worker, for the GPU of this machine; -np N starts N"),
        ((), 0, 1, "1 worker, because this machine has no GPU; -np N starts N"),
        (("-q",), 4, 4, ""),
        (("-np", "1"), 4, 1, ""),
        (("--nnodes", "1"), 4, 1, ""),
        (("--nproc-per-node", "xpu"), 4, 4, ""),
        (("--slots-per-host", "2"), 4, 2, ""),
        (("-H", "a,b"), 4, 2, ""),
        (SCRIPT, 4, 1, ""),
    ],
)
def test_without_any_size_all_gpus_of_this_machine_are_used(
    argv: tuple[str, ...], gpus: int, workers: int, said: str
) -> None:
    made = plan(*argv, machine=MachineFacts(cpus=8, gpus=gpus))
    assert made.settings.start_np == workers
    assert "".join(made.notes) == said


def test_a_nearer_size_in_other_words_replaces_a_farther_one() -> None:
    assert sizes("-np", "2", ELASTICRUN_NNODES="4") == (2, 1, 2, None)
    assert sizes("--nnodes", "1", "--nproc-per-node", "3", ELASTICRUN_NUM_PROC="9") == (3, 3, 3, 3)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("-H", "host:abc"), "'host:abc': 'abc' is not a number of slots"),
        (("-H", "-oProxyCommand=x"), "is not a host name"),
        (("-H", "a:1", "--standalone"), "--standalone and --hosts both say where to run"),
        (("-H", "a:1", *SCRIPT), "--host-discovery-script and --hosts both say where to run"),
        (("--min-np", "4", "-np", "2"), "--min-np 4 is more than --num-proc 2"),
        (("--min-np", "4", "--max-np", "2"), "--min-np 4 is more than --max-np 2"),
        (("-np", "4", "--max-np", "2"), "--num-proc 4 is more than --max-np 2"),
        (("-np", "4", "--nnodes", "2"), "--nnodes and --num-proc both set the size"),
        (("--nproc-per-node", "gpu"), "no GPU that is visible"),
        (("--nproc-per-node", "2", "--slots-per-host", "3"), "say the same; keep one of them"),
        (("--backend", "slurm"), "--backend slurm works inside an allocation only"),
        (("-q", "-v"), "-q and -v contradict each other"),
    ],
)
def test_contradictions_are_told_in_one_line(argv: tuple[str, ...], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        plan(*argv)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


# ---- the command -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "argv"),
    [
        (("train.py", "--lr", "1"), ("/usr/bin/py", "train.py", "--lr", "1")),
        (("-m", "pkg.train", "x"), ("/usr/bin/py", "-m", "pkg.train", "x")),
        (("python", "train.py"), ("python", "train.py")),
        (("sh", "-c", "echo $RANK"), ("sh", "-c", "echo $RANK")),
        (("./program", "-v"), ("./program", "-v")),
    ],
)
def test_scripts_and_modules_run_by_this_interpreter(
    command: tuple[str, ...], argv: tuple[str, ...]
) -> None:
    assert plan(command=command).spec.command == argv


@pytest.mark.parametrize("command", [(), ("-m",), ("",)])
def test_a_missing_command_is_a_usage_error(command: tuple[str, ...]) -> None:
    with pytest.raises(ElasticError) as caught:
        plan(command=command)
    assert caught.value.exit_code == 64


def test_warm_workers_are_the_agents_choice_unless_somebody_says() -> None:
    assert plan().spec.warm is None
    assert plan("--warm", "auto").spec.warm is None
    made = plan("--warm", "2", "--preload", "torch,sklearn.datasets").spec
    assert (made.warm, made.preload) == (2, ("torch", "sklearn.datasets"))


def test_virtual_workers_are_the_most_there_may_be_unless_somebody_says() -> None:
    assert "ELASTIC_VIRTUAL_WORKERS" not in plan().spec.env
    assert plan("--max-np", "4").spec.env["ELASTIC_VIRTUAL_WORKERS"] == "4"
    assert plan("--virtual-workers", "6").spec.env["ELASTIC_VIRTUAL_WORKERS"] == "6"


def test_slow_workers_are_replaced_only_where_asked_for() -> None:
    assert not plan().settings.replace_slow
    assert plan("--replace-slow").settings.replace_slow


def test_a_job_of_horovod_that_may_shrink_uses_all_slots_of_its_hosts() -> None:
    hosts = ("-H", "a:2,b:2", "-np", "2")
    assert plan(*hosts, "--min-np", "2").settings.max_np == 2
    assert plan("--horovod", *hosts, "--min-np", "2").settings.max_np is None
    assert plan("--horovod", *hosts).settings.max_np == 2
    assert plan("--horovod", *hosts, "--min-np", "2", "--max-np", "3").settings.max_np == 3
    assert plan("--horovod", *hosts).settings.start_together > plan(*hosts).settings.start_together


def test_hosts_with_failures_are_left_for_scripts_of_horovod_unless_somebody_says() -> None:
    assert plan().settings.failed_hosts == "keep"
    assert plan("--horovod").settings.failed_hosts == "leave"
    assert plan("--horovod", "--failed-hosts", "keep").settings.failed_hosts == "keep"
    assert plan("--failed-hosts", "leave").settings.failed_hosts == "leave"


def test_balance_is_off_unless_asked_for() -> None:
    assert "ELASTIC_BALANCE" not in plan().spec.env
    assert plan("--balance").spec.env["ELASTIC_BALANCE"] == "1"


def test_the_specification_carries_what_workers_need() -> None:
    spec = plan(
        *("--env", "A=1", "--network-interfaces", "eth0,eth1", "--log-dir", "logs", "--tee", "1"),
        *("--redirects", "2", "--local-ranks-filter", "1,0", "--heartbeat-timeout", "4"),
        *("--grace-period", "2", "--max-restarts", "7", "--prefix-output-with-timestamp"),
    ).spec
    assert spec.env == {
        "A": "1",
        "GLOO_SOCKET_IFNAME": "eth0,eth1",
        "NCCL_SOCKET_IFNAME": "eth0,eth1",
    }
    assert (spec.run_id, spec.cwd, spec.log_dir, spec.tee) == ("run", "/work", "logs", "1")
    assert (spec.redirects, spec.local_ranks_filter, spec.timestamp) == ("2", (0, 1), True)
    assert (spec.heartbeat_timeout, spec.grace_period, spec.max_restarts) == (4.0, 2.0, 7)


# ---- rendering ---------------------------------------------------------------------------


def test_a_plan_shows_what_would_run_and_who_said_so() -> None:
    made = plan("-v", "-np", "2", "--env", "API_KEY=hunter2", ELASTICRUN_MAX_NP="4")
    text = made.render()
    assert "command     /usr/bin/py train.py" in text
    assert "workers     start with 2, go on with 1 or more, at most 4" in text
    assert "set         --max-np 4  (ELASTICRUN_MAX_NP)" in text
    assert "events      /state/run/events.jsonl" in text
    assert "API_KEY" in text
    assert "hunter2" not in text


def test_a_long_list_of_hosts_is_cut_short() -> None:
    text = plan("-H", "n[001-100]:2").render()
    assert "n001:2, n002:2" in text
    assert "and 92 more" in text


# ---- Slurm, mpirun and variables ---------------------------------------------------------

IN_SLURM = {"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NTASKS": "4",
            "SLURM_TASKS_PER_NODE": "2(x2)"}  # fmt: skip
NODES = FixedHosts((("n1", 2), ("n2", 2)), "Slurm job 17", "17")


@pytest.mark.parametrize("argv", [(), ("--backend", "slurm"), ("-np", "3")])
def test_inside_an_allocation_its_nodes_are_the_hosts(argv: tuple[str, ...]) -> None:
    made = plan(*argv, **IN_SLURM)
    assert (made.hosts, made.backend) == (NODES, "slurm")
    assert made.agents.allocation == "17"


@pytest.mark.parametrize(
    "argv",
    [("--standalone",), ("-H", "a:2"), SCRIPT, ("--backend", "local"), ("--backend", "ssh")],
)
def test_whoever_says_where_to_run_is_not_in_the_allocation_unasked(argv: tuple[str, ...]) -> None:
    assert plan(*argv, **IN_SLURM).backend != "slurm"


def test_some_nodes_of_an_allocation_may_be_named_and_no_others() -> None:
    assert plan("--backend", "slurm", "-H", "n2:1", **IN_SLURM).settings.start_np == 1
    with pytest.raises(
        UsageError, match=r"n3 \(--hosts\) is not in Slurm job 17, whose nodes are n1"
    ):
        plan("--backend", "slurm", "-H", "n3:1", **IN_SLURM)


def test_workers_of_a_node_are_counted_as_slurm_has_it() -> None:
    gpus = {**IN_SLURM, "SLURM_GPUS_ON_NODE": "4"}
    made = plan("--nproc-per-node", "gpu", machine=MachineFacts(8, 0), **gpus)
    assert made.settings.start_np == 8


DETAIL = """\
JobId=17 JobName=x
   NumNodes=2 NumCPUs=4 NumTasks=2 CPUs/Task=1 ReqB:S:C:T=0:0:*:*
     Nodes=n1 CPU_IDs=0-2 Mem=500 GRES=gpu:a100:{}(IDX:0-3)
     Nodes=n2 CPU_IDs=0 Mem=500 GRES=gpu:a100:{}(IDX:0)
   TresPer{}=gres:gpu:4
"""


def plan_of_detail(detail: str, *argv: str) -> LaunchPlan:
    environ = {"SLURM_JOB_ID": "17"}
    machine = MachineFacts(8, 0)
    facts = Facts("run", "/state", "/work", "/py", machine, environ=environ, allocation_text=detail)
    return make_plan(resolve([*argv, "--", "train.py"], environ), facts)


@pytest.mark.parametrize(
    ("argv", "hosts", "sizes"),
    [
        ((), (3, 1), (4, 1, None)),
        (("--nproc-per-node", "gpu"), (3, 1), (4, 1, None)),
        (("--nproc-per-node", "cpu"), (3, 1), (4, 1, None)),
        (("--nproc-per-node", "2"), (2, 2), (4, 1, None)),
        (("-np", "2"), (3, 1), (2, 1, 2)),
        (("-np", "6", "--min-np", "2"), (3, 1), (4, 2, 6)),
        (("--nnodes", "2", "--nproc-per-node", "gpu"), (3, 1), (4, 2, 6)),
    ],
)
def test_nodes_of_unlike_size_have_workers_of_their_own_number(
    argv: tuple[str, ...], hosts: tuple[int, int], sizes: tuple[int, int, int | None]
) -> None:
    made = plan_of_detail(DETAIL.format(3, 1, "Job"), *argv)
    assert made.hosts.hosts == tuple(zip(("n1", "n2"), hosts, strict=True))
    assert (made.settings.start_np, made.settings.min_np, made.settings.max_np) == sizes
    assert made.agents.step_options == {"n1": ("--gpus=3",), "n2": ("--gpus=1",)}
    assert (made.backend, made.gpus, made.spec.virtual_local_rank) == ("slurm", True, False)


def test_a_worker_has_the_gpus_that_slurm_binds_to_a_task() -> None:
    detail = DETAIL.format(4, 4, "Task")
    made = plan_of_detail(detail)
    assert made.hosts.hosts == (("n1", 1), ("n2", 1))
    assert (made.spec.virtual_local_rank, made.spec.devices_of_a_worker) == (True, 4)
    made = plan_of_detail(detail, "--nproc-per-node", "4")
    assert (made.spec.virtual_local_rank, made.spec.devices_of_a_worker) == (False, 1)


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({**IN_SLURM, "SLURM_STEP_NUM_TASKS": "2"}, "srun has started elasticrun 2 times"),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "mpirun has started elasticrun 4 times"),
        ({"PMI_SIZE": "4"}, "mpirun has started elasticrun 4 times"),
    ],
)
def test_being_started_many_times_is_refused(variables: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        plan(**variables)


def test_the_ranks_of_mpirun_are_the_hosts_of_one_job() -> None:
    line = resolve(["--backend", "mpi", "--", "train.py"], {"OMPI_COMM_WORLD_SIZE": "3"})
    facts = Facts("run", "/state", "/work", "/py", MachineFacts(8, 0), ranks=(("a", 2), ("b", 1)))
    made = make_plan(line, facts)
    assert made.hosts == FixedHosts((("a", 2), ("b", 1)), "the ranks of mpirun")
    assert (made.backend, made.settings.start_np) == ("mpi", 3)


def test_variables_that_a_starter_cannot_bring_are_passed_on() -> None:
    shell = {"BASH_FUNC_module%%": "() { :\n}", "SBATCH_ACCOUNT": "a", "OMPI_MCA_btl": "tcp"}
    assert plan(**IN_SLURM, **shell).spec.env == {
        **{name: shell[name] for name in ("BASH_FUNC_module%%", "SBATCH_ACCOUNT")},
        **IN_SLURM,
    }
    by_mpirun = plan("--backend", "mpi", "-H", "n1:1", **shell)
    assert by_mpirun.spec.env == {"OMPI_MCA_btl": "tcp"}
    by_ssh = plan("-H", "n1:1", PWD="/home/ann/link", **shell)
    assert by_ssh.spec.env == {"PWD": "/home/ann/link"}


def test_other_hosts_get_useful_variables_and_those_that_were_named() -> None:
    shell = {"PATH": "/bin", "HOME": "/h", "FOO": "a secret", "NCCL_DEBUG": "INFO"}
    made = plan("-v", "-H", "n1:1", "-x", "FOO", "-x", "BAR", "--env", "NCCL_DEBUG=WARN", **shell)
    assert made.spec.env == {"PATH": "/bin", "FOO": "a secret", "NCCL_DEBUG": "WARN"}
    assert made.forwarded == ("PATH",)
    assert made.notes == ("-x BAR: it is not set here, and is not passed on",)
    shown = made.render()
    assert "variables   FOO NCCL_DEBUG\npassed on   PATH" in shown
    assert "a secret" not in shown


def test_workers_on_this_machine_inherit_and_need_nothing_passed_on() -> None:
    assert plan(PATH="/bin").spec.env == {}


@pytest.mark.parametrize(
    ("argv", "expects"),
    [
        (["-np", "2", "-H", "a,b"], "-np 2 (command line) asks for them; --min-np N begins"),
        (["--min-np", "2", "-H", "a,b"], "--min-np 2 (command line) asks for them; lower it"),
        (["-H", "a,b"], "every slot of the hosts is waited for; --min-np N begins with fewer"),
        (["--nnodes", "2", "-H", "a,b"], "--nnodes 2 (command line) asks for them: start the"),
    ],
)
def test_the_plan_says_why_the_job_waits_for_so_many(argv: list[str], expects: str) -> None:
    assert plan(*argv).settings.expects.startswith(expects)


def test_ports_reach_the_driver_and_the_agents_and_are_shown() -> None:
    made = plan("--ports", "29400-29463")
    assert made.driver.ports == made.spec.ports == (29400, 29463)
    assert made.driver.any_port[0] == 29463
    assert "any free port of --ports 29400-29463" in made.render()
    outside = plan("--ports", "29400-29463", "--rdzv-endpoint", "0.0.0.0:5000")
    assert (
        "port 5000 of the rendezvous is not in --ports 29400-29463: open it, too" in outside.notes
    )
    assert plan().driver.any_port == (0,)
