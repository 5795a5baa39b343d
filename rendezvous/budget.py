"""The budget of one batch: what it may cost, return and wait for. Pure.

A refusal names the bound, and the batch goes on with its next operation.
"""

from rendezvous import wire
from rendezvous.limits import Hits, Limits
from rendezvous.space import Owner

# Costs, in looks at a key (see `Limits.batch_cost`). Other operations cost next to nothing.
READ_COST, DELETE_COST, TOLD_COST = 4, 10, 2  # for each key, and for each batch that is told
BYTES_PER_LOOK = 128  # of a value that is copied
_SMALL = (wire.Written, wire.Number)


class Budget:
    """The cost, size and waits of one batch so far; `owner`: the client that has sent it."""

    __slots__ = ("_cost", "_hits", "_size", "_waits", "limits", "owner")

    def __init__(self, limits: Limits, hits: Hits, owner: Owner = None) -> None:
        self.limits, self._hits, self.owner = limits, hits, owner
        self._cost = self._size = self._waits = 0

    def over(self) -> wire.StoreRefusal | None:
        """Return a refusal once the operations so far have cost too much."""
        if self._cost <= self.limits.batch_cost:
            return None
        problem = "the operations of this batch take too long together; send fewer in a batch"
        return self.refuse("batch_cost", "too_large", problem)

    def spend(self, cost: int) -> None:
        """Charge for so many looks at a key."""
        self._cost += cost

    def wait(self, waited: int, own: int, keys: int) -> wire.StoreRefusal | None:
        """Charge for a wait for `keys` keys.

        `waited`: keys that all batches wait for already; `own`: of them, those of this client.
        """
        if self._waits >= self.limits.batch_waits:
            problem = f"a batch may wait {self._waits} times; send the rest in another one"
            return self.refuse("batch_waits", "too_large", problem)
        if keys > self.limits.wait_keys:
            problem = f"{keys} keys are too many for one wait; wait for fewer at a time"
            return self.refuse("batch_waits", "too_large", problem)
        if waited + keys > self.limits.waited_keys:
            problem = f"clients wait for {waited} keys already; try again in a moment"
            return self.refuse("waits", "busy", problem)
        if own + keys > self.limits.caller_waits and self.owner is not None:
            problem = f"this client waits for {own} keys already; wait for fewer at a time"
            return self.refuse("share", "busy", problem)
        self._waits += 1
        return None

    def fit(self, result: wire.Result) -> wire.Result:
        """Return the result, or a refusal if the batch returns too much with it."""
        if isinstance(result, _SMALL):
            return result
        size = wire.size_of(result)
        if self._size + size > self.limits.reply_bytes and size > wire.RESULT_BYTES:
            most = self.limits.reply_bytes / 1024**2
            problem = f"the results of this batch are over {most:g} MiB; ask for less at once"
            return self.refuse("reply", "too_large", problem)
        self._size += size
        return result

    def refuse(self, bound: str, code: str, problem: str) -> wire.StoreRefusal:
        """Return a refusal, and count that this bound was hit."""
        self._hits.count(bound)
        return wire.StoreRefusal(code, problem)
