"""Carries out a command line in one pass: values, facts of this machine, plan; then act or show.

`launcher.cli` calls `run`. No decision about the job is taken here.
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec.structs

from elastic_driver.errors import ClusterError, ExitCode
from elastic_driver.runtime.run_dir import RunDir
from launcher.backends.mpi_ranks import meet_ranks, started_ranks
from launcher.backends.registry import make_backend
from launcher.build_info import render_version
from launcher.check_build import render_build
from launcher.facts import collect_facts
from launcher.join.identity import claim_port
from launcher.join.secret import read_secret
from launcher.join.serve_address import look
from launcher.options import table as o
from launcher.options.help import render_help
from launcher.options.record import Option
from launcher.options.values import CommandLine, resolve
from launcher.plan.hosts import JoinedHosts
from launcher.plan.launch import LaunchPlan, make_plan
from launcher.plan.role import Join, Serve, decide_role, with_node_count
from launcher.plan.sizes import slots_of_a_host
from launcher.plan.workers import worker_command
from launcher.submit.checks import check_plan

ANY_HOST = "HOST"  # in a dry run, for hosts that are to be found
_SHOW: dict[Option[bool], Callable[[], str]] = {
    o.HELP: render_help,
    o.VERSION: render_version,
    o.CHECK_BUILD: render_build,
}


def run(argv: Sequence[str]) -> int:
    """Do what `argv` says: values, facts of this machine, plan, and then act or show.

    Returns the exit status, raises `ElasticError` for everything that is not a bug.
    """
    line = resolve(argv, os.environ)
    for option, render in _SHOW.items():
        if line.values[option]:
            print(render(), flush=True)
            return int(ExitCode.OK)
    line = replace(line, values=with_node_count(line.values, os.environ))
    role = decide_role(line.values, os.environ, look())
    if isinstance(role, Join):
        return join_job(line, role)
    facts = collect_facts(line, os.environ, role)
    if line.values[o.BACKEND] == "mpi" and started_ranks(os.environ) > 1:
        ranks = meet_ranks()
        if ranks is None:  # rank 0 runs the job
            return int(ExitCode.OK)
        facts = msgspec.structs.replace(facts, ranks=ranks)
    plan = make_plan(line, facts)
    run_dir = RunDir(Path(plan.state_dir), plan.spec.run_id)
    dry = line.values[o.DRY_RUN]
    check_plan(plan, os.environ, create=not dry)
    if dry:
        agents = describe_agents(plan, os.environ)
        print(plan.render(origins=line.values[o.VERBOSE], agents=agents), flush=True)
        return int(ExitCode.OK)
    for note in plan.notes:
        print(f"elasticrun: {note}", file=sys.stderr)
    if isinstance(plan.hosts, JoinedHosts) and role is not None:
        return serve_job(line, plan, plan.hosts, role, run_dir)
    from launcher.submit.submit import submit  # noqa: PLC0415 - aiohttp's import is not for --help

    return submit(plan, run_dir)


def describe_agents(plan: LaunchPlan, environ: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return (host, what would run there) for --dry-run; `HOST` stands for hosts to be found."""
    if isinstance(plan.hosts, JoinedHosts):
        return []
    hosts = plan.hosts.hosts or ()
    backend = make_backend(plan.backend, plan.backend_job(environ, hosts))

    def describe(host: str) -> str:
        try:
            return backend.describe(host)
        except ClusterError as error:
            return str(error)

    named = [host for host, slots in hosts if slots] or [ANY_HOST]
    return [(host, describe(host)) for host in named]


def serve_job(
    line: CommandLine, plan: LaunchPlan, hosts: JoinedHosts, role: Serve, run_dir: RunDir
) -> int:
    """Hold a job that nodes join; if another process here was quicker, join that one."""
    from launcher.join.serve import serve  # noqa: PLC0415 - see `run`

    with claim_port(role.port) as ours:
        if role.by_name and not ours:
            return join_job(line, Join(role.host, role.port))
        return serve(plan, hosts, run_dir)


def join_job(line: CommandLine, role: Join) -> int:
    """Take part in a job that is served elsewhere."""
    from launcher.join.node import JoinPlan, join  # noqa: PLC0415 - see `run`

    values, facts = line.values, collect_facts(line, os.environ)
    RunDir(Path(facts.state_dir), facts.run_id)  # raises for a name that cannot be one
    token_file = values[o.TOKEN_FILE]
    if token_file is not None:
        read_secret(token_file)  # raises at once, and not when a server is found
    plan = JoinPlan(
        host=role.host,
        port=role.port,
        slots=slots_of_a_host(values, facts.machine),
        token_file=token_file,
        run_id=values[o.RUN_ID],
        state_dir=Path(facts.state_dir),
        start_timeout=values[o.START_TIMEOUT],
        elastic_timeout=values[o.ELASTIC_TIMEOUT],
        command=worker_command(line.command, facts.python) if line.command else (),
        quiet=values[o.QUIET],
    )
    if values[o.DRY_RUN]:
        print(plan.render(), flush=True)
        return int(ExitCode.OK)
    return join(plan)
