"""Sums the gradients of micro-batches to the gradient of the step, the same on every rank.

`worker.batches` calls `before()` and `after()` around each micro-batch, and `finish()` at the end
of the step. Then every `parameter.grad` is the weighted sum Σ wᵥ·gᵥ over all virtual workers v of
the job. Nothing of the size of a gradient is communicated before `finish()`. Ranks may have
different shares; a rank without micro-batches takes part and adds nothing.

What is summed is decided anew when each step begins: the parameters that require gradients then, of
the model and of the state's optimizers. All ranks must decide the same (`batching.agreement`), and
a gradient that lies elsewhere when the step ends is refused. Buffers (BatchNorm's running
statistics) are combined by their rules (`batching.buffers`), so they, too, depend on the step
alone.

There are two ways to add: `PlainSum` (all-reduce; the last bits depend on the number of workers)
and `ExactSum` (a fixed tree; they do not). Both use torch's default process group.
"""

import hashlib
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from elastic_driver.errors import UsageError
from elastic_driver.policies.microbatches import TreeSum, finish_tree, tree_blocks
from elastic_driver.worker.batching import agreement, resized
from elastic_driver.worker.batching.buckets import Bucket, make_buckets
from elastic_driver.worker.batching.buffers import Buffers
from elastic_driver.worker.batching.sight import Sight, Watch, describe, is_lazy, names_of

# Gradients, None where there is none, then per kind of buffers with a mean the changes, and then
# the values.
Entries = list[Tensor | None]

_sums: "weakref.WeakSet[StepSum]" = weakref.WeakSet()  # all of this process


