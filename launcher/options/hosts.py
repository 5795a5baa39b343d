"""Options that say where to run."""

from __future__ import annotations

from launcher.options import kinds
from launcher.options.option import HOSTS, Option

HOST_DISCOVERY_SCRIPT: Option[str | None] = Option(
    "host-discovery-script",
    kinds.text("FILE"),
    None,
    HOSTS,
    "A program that prints the hosts there are now, one 'host' or 'host:slots' a line. It is run "
    "again and again; hosts join and leave the job as they come and go.",
)
DISCOVERY_INTERVAL: Option[float] = Option(
    "discovery-interval",
    kinds.seconds(),
    1.0,
    HOSTS,
    "Seconds between two runs of the discovery script, or two looks at the hostfile.",
)
DISCOVERY_TIMEOUT: Option[float] = Option(
    "discovery-timeout",
    kinds.seconds(),
    30.0,
    HOSTS,
    "A discovery script that runs longer is killed; the last known hosts stay.",
)
HOSTS_LIST: Option[str | None] = Option(
    "hosts",
    kinds.text("h1:2,h2:2"),
    None,
    HOSTS,
    "Fixed hosts with their slots; n[01-04]:2 stands for four of them.",
    aliases=("-H", "--host"),
)
HOSTFILE: Option[str | None] = Option(
    "hostfile",
    kinds.text("FILE"),
    None,
    HOSTS,
    "Hosts from a file, 'host', 'host:4' or 'host slots=4' a line; read again when it changes.",
    aliases=("--host-file", "--machinefile"),
)
STANDALONE: Option[bool] = Option(
    "standalone", kinds.flag(), False, HOSTS, "This machine only, whatever else is configured."
)
SLOTS_PER_HOST: Option[int | None] = Option(
    "slots-per-host",
    kinds.whole(least=1),
    None,
    HOSTS,
    "Slots of a host that is listed without a number.",
    aliases=("--slots",),
    shown="1",
)
