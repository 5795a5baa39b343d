"""What several subcommands ask a driver for."""

import msgspec

from elastic_driver import contract
from elastic_driver.contract import EVENTS_PATH
from launcher.ctl_commands import show
from rendezvous.client import RendezvousClient


class _EventPage(msgspec.Struct):
    events: list[msgspec.Raw]


def read_events(job: RendezvousClient, since: int = 0) -> list[bytes]:
    """Return the events after this number that the driver still has in memory, as JSON."""
    page = job.get_bytes(f"{EVENTS_PATH}?since={since}")
    return [bytes(line) for line in msgspec.json.decode(page, type=_EventPage).events]


def ask_stacks(job: RendezvousClient, who: str) -> int:
    """Ask all workers for their stacks; return the number of the last event before that."""
    known = read_events(job)
    body = msgspec.json.encode({"reason": f"asked for by {who}"})
    job.post_json(contract.STACKS_PATH, body)
    return show.read_event(known[-1]).n if known else 0


def stacks_after(job: RendezvousClient, number: int) -> str | None:
    """Return the stacks that were collected after this event; None: not yet."""
    for line in read_events(job, number):
        event = show.read_event(line)
        if event.event == show.STACKS_COLLECTED:
            return show.stacks(event)
    return None