class StepSum(ABC):
    """The base of both ways to add: what is added, and putting the result in place.

    Attributes:
        given: the parameters that the state's optimizers train. Those that are neither in the model
            nor in that of another sum are summed too.
    """

    def __init__(self, model: nn.Module) -> None:
        first = next(model.parameters(), None)
        if first is None:
            raise UsageError("FixedBatch was given a model without trainable parameters")
        _sums.add(self)
        self._model, self._first = model, first
        self.given: Sequence[Tensor] = ()
        self._buffers, self._watch = Buffers(model), Watch()
        self._agreement = agreement.Agreement()
        self._signature: object = None
        self._known: list[Tensor] = []  # all parameters, which keeps their ids taken
        self._trained: list[Tensor] = []  # of these, those that require gradients
        self._shapes: list[torch.Size] = []  # of those
        self._idle: list[Tensor] = []  # the others
        self._synchronized: list[nn.Module] = []  # that compute with other ranks
        self._lines: list[str] = []
        self._digest = b""

    @property
    def device(self) -> torch.device:
        """The device of the parameters, and of small messages about them."""
        device: torch.device = (self._trained[0] if self._trained else self._first).device
        return device

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
        self._alone, self._moved = len(ranges) == 1, False
        self._step = f"{step} with {'+'.join(str(len(r)) for r in self._ranges)} micro-batches"
        self._trouble: UsageError | None = None
        try:
            self._look()
        except UsageError as error:
            self._signature, self._trouble = None, error
        if not self._alone:
            what = self._step.encode() + self._digest
            trouble = self._trouble is not None
            self._agreement.propose(what, trouble=trouble, device=self.device)
        if self._trouble is not None:
            if self._alone:
                raise self._trouble
            self._agreement.reached()
            raise self._common_error(self._lines)
        self._drop_gradients()
        self._buffers.begin()

    def _look(self) -> None:
        """Find the parameters and buffers of now, and what is to be summed of them."""
        sight = Sight(self._model)
        known = [*sight.parameters, *self._outside(sight.parameters)]
        signature = [(id(p), p.requires_grad, p.dtype, p.device) for p in known]
        if signature != self._signature:
            self._require_shapes(known, [buffer for *_, buffer in sight.buffers])
        others = self._buffers.look(sight)
        if (
            others
            or signature != self._signature
            or self._shapes != [each.shape for each in self._trained]
        ):
            self._lay_out(known)
        self._signature, self._owners = signature, sight.owners
        for each in self._synchronized:
            if each.training and not self._alone:
                raise UsageError(
                    "SyncBatchNorm computes with the samples of as many micro-batches as there "
                    "are workers; FixedBatch needs BatchNorm, whose statistics it combines"
                )
        self._watch.begin(known)

    def _lay_out(self, known: list[Tensor]) -> None:
        """Make the buckets for the parameters that require gradients, and for the buffers."""
        self._known = known
        self._trained = trained = [each for each in known if each.requires_grad]
        self._idle = [each for each in known if not each.requires_grad]
        if not trained:
            raise UsageError("FixedBatch has nothing to train: each parameter is frozen")
        self._shapes = [each.shape for each in trained]
        self._synchronized = [m for m in self._model.modules() if isinstance(m, nn.SyncBatchNorm)]
        self._places = [*trained, *self._buffers.mean_starts()]  # of the entries that travel
        self._buckets = make_buckets(self._places)
        names = names_of(self._model)
        self._lines = [describe("parameter", self._name(each, names), each) for each in trained]
        self._lines += self._buffers.lines(names)
        self._digest = hashlib.blake2b("\n".join(self._lines).encode(), digest_size=16).digest()

    def _outside(self, own: Sequence[Tensor]) -> list[Tensor]:
        """Return the parameters of the state's optimizers that no model of a sum has."""
        if not self.given:
            return []
        seen = {id(each) for each in own}
        for other in _sums:
            if other._model is not self._model:
                seen.update(id(each) for each in other._model.parameters())
        return [each for each in self.given if id(each) not in seen]

    def sums_any(self, parameters: Iterable[Tensor]) -> bool:
        """Return whether this step sums the gradient of any of these."""
        trained = {id(each) for each in self._trained}
        return any(id(each) in trained for each in parameters)

    def _require_shapes(self, known: Sequence[Tensor], buffers: Sequence[Tensor]) -> None:
        for each in (*known, *buffers):
            if is_lazy(each):
                raise UsageError(
                    f"{self._name(each)} has no shape yet, because its module is lazy; run the "
                    "model once on every rank before it is trained"
                )

    def _name(self, tensor: Tensor, names: dict[int, str] | None = None) -> str:
        name = (names or names_of(self._model)).get(id(tensor))
        if name is None:
            at = [number for number, each in enumerate(self.given) if each is tensor]
            name = f"{at[0]} of the optimizers" if at else "outside of the model"
        return name

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
        self._drop_gradients()

    def _gradients(self) -> Entries:
        return [parameter.grad for parameter in self._trained]

    def _drop_gradients(self) -> None:
        for parameter in self._known:
            parameter.grad = None

    # ---- the end of a step ---------------------------------------------------------------

    def finish(self) -> None:
        """Collective: leave the sums in `parameter.grad` and in the buffers.

        Raises `UsageError`, the same on all ranks, for what has no sum.
        """
        if not self._alone and not self._agreement.reached():
            raise self._common_error(self._lines)
        buffers, ends = self._buffers, len(self._trained)
        self._trouble = next(self._stray(), None)
        own = self._partial_sums()
        verdict = buffers.verdict(self.device)
        call = self._trouble is not None or bool(buffers.odd or buffers.late)
        entries, called = self._sum(own, verdict, call=call)
        if self._trouble is not None and (self._alone or not called):
            raise self._trouble
        if called and not self._alone:
            agreement.raise_trouble(self._trouble, self.device)
        buffers.judge(verdict)
        changes = [each for each in entries[ends : len(self._places)] if each is not None]
        means, failed = buffers.means(changes)
        if any(each is not None for each in failed):
            self._take_values(means, failed, [entries] if self._alone else own)
        buffers.apply(means, changes)
        if called:
            resized.settle(self._model, buffers, self._weights, self._ranges, self.device)
        buffers.derive()
        for parameter, gradient in zip(self._trained, entries, strict=False):
            parameter.grad = gradient

    def _stray(self) -> Iterator[UsageError]:
        """Yield what this rank's micro-batches have done and must not do."""
        sight = Sight(self._model)
        known = {id(each) for each in self._known}
        new = [each for each in sight.parameters if id(each) not in known]
        for each in (*self._idle, *new, *self._outside([*self._known, *new])):
            if each.grad is not None:
                yield UsageError(
                    f"parameter {self._name(each)} got a gradient, but did not require one when "
                    f"{self._step.split(' with ')[0]} began; unfreeze and add parameters before "
                    "the loop over micro-batches"
                )
        owners = {id(each) for each in self._owners}
        if any(owner and id(owner) not in owners for owner in sight.owners):
            yield UsageError(
                "a module with buffers was added inside the loop over micro-batches; add modules "
                "between two steps"
            )
        if self._buffers.removed is not None:
            yield UsageError(
                f"buffer {self._buffers.removed} was removed inside the loop over micro-batches; "
                "remove buffers between two steps"
            )
        if (changed := self._watch.changed()) is not None:
            yield UsageError(
                f"parameter {self._name(changed)} was changed inside the loop over micro-batches, "
                "once for each one of this worker; change it once a step, after that loop"
            )

    def _sum(
        self, own: list[Entries], verdict: Tensor | None, *, call: bool
    ) -> tuple[Entries, bool]:
        """Collective: return the entries of the whole step, and whether any rank called.

        The verdict becomes that of all ranks.
        """
        if self._alone:
            return self._sum_alone(own), call
        work: Any = None
        if verdict is not None:
            work = dist.all_reduce(verdict, dist.ReduceOp.MAX, async_op=True)
        entries: Entries = [None] * len(self._places)
        called = False
        flats = self._exchange(self._buckets, own, call=call)
        for bucket, flat in zip(self._buckets, flats, strict=True):
            called |= bucket.unflatten(flat, entries)
        if work is not None:
            work.wait()
        return entries, called

    def _take_values(
        self, means: list[Tensor], failed: list[Tensor | None], own: list[Entries]
    ) -> None:
        """Collective: put the mean of the values in place where that of the changes has failed."""
        first = len(self._places)  # the values come after what travels in each step
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
                raise self._common_error([*lines, *self._lines])
            found = [None] * len(chosen)
            buckets = make_buckets([means[at][where] for at, where in chosen])
            for bucket, flat in zip(buckets, self._exchange(buckets, parts), strict=True):
                bucket.unflatten(flat, found)
        for (at, where), value in zip(chosen, found, strict=True):
            means[at][where] = value

    def _common_error(self, lines: Sequence[str]) -> UsageError:
        return agreement.common_error(self._trouble, [self._step, *lines], self.device)

    def _dense(self, entries: Entries) -> Entries:
        """Return the same entries without sparse ones, which are refused."""
        for at, entry in enumerate(entries):
            if entry is not None and entry.layout != torch.strided:
                entries[at] = None
                self._trouble = self._trouble or UsageError(
                    "FixedBatch cannot add sparse gradients, as that of parameter "
                    f"{self._name(self._trained[at])}; use Embedding(sparse=False)"
                )
        return entries

    @abstractmethod
    def _partial_sums(self) -> list[Entries]:
        """Return what this worker has added up, in one or several parts."""

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
        super().begin(ranges, weights, rank, step)
        self._weight = 0.0
        self._left: list[Tensor] = []  # by micro-batches in buffers, added up

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
            torch._foreach_add_(self._left, left)
        else:
            self._left = left

    def _entries(self) -> Entries:
        none = [None] * (2 * len(self._buffers.mean_starts()))
        return [*self._gradients(), *(self._left or none)]

    def _partial_sums(self) -> list[Entries]:
        return [self._dense(self._entries())]

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
    """Sums in the fixed tree of `policies.microbatches`, with the same bits on any world size.

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
        names, size = [block for theirs in blocks for block in theirs], len(blocks)
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
            part = finish_tree(parts, len(self._weights), Tensor.add_).mul_(self._weights[0])
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
        torch._foreach_mul_(present, factor)
    return entries


def _add_entries(left: Entries, right: Entries) -> Entries:
    """Return the sum, in the memory of either."""
    pairs = [(a, b) for a, b in zip(left, right, strict=True) if a is not None and b is not None]
    if pairs:
        torch._foreach_add_([a for a, _ in pairs], [b for _, b in pairs])
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
