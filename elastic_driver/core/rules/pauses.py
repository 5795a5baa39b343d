"""How long a host is left alone: before the next start there, and between two probes."""

import zlib

FIRST_PROBE_S = 0.5  # between two probes of a host; longer if very many are not reachable
LONGEST_PROBE_S = 3.0
SLOWER_AFTER_S = 60.0  # the pause is the time that the host has been gone, divided by this
PROBES_PER_S = 330  # of all hosts together: 1,000 hosts are probed every three seconds


def growing_pause(number: int, longest: float) -> float:
    """Return the seconds before a start: 0, 0.5, 1, 2, 4 … for number 0, 1, 2 …"""
    return min(0.5 * 2.0 ** (min(number, 64) - 1), longest) if number > 0 else 0.0


def probe_pause(host: str, lost: int, gone: float = 0.0) -> float:
    """Return the seconds until the next probe of a host, while `lost` hosts are probed.

    They grow with the seconds that it has been `gone`, from half a minute on. They are a little
    shorter for some hosts than for others, so that hosts are probed in turn.
    """
    pause = min(max(FIRST_PROBE_S, lost / PROBES_PER_S, gone / SLOWER_AFTER_S), LONGEST_PROBE_S)
    return pause * (1.0 - (zlib.crc32(host.encode()) % 1024) / 4096)
