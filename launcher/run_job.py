"""Carries out a command line: reads the options, makes a plan, and runs it or shows it.

`launcher.cli` calls `run`. This module decides nothing about the job.
"""

import contextlib
import glob
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from elastic_driver import console, contract
from elastic_driver.errors import ClusterError, ElasticError, ExitCode, UsageError
from elastic_driver.runtime.backend import BackendJob
from elastic_driver.runtime.discovery import DiscoveryError
from elastic_driver.runtime.run_dir import RunDir, default_state_dir, new_run_id
from elastic_driver.settings import Settings
from launcher import version
from launcher.backends.base import BACKENDS, entry_points, make_backend
from launcher.backends.mpi_ranks import meet_ranks, started_ranks
from launcher.backends.slurm_allocation import describe_job, job_id_of
from launcher.edge import give_memory_back, keep_memory_private, open_streams
from launcher.launch import host_source as where
from launcher.launch.checks import can_serve, check_database, check_plan, names_this_machine
from launcher.launch.host_source import Facts, JoinedHosts, MachineFacts
from launcher.launch.plan import (
    LaunchPlan,
    make_plan,
    slots_of_a_host,
    split_variables,
    worker_command,
)
from launcher.network import is_this_machine, own_name
from launcher.options.given import CommandLine, render_help, resolve
from launcher.options.table import LaunchOptions

if TYPE_CHECKING:
    from elastic_driver.runtime.journal.replay import ResumedRun
    from elastic_driver.runtime.results import JobResult
    from launcher.launch.etcd_run import EtcdRun


def render_version() -> str:
    """Return the line of `--version`."""
    return f"elasticrun {version()}"


def run(argv: Sequence[str]) -> int:
    """Carry out the command line `argv` (without the program's name); return the exit status.

    Raises `ElasticError` for everything that is not a bug.
    """
    keep_memory_private()
    give_memory_back()
    try:
        done = carry_out(argv)
    except ElasticError as error:
        if not _wants_json(argv):
            raise
        console.say_note(str(error), as_json=True, event="error")
        return int(error.exit_code)
    if isinstance(done, int):
        return done
    from launcher.launch.submit import write_error_file  # noqa: PLC0415 - see `run_job`

    if problem := write_error_file(done, os.environ):
        console.say_note(problem, as_json=_wants_json(argv))
    return done.exit_code


def _wants_json(argv: Sequence[str]) -> bool:
    with contextlib.suppress(ElasticError):
        return resolve(argv, os.environ).options.log_format == "json"
    return False


def carry_out(argv: Sequence[str]) -> "JobResult | int":
    """Carry out `argv`; return the result of the job, or the exit status if no job ran here.

    Raises `ElasticError` for everything that is not a bug.
    """
    open_streams()
    line = resolve(argv, os.environ)
    options = line.options
    for asked, render in (
        (options.help, render_help),
        (options.version, render_version),
        (options.check_build, render_build),
    ):
        if asked:
            print(render(), flush=True)
            return int(ExitCode.OK)
    if options.tf_orchestrator:
        return serve_tensorflow(line)
    if options.standby:
        from launcher.launch.etcd_run import stand_by  # noqa: PLC0415 - see `run_job`

        run_dir = RunDir(state_dir_of(options, os.environ), options.run_id or "unnamed")
        return stand_by(line, run_dir, os.environ, go_on=run_job, say=sayer(options))
    if options.resume and not line.command:
        return resume_job(line)
    return run_job(line)


def resume_job(given: CommandLine) -> "JobResult | int":
    """Go on with the job that --run-id names; return its result."""
    from elastic_driver.runtime.results import JobResult  # noqa: PLC0415 - see `run_job`
    from launcher.launch import resume  # noqa: PLC0415

    run_dir, found = resume.take_named(given, state_dir_of(given.options, os.environ))
    if isinstance(found, JobResult):
        return show_result(found, run_dir, given.options)
    try:
        return run_job(resume.line_of(found, given, os.environ), (run_dir, found))
    finally:
        run_dir.leave()  # if the driver has not done so


