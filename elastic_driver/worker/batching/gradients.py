"""Sums the gradients of micro-batches to the gradient of the step, the same on every rank.

`worker.batches` calls `before()` and `after()` around each micro-batch, and `finish()` at the end
of the step. Then every `parameter.grad` is the weighted sum Σ wᵥ·gᵥ over all virtual workers v of
the job. Nothing of the size of a gradient is communicated before `finish()`. Ranks may have
different shares; a rank without micro-batches takes part and adds nothing.

What is summed is looked up when each step begins (`batching.layout`): the parameters that require
gradients then, of the model and of the state's optimizers. Buffers (BatchNorm's running statistics)
are combined by their rules (`batching.buffers`), so they, too, depend on the step alone.

**All ranks must sum the same**, or gloo would wait for bytes that never come. When an iteration
begins they compare their layouts (`batching.layout`), which costs one small all-reduce. Later
steps cost nothing: a rank with another layout than the agreed one takes part in the exchange as
agreed, without values, and *calls* by the flag that each bucket has. Then all ranks compare again,
and exchange by the new layout, or raise the same error. A rank that has something to refuse calls,
too.

There are two ways to add: `PlainSum` (all-reduce; the last bits depend on the number of workers)
and `ExactSum` (a fixed tree; they do not). Both use torch's default process group.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from elastic_driver.arithmetic import TreeSum, finish_tree, tree_blocks
from elastic_driver.errors import UsageError
from elastic_driver.worker.batching.layout import (
    Agreement,
    Bucket,
    Layout,
    Subject,
    common_error,
    make_buckets,
    settle_buffers,
)
from elastic_driver.worker.torch_seams import add_all, multiply_all

# Gradients, None where there is none, then per kind of buffers with a mean the changes, and then
# the values.
Entries = list[Tensor | None]


class StepSum(ABC):
    """The base of both ways to add: what is added, and putting the result in place.

    Attributes:
        subject: what is trained.
    """

    def __init__(self, model: nn.Module) -> None:
        self.subject = Subject(model)
        self._buffers = self.subject.buffers
        self._agreement = Agreement()
        self._agreed: Layout | None = None
        self._trouble: UsageError | None = None
        self._lines: list[str] = []

    @property
    def device(self) -> torch.device:
        """The device of the parameters, and of small messages about them."""
        return self.subject.device

    def restart(self) -> None:
        """Compare the layouts in the next step: an iteration begins, perhaps in a new world."""
        self._agreed = None

    # ---- the beginning of a step ---------------------------------------------------------

    def begin(
        self, ranges: Sequence[range], weights: Sequence[float], rank: int, step: str = "a step"
    ) -> None:
        """Start a step without gradients. Collective.

        `weights` has the weight of each micro-batch; `ranges[r]` are the micro-batches of rank r.
        Raises `UsageError` where this rank cannot train; then the others do at their step's end.
        """
        leaves = len(weights)
        self._ranges = [range(min(r.start, leaves), min(r.stop, leaves)) for r in ranges]
        self._mine, self._weights = self._ranges[rank], weights
        self._alone = len(ranges) == 1
        self._moved = False
        self._step, self._trouble = step, None
        try:
            self._layout = self.subject.look(alone=self._alone)
        except UsageError as error:
            self._refuse(error)
        self._trained = self._layout.trained
        if not self._alone and (self._agreed is None or not self._all_can_call(self._agreed)):
            self._agreed = None
            self._propose()
        self.subject.drop_gradients()
        self._buffers.begin()

    def _all_can_call(self, layout: Layout) -> bool:
        """Return whether every rank's flags reach the others in this step."""
        return bool(layout.buckets)

    def _refuse(self, error: UsageError) -> None:
        """Raise this error; on the other ranks, too, when their step ends."""
        if self._alone:
            raise error
        self._trouble = error
        if self._agreed is not None and self._all_can_call(self._agreed):
            self._exchange_by(self._agreed, None, None, call=True)
        self._propose()
        self._settle()

    def _propose(self) -> None:
        shares = "+".join(str(len(each)) for each in self._ranges)
        lines = [f"{self._step} with {shares} micro-batches"]
        if self._trouble is None:
            lines += self._layout.lines
        self._lines = lines
        trouble = self._trouble is not None
        what = "\n".join(lines).encode()
        self._agreement.propose(what, trouble=trouble, device=self.device)

    def _settle(self) -> None:
        """Wait until all ranks have compared. Raises `UsageError`, the same on all of them."""
        if not self._agreement.reached():
            raise common_error(self._trouble, self._lines, self.device)
        self._agreed = self._layout

    # ---- micro-batches -------------------------------------------------------------------

    def before(self, virtual_worker: int) -> None:  # noqa: ARG002 - PlainSum needs it
        """Prepare for the micro-batch of this virtual worker."""
        if self._moved:
            self._buffers.rewind()
        self._moved = True

    @abstractmethod
    def after(self, virtual_worker: int) -> None:
        """Take over the gradients of this virtual worker's micro-batch, after its backward pass."""

    def abandon(self) -> None:
        """Put the buffers back to where the step started: it was left half done."""
        self._buffers.restore()
        self.subject.drop_gradients()

    def _gradients(self) -> Entries:
        return [parameter.grad for parameter in self._trained]

    # ---- the end of a step ---------------------------------------------------------------

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def finish(self) -> None:
        """Collective: leave the sums in `parameter.grad` and in the buffers.

        Raises `UsageError`, the same on all ranks, for what has no sum.
        """
        buffers = self._buffers
        first = len(self._trained)
        self._trouble = next(self.subject.stray(self._step), None)
        own = self._partial_sums()
        verdict = buffers.verdict(self.device)
        entries, called = self._sum(own, verdict, odd=bool(buffers.odd or buffers.late))
        buffers.judge(verdict)
        changes = [each for each in entries[first : self._layout.entries] if each is not None]
        means, failed = buffers.means(changes)
        if any(each is not None for each in failed):
            self._take_values(means, failed, [entries] if self._alone else own)
        buffers.settle_singles(means)
        buffers.apply(means, changes)
        if called:
            settle_buffers(self.subject.model, buffers, self._weights, self._ranges, self.device)
        buffers.derive()
        for parameter, gradient in zip(self._trained, entries, strict=False):
            parameter.grad = gradient

    def _sum(
        self, own: list[Entries], verdict: Tensor | None, *, odd: bool
    ) -> tuple[Entries, bool]:
        """Collective: return the entries of the whole step, and whether any rank called.

        The verdict becomes that of all ranks. `odd`: this rank has buffers that are resized or new.
        """
        if self._alone:
            if self._trouble is not None:
                raise self._trouble
            return self._sum_alone(own), odd
        if self._agreed is None:
            self._settle()
        assert self._agreed is not None  # noqa: S101 - all ranks have just agreed
        if self._layout.digest == self._agreed.digest:
            call = odd or self._trouble is not None
            entries, called = self._exchange_by(self._layout, own, verdict, call=call)
            if called:
                self._propose()
                self._settle()
            elif self._trouble is not None:  # of a rank that cannot call
                raise self._trouble
        else:
            self._exchange_by(self._agreed, None, None, call=True)
            self._propose()
            self._settle()
            entries, called = self._exchange_by(self._layout, own, verdict, call=odd)
        return entries, called

    def _exchange_by(
        self, layout: Layout, own: list[Entries] | None, verdict: Tensor | None, *, call: bool
    ) -> tuple[Entries, bool]:
        """Collective: sum by this layout; return the entries, and whether any rank called.

        Without `own` sums this rank adds nothing.
        """
        work: Any = None
        if layout.verdict_size:
            if own is None:
                verdict = self._buffers.no_verdict(layout.verdict_size, self.device)
            work = dist.all_reduce(verdict, dist.ReduceOp.MAX, async_op=True)
        sums = self._no_sums(layout) if own is None else own
        entries: Entries = [None] * layout.entries
        called = False
        flats = self._exchange(layout.buckets, sums, call=call)
        for bucket, flat in zip(layout.buckets, flats, strict=True):
            called |= bucket.unflatten(flat, entries)
        if work is not None:
            work.wait()
        return entries, called

    def _take_values(
        self, means: list[Tensor], failed: list[Tensor | None], own: list[Entries]
    ) -> None:
        """Collective: put the mean of the values in place where that of the changes has failed."""
        first = self._layout.entries  # the values come after what travels in each step
        chosen = [(at, where) for at, where in enumerate(failed) if where is not None]
        parts: list[Entries] = []
        for entries in own:
            values = [(entries[first + at], where) for at, where in chosen]
            parts.append([None if value is None else value[where] for value, where in values])
        if self._alone:
            (found,) = parts
        else:
            lines = [f"elements {where.tolist()} of buffers {at}" for at, where in chosen]
            self._agreement.propose("\n".join(lines).encode(), trouble=False, device=self.device)
            if not self._agreement.reached():
                raise common_error(None, [self._step, *lines], self.device)
            found = [None] * len(chosen)
            buckets = make_buckets([means[at][where] for at, where in chosen])
            for bucket, flat in zip(buckets, self._exchange(buckets, parts), strict=True):
                bucket.unflatten(flat, found)
        for (at, where), value in zip(chosen, found, strict=True):
            means[at][where] = value

    def _dense(self, entries: Entries) -> Entries:
        """Return the same entries without sparse ones, which are refused."""
        for at, entry in enumerate(entries):
            if entry is not None and entry.layout != torch.strided:
                entries[at] = None
                self._trouble = self._trouble or UsageError(
                    "FixedBatch cannot add sparse gradients, as that of parameter "
                    f"{self.subject.name(self._trained[at])}; use Embedding(sparse=False)"
                )
        return entries

    @abstractmethod
    def _partial_sums(self) -> list[Entries]:
        """Return what this worker has added up, in one or several parts."""

    @abstractmethod
    def _no_sums(self, layout: Layout) -> list[Entries]:
        """Return as many parts without anything in them."""

    @abstractmethod
    def _sum_alone(self, own: list[Entries]) -> Entries:
        """Return the entries of the whole step, which this worker has trained alone."""

    @abstractmethod
    def _exchange(
        self, buckets: Sequence[Bucket], own: Sequence[Entries], *, call: bool = False
    ) -> list[Tensor]:
        """Collective: return the summed buckets."""


