"""The ports of `--ports`, and what each of them is for. Pure.

The lowest quarter, 16 ports at most, is for torch's stores: an agent names them beforehand, so that
all workers know the port of a store before it listens. The others are for everything that chooses a
port when it listens (the rendezvous, probes, gloo). If the two parts were one, gloo could take a
port that an agent has named a moment before.
"""

PortRange = tuple[int, int]  # the first and the last

MOST_STORES = 16
HELP = "docs/firewalls.md"


def store_ports(ports: PortRange) -> tuple[int, ...]:
    """Return the ports for torch's stores, in order."""
    return _split(ports)[0]


def listening_ports(ports: PortRange) -> tuple[int, ...]:
    """Return the ports for all others, the last one first."""
    stores, others = _split(ports)
    return (others or stores)[::-1]


def in_words(ports: PortRange) -> str:
    """Return the option as it was given."""
    return f"--ports {ports[0]}-{ports[1]}"


def none_left(ports: PortRange, purpose: str, where: str) -> str:
    """Return the sentence for a range with no free port."""
    return (
        f"no port of {in_words(ports)} is free on {where} for {purpose}; give a larger range "
        f"({HELP} says how many a host needs), or end what listens there (ss -ltnp)"
    )


def _split(ports: PortRange) -> tuple[tuple[int, ...], tuple[int, ...]]:
    every = tuple(range(ports[0], ports[1] + 1))
    stores = min(MOST_STORES, max(1, len(every) // 4))
    return every[:stores], every[stores:]
