"""The options of a driver, and the outcome of its job."""

from msgspec import Struct

from elastic_driver.core.documents import Failure


class DriverOptions(Struct, frozen=True, kw_only=True):
    """The driver's own options; the job's are in `Settings`."""

    bind_host: str = "127.0.0.1"  # a numeric address; 0.0.0.0: all
    bind_port: int = 0  # 0: any free one
    advertise: str | None = None  # `http://host:port` for agents, where it is not the bound one
    discovery_interval: float = 1.0
    debug: bool = False  # check the core's invariants after every event


class Outcome(Struct, frozen=True):
    """The end of a job; `exit_code` is the one of `elasticrun`."""

    exit_code: int
    reason: str
    failure: Failure | None = None