def run_job(
    line: CommandLine,
    former: "tuple[RunDir, ResumedRun] | None" = None,
    etcd: "EtcdRun | None" = None,
) -> "JobResult | int":
    """Begin the job of this command line, or go on with it if its driver has died.

    `former`: the job to go on with, and its folder, which is locked. `etcd`: the run, which this
    process has taken as a standby.
    """
    options = line.options
    line = where.with_node_count(line, os.environ)
    goes_on = former is not None or _is_unfinished(options)
    role = where.decide_role(line, os.environ, _is_named if goes_on else can_serve)
    if isinstance(role, where.Join) and former is not None:
        raise UsageError(f"cannot resume: {role.host} is not an address of this machine")
    if isinstance(role, where.Join):
        return join_job(line, role)
    facts = replace(collect_facts(line, os.environ), role=role)
    if former is not None:
        state_dir = str(former[0].path.parent)
        run_id = former[0].run_id
        facts = replace(facts, state_dir=state_dir, run_id=run_id)
    if options.backend == "mpi" and started_ranks(os.environ) > 1:
        if (ranks := meet_ranks()) is None:  # rank 0 runs the job
            return int(ExitCode.OK)
        facts = replace(facts, ranks=ranks)
    facts = with_allocation(line, facts)
    plan = make_plan(line, facts)
    run_dir = RunDir(Path(plan.state_dir), plan.spec.run_id) if former is None else former[0]
    check_plan(plan, create=not options.dry_run)
    with contextlib.ExitStack() as stack:
        stack.callback(run_dir.leave)
        if etcd is None and options.in_etcd:
            from launcher.launch.etcd_run import EtcdRun, check_journal  # noqa: PLC0415 - not for --help

            check_journal(plan, os.environ)
        if etcd is None and options.in_etcd and not options.dry_run:
            named = EtcdRun(
                options, os.environ, run_dir, sayer(options), insecure=plan.driver.insecure
            )
            etcd = stack.enter_context(named)
        return drive(plan, run_dir, None if former is None else former[1], etcd)


def _is_unfinished(options: LaunchOptions) -> bool:
    """Return whether the options name a job that has not ended, and whose driver has."""
    if options.run_id is None:
        return False
    run_dir = RunDir(state_dir_of(options, os.environ), options.run_id)
    run_dir.refuse_strangers()
    holder = run_dir.lock.holder if run_dir.unfinished else None
    return holder is not None and not holder.lives


def _is_named(host: str, _port: int) -> bool:
    """Return whether a host is this machine: a job that goes on may have another port."""
    return names_this_machine(host)


def drive(
    plan: LaunchPlan, run_dir: RunDir, former: "ResumedRun | None", etcd: "EtcdRun | None"
) -> "JobResult | int":
    """Run the driver of a job, or show the plan; return the result of the job."""
    from elastic_driver.runtime.results import JobResult  # noqa: PLC0415 - not for --help
    from launcher.launch import resume  # noqa: PLC0415

    line = plan.line
    options = plan.options
    cwd = plan.spec.cwd
    if etcd is not None:
        run = etcd.find(line, cwd, former)
    else:
        run = resume.take_unfinished(line, run_dir, cwd) if former is None else former
    if isinstance(run, JobResult):
        return show_result(run, run_dir, options)
    notes = plan.notes if run is None else (*plan.notes, resume.describe(run_dir, run))
    if options.dry_run:
        agents = describe_agents(plan)
        binding = describe_binding(plan)
        print(replace(plan, notes=notes).render(agents, binding), flush=True)
        return int(ExitCode.OK)
    for note in notes:
        sayer(options)(note)
    if run is None and options.stats_db is not None:
        check_database(options.stats_db)
    if isinstance(plan.hosts, JoinedHosts):
        return serve_job(plan, plan.hosts, run_dir, run, etcd)
    from launcher.launch.submit import submit  # noqa: PLC0415 - aiohttp is not for --help

    store = None if etcd is None else etcd.take(run)
    if options.brain is not None:
        from launcher.launch.brain_job import submit_to_brain  # noqa: PLC0415

        return submit_to_brain(plan, run_dir, run, store, sayer(options))
    return submit(plan, run_dir, run, store)


def sayer(options: LaunchOptions) -> Callable[[str], None]:
    """Return a function that shows a sentence to the user."""
    return partial(console.say_note, as_json=options.log_format == "json")


def show_result(result: "JobResult", run_dir: RunDir, options: LaunchOptions) -> "JobResult":
    """Say how a job has ended that was to go on; return its result."""
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(result.ended))
    sayer(options)(f"run {run_dir.run_id} is over since {when}: {result.reason}")
    return result


