"""A look whether the driver of a job lives: one connection to the address that it names."""

import contextlib
import ipaddress
from collections.abc import Callable

from elastic_driver.brain.messages import DriverProbed, ProbeDriver
from elastic_driver.reachability import Result, probe

PATIENCE_S = 3.0


async def answer_probe(asked: ProbeDriver, post: Callable[[DriverProbed], None]) -> None:
    """Connect to a driver's liveness port, and post what that has shown."""
    host, _, port = asked.liveness.rpartition(":")
    result: Result = "silent"
    with contextlib.suppress(ValueError, OverflowError, OSError):  # no address of any use here
        address = str(ipaddress.ip_address(host.strip("[]")))
        result = await probe(address, int(port), PATIENCE_S)
    post(DriverProbed(asked.job, asked.began, asked.liveness, result))