class PlainSum(StepSum):
    """Sums by all-reduce; the gradients need no more memory than the buckets.

    autograd adds this rank's micro-batches into `parameter.grad`, as in any accumulation. If the
    next weight differs, the sum so far is rescaled; one multiplication at the end applies the
    last weight.
    """

    def begin(
        self, ranges: Sequence[range], weights: Sequence[float], rank: int, step: str = "a step"
    ) -> None:
        """Start a step without gradients."""
        self._weight = 0.0
        self._left: list[Tensor] = []  # by micro-batches in buffers, added up
        super().begin(ranges, weights, rank, step)

    def before(self, virtual_worker: int) -> None:
        """Rescale the sum so far to the weight of the next micro-batch."""
        super().before(virtual_worker)
        weight = self._weights[virtual_worker]
        if weight != self._weight:
            _scale(self._entries(), self._weight / weight)
            self._weight = weight

    def after(self, virtual_worker: int) -> None:
        """Add what it left in buffers; autograd has added the gradients itself."""
        left = self._buffers.leaf(virtual_worker)
        if self._left:
            add_all(self._left, left)
        else:
            self._left = left

    def _entries(self) -> Entries:
        none = [None] * (2 * len(self._buffers.mean_starts()))
        return [*self._gradients(), *(self._left or none)]

    def _partial_sums(self) -> list[Entries]:
        return [self._dense(self._entries())]

    def _no_sums(self, layout: Layout) -> list[Entries]:
        return [[None] * layout.entries]

    def _sum_alone(self, own: list[Entries]) -> Entries:
        return _scale(own[0], self._weight)

    def _exchange(
        self, buckets: Sequence[Bucket], own: Sequence[Entries], *, call: bool = False
    ) -> list[Tensor]:
        flats = [bucket.flatten(own[0], self._weight, call=call) for bucket in buckets]
        for work in [dist.all_reduce(flat, async_op=True) for flat in flats]:
            work.wait()
        return flats