def describe_agents(plan: LaunchPlan) -> list[tuple[str, str]]:
    """Return (host, its agent's command line) for --dry-run; `HOST`: any host found later."""
    if isinstance(plan.hosts, JoinedHosts):
        return []
    backend = make_backend(plan.backend, plan.agents)
    described = []
    for host in [host for host, slots in plan.agents.hosts if slots] or ["HOST"]:
        try:
            described.append((host, backend.describe(host)))
        except ClusterError as error:
            described.append((host, str(error)))
    return described


def describe_binding(plan: LaunchPlan) -> list[tuple[int, str]]:
    """Return (slot, its processors) of this machine, if it is a host and workers are bound."""
    slots = sum(n for host, n in plan.hosts.hosts or () if is_this_machine(host))
    if plan.spec.bind == "none":
        return []
    from launcher.agent import environment as binding  # noqa: PLC0415 - not for --help

    cores = binding.usable_cores()
    nodes = binding.gpu_nodes({**plan.agents.environ})
    chosen = (binding.choose(plan.spec.bind, s, slots, cores, nodes) for s in range(slots))
    return list(enumerate(map(binding.in_words, chosen)))


def serve_job(
    plan: LaunchPlan,
    hosts: JoinedHosts,
    run_dir: RunDir,
    run: "ResumedRun | None",
    etcd: "EtcdRun | None",
) -> "JobResult | int":
    """Run the driver of a job that nodes join; if another process here does so already, join it."""
    from launcher.join.driver_search import claim_port  # noqa: PLC0415 - see `run`
    from launcher.join.first_node import serve  # noqa: PLC0415

    with claim_port(hosts.role.port, os.environ, sayer(plan.options)) as ours:
        if hosts.role.by_name and not ours:
            return join_job(plan.line, where.Join(hosts.role.host, hosts.role.port))
        return serve(plan, hosts, run_dir, run, None if etcd is None else etcd.take(run))


def serve_tensorflow(line: CommandLine) -> "JobResult | int":
    """Serve TensorFlow nodes, without a job."""
    from launcher.join.driver_search import read_secret  # noqa: PLC0415 - see `run`
    from launcher.join.first_node import serve_tensorflow as serve  # noqa: PLC0415

    if line.command:
        raise UsageError("--tf-orchestrator runs no command; others start the TensorFlow nodes")
    plan = make_plan(replace(line, command=("true",)), collect_facts(line, os.environ))
    run_dir = RunDir(Path(plan.state_dir), plan.spec.run_id)
    secrets = () if line.options.token_file is None else (read_secret(line.options.token_file),)
    if line.options.dry_run:
        host, port = line.options.rdzv_endpoint
        print(f"serves      TensorFlow nodes at {host}{f':{port}' if port else ', any free port'}")
        return int(ExitCode.OK)
    return serve(plan, run_dir, secrets)


def join_job(line: CommandLine, role: where.Join) -> int:
    """Take part in a job that another node serves."""
    from launcher.join.driver_search import JoinPlan, read_secret  # noqa: PLC0415 - see `run`
    from launcher.join.node import join  # noqa: PLC0415 - see `run`

    options = line.options
    facts = collect_facts(line, os.environ)
    RunDir(Path(facts.state_dir), facts.run_id)  # raises for a name that is not usable
    if options.token_file is not None:
        read_secret(options.token_file)  # raises now, before a server is found
    command: tuple[str, ...] = ()
    if line.command:
        _own, words = split_variables(line.command)
        command = worker_command(words, facts.python, script=options.run_path)
    slots = slots_of_a_host(options, facts.machine)
    plan = JoinPlan(
        server=role,
        slots=slots,
        options=options,
        settings=line.fill(Settings),
        state_dir=Path(facts.state_dir),
        command=command,
        insecure=line["insecure"],
        tls_ca=line["tls_ca"],
    )
    if options.dry_run:
        print(f"joins       {plan.place}\nworkers     {slots or 'as many as the server says'}")
    for note in line.warnings:
        print(f"note        {note}") if options.dry_run else plan.say(note)
    if options.dry_run:
        return int(ExitCode.OK)
    return join(plan)


# ---- the facts of this machine -----------------------------------------------------------


