"""From the command line of `elasticbrain serve` to what a Brain is made of."""

import argparse
import ipaddress
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from elastic_driver.errors import UsageError
from elastic_driver.options import ENDPOINT, whole
from elastic_driver.runtime.discovery import (
    FixedDiscovery,
    HostDiscovery,
    HostfileDiscovery,
    ScriptDiscovery,
    parse_hosts,
)
from elastic_driver.runtime.endpoint import choose_identity
from elastic_driver.settings import DriverOptions
from launcher.brain.database import address_of
from launcher.brain.folder import BrainFolder
from launcher.brain.service import BrainSetup
from launcher.launch.bind_address import numeric_address
from launcher.launch.brain_job import default_brain_dir

LOOK_S = 1.0  # between two looks for hosts
SCRIPT_S = 30.0  # for a discovery script


def folder_of(given: argparse.Namespace) -> BrainFolder:
    """Return the folder of the Brain."""
    path = default_brain_dir(os.environ) if given.state_dir is None else Path(given.state_dir)
    return BrainFolder(path.absolute())


def setup_of(given: argparse.Namespace, say: Callable[[str], None]) -> BrainSetup:
    """Return what the Brain is made of, with its folder locked.

    Raises UsageError for options that cannot work, ClusterError if another Brain has the folder.
    """
    host, port = _bind(given.bind)
    discovery, databases = _discovery(given), _databases(given.stats_db)
    folder = folder_of(given)
    folder.open()
    try:
        former = folder.credentials()
        known = former if former is not None and former.fingerprint else None
        options = DriverOptions(
            bind_host=host,
            given_host="" if ipaddress.ip_address(host).is_unspecified else host,
            tls_cert=given.tls_cert,
            tls_key=given.tls_key,
            tls_ca=given.tls_ca,
        )
        identity = choose_identity(options, folder.certificate, known)
    except BaseException:
        folder.close()
        raise
    return BrainSetup(
        folder=folder,
        host=host,
        port=port,
        discovery=discovery,
        interval=LOOK_S,
        algorithm=given.algorithm,
        token=folder.new_token() if former is None else former.token,
        identity=identity,
        say=say,
        database=databases[0],
        records=databases[1],
    )


def _databases(text: str | None) -> tuple[Any, Any]:
    """Return the database that `--stats-db` names, once for each of two threads; or None twice."""
    if text is None:
        return None, None
    address = address_of(text, new=True)
    from elastic_driver.brain.store.database import Database  # noqa: PLC0415 - the extra

    return Database(address), Database(address)


def _bind(text: str) -> tuple[str, int]:
    try:
        host, port = ENDPOINT.read(text)
    except ValueError as error:
        raise UsageError(f"--bind {error}") from None
    return numeric_address(host), port


def _discovery(given: argparse.Namespace) -> HostDiscovery:
    try:
        slots = whole(least=1).read(given.slots_per_host)
    except ValueError as error:
        raise UsageError(f"--slots-per-host {error}") from None
    if given.hosts is not None:
        return FixedDiscovery(parse_hosts(given.hosts, default_slots=slots))
    if given.hostfile is not None:
        found = HostfileDiscovery(given.hostfile, default_slots=slots)
        found.find()  # raises now if it cannot be read
        return found
    script = given.host_discovery_script
    return ScriptDiscovery(script, timeout=SCRIPT_S, default_slots=slots)
