"""Finds the driver of a run whose journal is in etcd; a standby may have it on another host.

Nothing is changed in etcd.
"""

import contextlib
import os
from pathlib import Path

import msgspec

from elastic_driver.errors import ClusterError, UsageError
from elastic_driver.runtime.journal import etcd
from elastic_driver.runtime.journal.etcd import EtcdClient
from elastic_driver.runtime.journal.follower import Ended
from elastic_driver.runtime.journal.replay import Replay
from elastic_driver.runtime.journal.tenure import RunKeys, decode_key
from elastic_driver.runtime.run_dir import JOURNAL_FILE
from launcher.options.given import resolve_again
from rendezvous.auth import parse_credentials

ETCD_S = 3.0  # for etcd to answer


def journal_of(folder: Path) -> str | None:
    """Return the `etcd://…` that the run of this folder was started with; None: there is none."""
    with (
        contextlib.suppress(UsageError),  # a journal that is damaged, or not there
        contextlib.closing(Replay(folder / JOURNAL_FILE)) as journal,
    ):
        options = resolve_again(journal.argv, os.environ).options
        return options.journal if options.in_etcd else None
    return None


def driver_in(journal: str, run_id: str) -> tuple[str, str, str]:
    """Return the URL of the driver that etcd names for a run, its token and fingerprint.

    Raises UsageError for an address that is none, ClusterError if no driver has the run or etcd
    does not answer.
    """
    keys = RunKeys(run_id)
    with EtcdClient(etcd.read_access(journal, os.environ), ETCD_S) as client:
        asked = keys.driver, keys.token, keys.end
        answer = client.transact((), [etcd.find(key) for key in asked])
    driver, token, end = map(answer.found, range(3))
    if end:
        reason = msgspec.json.decode(end[0].value, type=Ended).reason
        raise ClusterError(f"run {run_id} is over, says {client.access}: {reason}")
    found = decode_key(driver[0]) if driver else None
    if found is None or not found.url or not token:
        raise ClusterError(
            f"run {run_id} has no driver now, says {client.access}; a standby takes over within "
            "--driver-lease seconds, or go on with the job: elasticrun --resume"
        )
    url = found.url if found.host == os.uname().nodename else found.seen
    return (url, *parse_credentials(token[0].value.decode()))