def collect_facts(line: CommandLine, environ: Mapping[str, str]) -> Facts:
    """Return the facts of this machine.

    Raises UsageError for an unreadable hostfile, or a working folder that is gone.
    """
    try:
        cwd = os.getcwd()
    except FileNotFoundError:
        raise UsageError("the working folder has been deleted; cd to one that exists") from None
    name, argument = where.choose_discovery(line) or ("", "")
    return Facts(
        run_id=line.options.run_id or new_run_id(time.time()),
        state_dir=str(state_dir_of(line.options, environ)),
        cwd=cwd,
        python=sys.executable,
        machine=this_machine(environ),
        hostfile_text=read_hostfile(argument) if name == where.HOSTFILE else None,
        environ=dict(environ),
        name=own_name(),
    )


def with_allocation(line: CommandLine, facts: Facts) -> Facts:
    """Return the facts with what Slurm says of the job we run in, if agents are started there."""
    if facts.role is not None or line.options.brain is not None:
        return facts
    job_id = job_id_of(facts.environ)
    if job_id is None or not where.may_use_allocation(line):
        return facts
    try:
        return replace(facts, allocation_text=describe_job(job_id, facts.environ))
    except DiscoveryError as problem:
        sayer(line.options)(
            f"{problem}; what Slurm job {job_id} has of its nodes is read from SLURM_* variables, "
            "which do not show all GPUs"
        )
        return facts


def state_dir_of(options: LaunchOptions, environ: Mapping[str, str]) -> Path:
    """Return the folder of all runs."""
    return Path(options.state_dir).absolute() if options.state_dir else default_state_dir(environ)


def this_machine(environ: Mapping[str, str]) -> MachineFacts:
    """Return the cores and accelerators, without importing torch (which takes a second)."""
    visible = next((environ[n] for n in contract.VISIBLE_DEVICES if n in environ), None)
    if visible is None:
        gpus = next(filter(None, (len(glob.glob(files)) for files in _ACCELERATORS)), 0)
    else:
        # Everything is ignored from the first invalid entry on; -1 is the usual one.
        listed = [entry.strip() for entry in visible.split(",")]
        gpus = next((n for n, e in enumerate(listed) if not e or e.startswith("-")), len(listed))
    return MachineFacts(cpus=len(os.sched_getaffinity(0)), gpus=gpus)


# The files of NVIDIA's, AMD's, Intel's and Huawei's accelerators, one each.
_ACCELERATORS = (
    *("/dev/nvidia[0-9]*", "/sys/bus/pci/drivers/amdgpu/*:*"),
    *("/sys/bus/pci/drivers/xe/*:*", "/dev/davinci[0-9]*"),
)


def read_hostfile(path: str) -> str:
    """Return the text of a hostfile; raises UsageError if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot read the hostfile {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"the hostfile {path} is not UTF-8 text") from None


# ---- --check-build -----------------------------------------------------------------------


def render_build() -> str:
    """Return a line for each capability, `[X]` for those of this installation (as horovodrun)."""
    lines = [f"elastic-driver {version()}, Python {platform.python_version()}", ""]
    lines += ["Backends that start agents:", *map(_backend_line, entry_points(BACKENDS)), ""]
    lines += ["Collectives (torch.distributed):", *_collectives(), ""]
    lines += ["Tools:", _line(shutil.which("nvidia-smi") is not None, "nvidia-smi")]
    return "\n".join(lines)


def _backend_line(name: str) -> str:
    try:
        make_backend(name, BackendJob(environ=os.environ, allocation="0")).check(())
    except UsageError as error:
        return _line(False, f"{name} ({error})")
    return _line(True, name)


def _collectives() -> list[str]:
    try:
        import torch  # noqa: PLC0415 - the import takes a second
        import torch.distributed as dist  # noqa: PLC0415
    except ImportError as error:
        return [_line(False, f"torch ({error}); install it: pip install 'elastic-driver[torch]'")]
    if not dist.is_available():
        return [_line(False, f"torch {torch.__version__} was built without torch.distributed")]
    from elastic_driver.worker.world.groups import accelerator_names  # noqa: PLC0415 - uses torch

    _kind, own = accelerator_names()
    on_device = dist.is_backend_available(own) and torch.accelerator.is_available()
    return [
        _line(True, f"torch {torch.__version__}"),
        _line(dist.is_gloo_available(), "gloo"),
        _line(on_device, f"{own}, with a GPU"),
        _line(dist.is_mpi_available(), "mpi"),
    ]


def _line(there: bool, name: str) -> str:
    return f"    [{'X' if there else ' '}] {name}"
