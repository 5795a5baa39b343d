"""The options of a driver, and the outcome of its job."""

from dataclasses import dataclass

from msgspec import Struct

from elastic_driver.core.documents import Failure
from elastic_driver.options import FLAG, SECONDS, Heading, option


# fmt: off
@dataclass(frozen=True, kw_only=True)
class DriverOptions:
    """The driver's own options; the job's are in `Settings`."""

    bind_host: str = "127.0.0.1"  # a numeric address; 0.0.0.0: all
    bind_port: int = 0  # 0: any free one
    advertise: str | None = None  # `http://host:port` for agents, where it is not the bound one
    discovery_interval: float = option(Heading.HOSTS, SECONDS, 1.0,
        "Seconds between two runs of the discovery script, or two reads of the hostfile.")
    debug: bool = option(Heading.OTHER, FLAG, False,
        "Check the driver's own invariants after every event.")
# fmt: on


class Outcome(Struct, frozen=True):
    """The end of a job; `exit_code` is the one of `elasticrun`."""

    exit_code: int
    reason: str
    failure: Failure | None = None
