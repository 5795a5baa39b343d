"""The subcommands that need no running job: `elasticctl check` and `elasticctl config show`.

Each function takes the words after its name and returns an exit status; errors are raised.
"""

import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from elastic_driver.errors import UsageError
from elastic_driver.options import FLAG, without_password
from elastic_driver.runtime.discovery import FixedDiscovery, parse_hosts
from elastic_driver.runtime.host_checks import check_command
from elastic_driver.runtime.run_dir import RunDir
from launcher.ctl_commands.job_text import table
from launcher.launch import submit
from launcher.launch.checks import make_discovery
from launcher.launch.plan import make_plan
from launcher.options.given import CommandLine, Setting, resolve
from launcher.options.table import OPTIONS
from launcher.run_job import collect_facts, with_allocation

_CONFIG_USAGE = "usage: elasticctl config show [OPTIONS of elasticrun]"
HISTORY = "--history"
_HELP = """\
usage: elasticctl check [OPTIONS] [HOSTS…]
       elasticctl check --history [OPTIONS] [HOSTS…]

Runs short tasks on HOSTS in changing pairs, and shows which of them are faulty or slow. HOSTS are
written as for elasticrun -H (n1, n[01-04]:8). Without HOSTS, the hosts of --hostfile or
--host-discovery-script are checked, or this machine. OPTIONS are elasticrun's and come before the
hosts, among them:
  --comm-perf-test       also measure bandwidth and latency of the network
  --straggler-detection  also train a small transformer, and look for slow nodes
  --exclude-straggler    the same, and count a slow node as a bad one
  --check-timeout S      time for one round
  --log-format json      the report as one JSON object
  --state-dir D          the folder for the results, also of earlier checks

With --history nothing is checked: the results of earlier checks of HOSTS, or of all hosts that
were ever checked, are shown.

Exit status
  0 no bad node; 1 bad nodes; 64 wrong usage; 75 nothing could be checked; 130/143 interrupted.
"""


def check(words: list[str]) -> int:
    """Run `elasticctl check`; return 1 if a node is faulty (or slow, with --exclude-straggler)."""
    line = resolve([word for word in words if word != HISTORY], os.environ)
    if line.options.help:
        print(_HELP, end="")
        return 0
    hosts, line = ",".join(line.command), replace(line, command=("true",))  # it is not run
    if HISTORY in words:
        return _show_history(line, [name for name, _slots in parse_hosts(hosts)] if hosts else [])
    line = line.having("network_check", Setting(True, "true", "elasticctl check", 3))
    if hosts:
        line = line.having("hosts", Setting(hosts, hosts, "command line", 3))
    plan = make_plan(line, with_allocation(line, collect_facts(line, os.environ)))
    found = make_discovery(plan.hosts).find()
    plan, job = submit.bound(plan, found)
    with tempfile.TemporaryDirectory(prefix="elasticctl-") as folder:
        run_dir = RunDir(Path(folder), "check")
        starter = submit.backend_maker(plan.backend, replace(job, grows=False, resumable=False))
        checks = submit.make_checks(plan, starter, run_dir, _say)
        driver = submit.make_driver(plan, FixedDiscovery(found), starter, run_dir, checks=checks)
        driver.open()
        try:
            report = submit.run_check(driver, found, checks)
        finally:
            driver.abandon()
    print(submit.render_report(report, plan), flush=True)
    return 1 if checks.excluded(report) else 0


def _show_history(line: CommandLine, names: list[str]) -> int:
    """Print the results of earlier checks of these hosts, or of all."""
    folder, as_json = collect_facts(line, os.environ).state_dir, line.options.log_format == "json"
    print(check_command().history(Path(folder), names, _say, as_json=as_json))
    return 0


def config(words: list[str]) -> int:
    """Run `elasticctl config show`: print the value of every option, first those that are set."""
    if words and words[0] in ("-h", "--help"):
        print(_CONFIG_USAGE)
        return 0
    if not words or words[0] != "show":
        raise UsageError(f"config needs the word show; {_CONFIG_USAGE}")
    line = resolve(words[1:], os.environ)
    found = [(option, line.settings[option.field]) for option in OPTIONS]
    found.sort(key=lambda pair: pair[1].level == 0)
    texts = [without_password(s.text) or ("no" if o.kind is FLAG else "-") for o, s in found]
    rows = [(o.long, text, s.source) for (o, s), text in zip(found, texts, strict=True)]
    print(table(("OPTION", "VALUE", "FROM"), rows))
    for warning in line.warnings:
        print(f"note: {warning}")
    return 0


def _say(line: str) -> None:
    print(f"elasticctl: {line}", file=sys.stderr, flush=True)
