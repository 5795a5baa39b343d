"""Log events of hosts, agents and the journal: a class for each name (`kernel/log.py`).

Fields have defaults, as logs of older drivers lack some of them.
"""

from typing import ClassVar

from elastic_driver.kernel.log import Level, LogEvent


class HostDiscovered(LogEvent, frozen=True, tag="host_discovered"):
    """Discovery reports a host, or another number of its slots."""

    sentence: ClassVar[str] = "host {host} was discovered"
    slots: int | None = None


class HostRemoved(LogEvent, frozen=True, tag="host_removed"):
    """A host is used no more."""

    sentence: ClassVar[str] = "host {host} removed"
    shown_from: ClassVar[Level] = Level.NORMAL


class HostCheckStarted(LogEvent, frozen=True, tag="host_check_started"):
    """The check of new hosts has begun."""

    sentence: ClassVar[str] = "hosts are checked before they get workers"


class HostChecked(LogEvent, frozen=True, tag="host_checked"):
    """A host has passed its check."""

    sentence: ClassVar[str] = "host {host} was checked"


class HostBlacklisted(LogEvent, frozen=True, tag="host_blacklisted"):
    """A host gets no workers for a time."""

    sentence: ClassVar[str] = "host {host} in cool-down"
    shown_from: ClassVar[Level] = Level.QUIET


class HostRefused(LogEvent, frozen=True, tag="host_refused"):
    """A host cannot be used."""

    sentence: ClassVar[str] = "host {host} cannot be used"
    told: bool | None = None  # people know it already

    @property
    def level(self) -> Level:
        """Return a level at which nobody hears it twice."""
        return Level.VERBOSE if self.told else Level.QUIET


class HostUnreachable(LogEvent, frozen=True, tag="host_unreachable"):
    """A host cannot be reached; it is probed."""

    sentence: ClassVar[str] = "host {host} is not used for now"
    shown_from: ClassVar[Level] = Level.NORMAL


class HostStillAway(LogEvent, frozen=True, tag="host_still_away"):
    """A host does not answer its probes yet."""

    sentence: ClassVar[str] = "host {host} does not answer yet"
    shown_from: ClassVar[Level] = Level.NORMAL


class HostResurrected(LogEvent, frozen=True, tag="host_resurrected"):
    """A host may be used again."""

    sentence: ClassVar[str] = "host {host} may be used again"
    shown_from: ClassVar[Level] = Level.NORMAL


class HostStarved(LogEvent, frozen=True, tag="host_starved"):
    """A host gets fewer workers, as it has too few processors."""

    sentence: ClassVar[str] = "host {host} has fewer processors than its workers need"
    shown_from: ClassVar[Level] = Level.NORMAL
    slots: int | None = None


class HostDrained(LogEvent, frozen=True, tag="host_drained"):
    """Nothing runs on a host that was to be drained."""

    sentence: ClassVar[str] = "host {host} is empty"
    shown_from: ClassVar[Level] = Level.NORMAL


class DrainRequested(LogEvent, frozen=True, tag="drain_requested"):
    """A host is to be left in good order."""

    sentence: ClassVar[str] = "host {host} is drained"
    shown_from: ClassVar[Level] = Level.NORMAL


class DrainCancelled(LogEvent, frozen=True, tag="drain_cancelled"):
    """A host need not be left any more."""

    sentence: ClassVar[str] = "host {host} may be used again"
    shown_from: ClassVar[Level] = Level.NORMAL


class HostsGranted(LogEvent, frozen=True, tag="hosts_granted"):
    """The Brain has granted slots."""

    sentence: ClassVar[str] = "the Brain grants the job's slots anew"
    shown_from: ClassVar[Level] = Level.NORMAL
    number: int | None = None  # of the grant
    slots: int | None = None


class DiscoveryFailed(LogEvent, frozen=True, tag="discovery_failed"):
    """The source of the hosts has failed."""

    sentence: ClassVar[str] = "discovery failed, the last known hosts stay"
    shown_from: ClassVar[Level] = Level.QUIET


class MemoryExpected(LogEvent, frozen=True, tag="memory_expected"):
    """Similar jobs have told what memory a worker needs."""

    sentence: ClassVar[str] = "similar jobs say what memory a worker needs"
    shown_from: ClassVar[Level] = Level.NORMAL
    need: int | None = None  # bytes


class ConnectionUnanswered(LogEvent, frozen=True, tag="connection_unanswered"):
    """A connection to another host gets no answer."""

    sentence: ClassVar[str] = "worker {worker} reaches a host not"
    shown_from: ClassVar[Level] = Level.QUIET


class ProbeUnanswered(LogEvent, frozen=True, tag="probe_unanswered"):
    """The first probe of a host gets no answer."""

    sentence: ClassVar[str] = "host {host} answers no probe"
    shown_from: ClassVar[Level] = Level.NORMAL


class NodesChecked(LogEvent, frozen=True, tag="nodes_checked"):
    """The check of nodes before the job is over."""

    sentence: ClassVar[str] = "nodes were checked"


class AgentStarted(LogEvent, frozen=True, tag="agent_started"):
    """An agent is up."""

    sentence: ClassVar[str] = "agent on {host} is up"


class AgentReturned(LogEvent, frozen=True, tag="agent_returned"):
    """An agent of an earlier driver reports to this one."""

    sentence: ClassVar[str] = "agent on {host} has returned"


class AgentSuspected(LogEvent, frozen=True, tag="agent_suspected"):
    """There is evidence against an agent."""

    sentence: ClassVar[str] = "agent on {host} may be lost"
    evidence: str = ""


class AgentCleared(LogEvent, frozen=True, tag="agent_cleared"):
    """An agent that was suspected lives."""

    sentence: ClassVar[str] = "agent on {host} lives"
    evidence: str = ""
    seconds: float = 0.0  # since the first evidence


class AgentLost(LogEvent, frozen=True, tag="agent_lost"):
    """An agent has ended, or is silent."""

    sentence: ClassVar[str] = "agent on {host} lost"
    shown_from: ClassVar[Level] = Level.NORMAL
    evidence: str | None = None
    seconds: float | None = None  # since the first evidence


class KeyNotKept(LogEvent, frozen=True, tag="key_not_kept"):
    """A key of the store is too large for the journal."""

    sentence: ClassVar[str] = "a key of the store is not in the journal"


class JournalFailed(LogEvent, frozen=True, tag="journal_failed"):
    """The journal takes no more events."""

    sentence: ClassVar[str] = "the journal has failed"
    shown_from: ClassVar[Level] = Level.QUIET


class JournalLate(LogEvent, frozen=True, tag="journal_late"):
    """The journal takes events too slowly."""

    sentence: ClassVar[str] = "the journal is late"
    shown_from: ClassVar[Level] = Level.NORMAL


class JournalCaughtUp(LogEvent, frozen=True, tag="journal_caught_up"):
    """The journal has every event again."""

    sentence: ClassVar[str] = "the journal is complete again"
    shown_from: ClassVar[Level] = Level.NORMAL


class JournalUnreachable(LogEvent, frozen=True, tag="journal_unreachable"):
    """The journal's servers do not answer."""

    sentence: ClassVar[str] = "the journal cannot be reached"
    shown_from: ClassVar[Level] = Level.NORMAL


class JournalReachable(LogEvent, frozen=True, tag="journal_reachable"):
    """The journal's servers answer again."""

    sentence: ClassVar[str] = "the journal is back"
    shown_from: ClassVar[Level] = Level.NORMAL
