"""Carries out what a command line asks for: shows something, or runs a job to its end.

`launcher.cli` calls `run`. Here the plan meets this machine: facts are collected before, and
the parts of a running job are put together after. No decision about the job is taken here.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec.structs

from elastic_driver.errors import ExitCode
from elastic_driver.runtime.run_dir import RunDir, default_state_dir, new_run_id
from launcher import options as o
from launcher.backends.mpi_ranks import meet_ranks, started_ranks
from launcher.build_info import render_build, render_version
from launcher.commandline.help import render_help
from launcher.commandline.values import CommandLine, resolve
from launcher.join.find_server import look
from launcher.join.identity import claim_port, own_name
from launcher.join.secret import read_secret
from launcher.options import Option
from launcher.plan.joined import JoinedHosts
from launcher.plan.launch import Facts, LaunchPlan, make_plan, worker_command
from launcher.plan.role import Join, Serve, decide_role, with_node_count
from launcher.plan.sizes import slots_of_a_host
from launcher.submit.checks import check_plan, read_hostfile, this_machine, working_folder

_SHOW: dict[Option[bool], Callable[[], str]] = {
    o.HELP: render_help,
    o.VERSION: render_version,
    o.CHECK_BUILD: render_build,
}


def run(argv: Sequence[str]) -> int:
    """Do what `argv` says; returns the exit status, raises `ElasticError` for the rest."""
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
        if ranks is None:
            return int(ExitCode.OK)
        facts = msgspec.structs.replace(facts, ranks=ranks)
    plan = make_plan(line, facts)
    run_dir = RunDir(Path(plan.state_dir), plan.spec.run_id)
    dry = line.values[o.DRY_RUN]
    check_plan(plan, os.environ, create=not dry)
    if dry:
        print(plan.render(origins=line.values[o.VERBOSE]), flush=True)
        return int(ExitCode.OK)
    for note in plan.notes:
        print(f"elasticrun: {note}", file=sys.stderr)
    if isinstance(plan.hosts, JoinedHosts) and role is not None:
        return serve_job(line, plan, plan.hosts, role, run_dir)
    from launcher.submit.submit import submit  # noqa: PLC0415 - aiohttp's import is not for --help

    return submit(plan, run_dir)


def serve_job(
    line: CommandLine, plan: LaunchPlan, hosts: JoinedHosts, role: Serve, run_dir: RunDir
) -> int:
    """Hold a job that nodes join; where another process here was quicker, join that one."""
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


def collect_facts(
    line: CommandLine, environ: Mapping[str, str], role: Serve | None = None
) -> Facts:
    """What planning has to know of this machine; raises UsageError for an unreadable hostfile."""
    values = line.values
    cwd = working_folder()
    state_dir = values[o.STATE_DIR]
    hostfile = values[o.HOSTFILE]
    return Facts(
        run_id=values[o.RUN_ID] or new_run_id(time.time()),
        state_dir=str(Path(state_dir).absolute() if state_dir else default_state_dir(environ)),
        cwd=cwd,
        python=sys.executable,
        machine=this_machine(environ),
        hostfile_text=None if hostfile is None else read_hostfile(hostfile),
        environ=dict(environ),
        role=role,
        name=own_name(),
    )
