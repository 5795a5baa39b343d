"""Which buffers of modules all ranks have alike, and where that ends: a part of `state_watch`.

A floating-point buffer may be a running statistic, which each rank computes from its own batches,
or an average of the weights, which all have alike; its name does not tell. So it is learned:
buffers that have moved, and were equal on all ranks after each of these moves, are alike by nature.
What was different once is each rank's own. What has never moved may become a statistic any time.

Pure.
"""

from collections.abc import Sequence

from elastic_driver.words.progress import BUFFERS_DIGEST_CHARS

ALIKE = 3  # moves after which all ranks were equal; then a difference is one
LASTING = 3  # marked steps in a row: a broadcast of buffers ends others before


class BufferWatch:
    """Compares the groups of buffers that each rank has marked, by their numbers."""

    def __init__(self) -> None:
        self._last: list[str] = []  # of each group, when all ranks were equal
        self._moves: list[int] = []
        self._own: set[int] = set()  # groups that each rank has for itself
        self._odd: list[int] = []  # marked steps in a row after which ranks differed

    def judge(self, rows: Sequence[str]) -> list[int]:
        """Return the groups that are alike by nature, and are not any more.

        `rows`: what each rank has marked after one step, a digest of each group.
        """
        count, rest = divmod(len(rows[0]), BUFFERS_DIGEST_CHARS)
        if rest or any(len(row) != len(rows[0]) for row in rows):
            return []
        if count != len(self._last):  # buffers came or went: all are learned anew
            self._last, self._moves, self._odd = [""] * count, [0] * count, [0] * count
            self._own.clear()
        return [number for number in range(count) if self._differs(number, rows)]

    def _differs(self, number: int, rows: Sequence[str]) -> bool:
        found = {digest_of(row, number) for row in rows}
        if number in self._own:
            return False
        if len(found) > 1:
            if self._moves[number] < ALIKE:
                self._own.add(number)
                return False
            self._odd[number] += 1
            return self._odd[number] >= LASTING
        (now,) = found
        self._moves[number] += self._last[number] not in ("", now)
        self._last[number], self._odd[number] = now, 0
        return False


def digest_of(row: str, number: int) -> str:
    """Return the digest of one group."""
    return row[number * BUFFERS_DIGEST_CHARS : (number + 1) * BUFFERS_DIGEST_CHARS]
