"""Servers that begin without hosts: nodes that others start come to them.

`launcher.run_job` calls `serve` for a job whose nodes join by themselves, with or without workers
on its own node, whose agents the local backend starts. To the driver the nodes are hosts like any
other. It calls `serve_tensorflow` for --tf-orchestrator: a standing service for TensorFlow nodes,
which is the driver's server without a job. Its routes and the machine that answers them are those
of every driver (`features.tensorflow.machine`, docs/tensorflow.md).
"""

from dataclasses import replace
from pathlib import Path

from elastic_driver.features.joining.driver import CheckOfNodes, JoinedNodes, NodeRules
from elastic_driver.runtime.backend import Backend
from elastic_driver.runtime.discovery import FixedDiscovery
from elastic_driver.runtime.journal.journal_file import JournalStore
from elastic_driver.runtime.journal.replay import ResumedRun
from elastic_driver.runtime.results import JobResult
from elastic_driver.runtime.run_dir import RunDir
from launcher import version
from launcher.backends.local import LocalBackend
from launcher.join.driver_search import of_server
from launcher.launch.checks import bind_address
from launcher.launch.host_source import JoinedHosts
from launcher.launch.plan import LaunchPlan
from launcher.launch.submit import make_checks, make_driver, run_driver, stop_on_signals
from launcher.network import own_address
from rendezvous.auth import read_credentials


def serve(
    plan: LaunchPlan,
    hosts: JoinedHosts,
    run_dir: RunDir,
    run: ResumedRun | None = None,
    store: JournalStore | None = None,
) -> JobResult:
    """Run the driver until the job ends; return the job's result.

    `run`: the job to go on with; `store`: the place of the journal.

    Raises ElasticError if the job cannot begin.
    """
    rules = NodeRules(
        run_id=plan.spec.run_id,
        version=version(),
        heartbeat_timeout=plan.settings.heartbeat_timeout,
        default_slots=hosts.default_slots,
    )
    nodes = JoinedNodes(rules, of_server(plan.options.token_file, plan.options.run_id), hosts.own)
    if run is not None:
        nodes.await_nodes(tuple((h.name, h.slots) for h in run.job.hosts.known.values()))
    bound = bind_address(plan.driver.bind_host)

    def starter(endpoint: str, token_file: Path) -> Backend:
        if hosts.own:
            address = plan.options.local_addr or own_address(bound)
            resumable = plan.agents.resumable
            nodes.own_starter = LocalBackend(
                endpoint, token_file, address=address, resumable=resumable
            )
        return nodes

    plan = replace(plan, driver=replace(plan.driver, bind_host=bound))
    checks = None
    if plan.options.checks_nodes:  # by the job: no node is known before it joins
        plan = replace(plan, settings=replace(plan.settings, checked_hosts=()))
        checks = make_checks(plan, lambda _endpoint, _token_file: CheckOfNodes(nodes), run_dir)
    driver = make_driver(
        plan, nodes, starter, run_dir, checks=checks, joined=nodes, run=run, store=store
    )
    return run_driver(driver, plan, nodes)


def serve_tensorflow(plan: LaunchPlan, run_dir: RunDir, secrets: tuple[str, ...]) -> JobResult:
    """Answer nodes until a signal or `elasticctl stop` comes; return how it ended.

    `secrets` are taken like the operator's token. Raises ElasticError if it cannot listen.
    """
    bound = bind_address(plan.driver.bind_host)
    plan = replace(plan, driver=replace(plan.driver, bind_host=bound))
    driver = make_driver(plan, FixedDiscovery(()), LocalBackend, run_dir, secrets=secrets)
    with stop_on_signals(driver, notice=0.0):
        driver.serve()
        token = plan.options.token_file or run_dir.token_file
        known_by = read_credentials(run_dir.token_file).fingerprint
        line = f" and the certificate {known_by}" if known_by else ""
        where = f"at {driver.endpoint}, with the token in {token}{line}"
        driver.reporter.note(f"serving TensorFlow nodes {where}; Ctrl-C ends it")
        return driver.wait()
