"""A standing service for TensorFlow nodes that others start: the driver's server without a job.

`launcher.job` calls `serve` for --tf-orchestrator. The routes and the machine that answers them
are those of every driver (`policies.tf_cluster`, docs/tensorflow.md).
"""

from dataclasses import replace

from elastic_driver.runtime.discovery import FixedDiscovery
from elastic_driver.runtime.results import JobResult
from elastic_driver.runtime.run_dir import RunDir
from launcher.backends.local import LocalBackend
from launcher.launch.bind_address import bind_address
from launcher.launch.plan import LaunchPlan
from launcher.launch.signals import stop_on_signals
from launcher.launch.submit import make_driver
from rendezvous.auth import read_credentials


def serve(plan: LaunchPlan, run_dir: RunDir, secrets: tuple[str, ...]) -> JobResult:
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