class ExactSum(StepSum):
    """Sums in the fixed tree of `arithmetic`, with the same bits on any world size.

    Each rank keeps O(log N) partial sums of its own leaves. At the end each rank is given one part
    of a bucket's elements: it receives that part of all ranks' partial sums (one all-to-all),
    finishes the tree, and an all-gather gives the result to all. So every element is added by one
    rank only, in an order that does not depend on the ranks.

    Leaves are weighed relative to the step's first one, and the root is multiplied with the weight
    of that: in a full step no leaf has to be scaled. The tree adds the tensors that autograd made;
    nothing is copied before it is sent.
    """

    def begin(
        self, ranges: Sequence[range], weights: Sequence[float], rank: int, step: str = "a step"
    ) -> None:
        """Start a step without gradients."""
        super().begin(ranges, weights, rank, step)
        self._tree: TreeSum[Entries] = TreeSum(self._mine.start, _add_entries)

    def _all_can_call(self, layout: Layout) -> bool:
        """Return whether all flags arrive: a rank without micro-batches sends nothing."""
        return super()._all_can_call(layout) and all(self._ranges)

    def after(self, virtual_worker: int) -> None:
        """Take the gradients and what is left in buffers as the next leaf."""
        leaf = [*self._gradients(), *self._buffers.leaf(virtual_worker)]
        for parameter in self._trained:
            parameter.grad = None
        self._tree.push(_scale(leaf, self._weights[virtual_worker] / self._weights[0]))

    def _partial_sums(self) -> list[Entries]:
        sums = [self._dense(entries) for _, entries in self._tree.blocks()]
        del self._tree
        return sums

    def _no_sums(self, layout: Layout) -> list[Entries]:
        return [[None] * layout.entries for _ in tree_blocks(self._mine)]

    def _sum_alone(self, own: list[Entries]) -> Entries:
        blocks = dict(zip(tree_blocks(self._mine), own, strict=True))
        return _scale(finish_tree(blocks, len(self._weights), _add_entries), self._weights[0])

    def _exchange(
        self, buckets: Sequence[Bucket], own: Sequence[Entries], *, call: bool = False
    ) -> list[Tensor]:
        """Return each bucket's root of the tree, from this rank's partial sums and the others'.

        All buckets travel at the same time, so that a small one costs hardly any waiting.
        """
        blocks = [tree_blocks(leaves) for leaves in self._ranges]  # of each rank
        names = [block for theirs in blocks for block in theirs]
        size = len(blocks)
        arriving, gathered = [], []  # with the sent tensors, which are kept until they have arrived
        for bucket in buckets:
            chunk = -(-bucket.length // size)  # elements of each rank's part, the last one padded
            flats = [bucket.flatten(entries, room=size * chunk, call=call) for entries in own]
            sent = _by_receiver(flats, size) if flats else bucket.empty(0)
            received = bucket.empty(len(names) * chunk)
            counts = [len(theirs) * chunk for theirs in blocks]
            work = _all_to_all(received, counts, sent, [len(own) * chunk] * size)
            arriving.append((work, received, sent))
        for bucket, (arrival, received, _) in zip(buckets, arriving, strict=True):
            arrival.wait()
            parts = dict(zip(names, received.view(len(names), -1).unbind(), strict=True))
            part = finish_tree(parts, len(self._weights), Tensor.add_)
            _scale([part], self._weights[0])  # as alone: in 16 bits, mul_() has other ones
            whole = bucket.empty(size * len(part))
            work = _all_gather(_as_bytes(whole), _as_bytes(part), async_op=True)
            gathered.append((work, whole[: bucket.length], part))
        for work, _, _ in gathered:
            work.wait()
        return [whole for _, whole, _ in gathered]


def _by_receiver(flats: Sequence[Tensor], size: int) -> Tensor:
    """Return the first of `size` parts of each of these, then the second of each, and so on."""
    if len(flats) == 1:
        return flats[0]
    return torch.stack([flat.view(size, -1) for flat in flats], dim=1).view(-1)


def _scale(entries: Entries, factor: float) -> Entries:
    """Multiply in place."""
    if factor != 1 and (present := [entry for entry in entries if entry is not None]):
        multiply_all(present, factor)
    return entries


def _add_entries(left: Entries, right: Entries) -> Entries:
    """Return the sum, in the memory of either."""
    pairs = [(a, b) for a, b in zip(left, right, strict=True) if a is not None and b is not None]
    if pairs:
        add_all([a for a, _ in pairs], [b for _, b in pairs])
    if len(pairs) == len(left):
        return left
    for place, (a, b) in enumerate(zip(left, right, strict=True)):
        # None counts as zeros, as it travels: adding 0 makes a negative zero positive.
        if a is None and b is not None:
            left[place] = b.add_(0)
        elif b is None and a is not None:
            a.add_(0)
    return left


# torch 2.13 renamed it; the older name warns there.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def _all_to_all(received: Tensor, receive: Sequence[int], sent: Tensor, send: Sequence[int]) -> Any:
    """Begin an uneven all-to-all of elements, moved as bytes so that every dtype is supported."""
    width = sent.element_size()
    counts = [[count * width for count in side] for side in (receive, send)]
    return dist.all_to_all_single(_as_bytes(received), _as_bytes(sent), *counts, async_op=True)


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)
