"""What a step sums, and in what form it travels; whether all ranks are about to do the same.

`batching.gradients` uses this. A `Layout` says which tensors travel, in which order and buckets; it
is looked up when a step begins, compared with what is there when it ends, and must be the same on
all ranks. A `Bucket` holds gradients and changes of buffers as one flat tensor. Neither
communicates or chooses weights. Sizes are elements unless a name says bytes.

Buckets have the sizes that a rank gives them. Were a layer unfrozen on one rank only, gloo would
wait for bytes that never come, or add those of other parameters. So each rank *proposes* what it is
going to exchange (`Agreement`), as a number made from all of it, in a message that has the same
size on all ranks: three numbers of which the maximum is taken. Where the proposals differ, or a
rank has something to refuse, all ranks tell each other why, and all raise the same error. This is
collective, in torch's default group: bounded texts, never pickles.

Some buffers are resized or made in a step: per-channel observers have no elements until their first
micro-batch, and caches are made in it. Ranks without micro-batches have not seen that. It is rare,
so it may cost: every rank tells which buffers its micro-batches have resized or made, and each of
their values goes to all ranks, in the order of the virtual workers (`settle_buffers`). All ranks
then decide the same, or raise the same `UsageError`.
"""

import hashlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from operator import attrgetter, is_
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

from elastic_driver.errors import UsageError
from elastic_driver.worker import torch_seams
from elastic_driver.worker.batching.buffers import Buffers
from elastic_driver.worker.batching.sight import (
    Place,
    Rule,
    Sight,
    Watch,
    describe,
    is_lazy,
    names_of,
)
from elastic_driver.worker.torch_seams import buckets, buffers_of, unsaved_buffers_of

_KIND = attrgetter("requires_grad", "shape", "dtype", "device")

_subjects: "weakref.WeakSet[Subject]" = weakref.WeakSet()  # all of this process


class Layout:
    """The tensors that travel in a step: gradients, and what micro-batches change in buffers.

    Attributes:
        trained: the parameters whose gradients are summed.
        entries: how many tensors are summed: those, and one for each kind of buffers with a mean.
        buckets: the flat tensors in which they travel.
        verdict_size: integers of which the maximum is taken.
        lines: the names of all this, one each.
        digest: of the lines.
    """

    def __init__(self, trained: list[Tensor], names: Sequence[str], buffers: Buffers) -> None:
        starts = buffers.mean_starts()
        self.trained = trained
        self.entries = len(trained) + len(starts)
        self.buckets = make_buckets([*trained, *starts])
        self.verdict_size = buffers.verdict_size
        self.lines = [
            describe("parameter", name, each) for name, each in zip(names, trained, strict=True)
        ]
        self.lines += buffers.lines()
        text = "\n".join(self.lines)
        self.digest = hashlib.blake2b(text.encode(), digest_size=16).digest()


class Subject:
    """The model that is trained, and what else the state's optimizers train.

    Attributes:
        given: the parameters of the state's optimizers. Those that are neither in the model nor in
            that of another subject are summed too.
        buffers: of the model.
    """

    def __init__(self, model: nn.Module) -> None:
        first = next(model.parameters(), None)
        if first is None:
            raise UsageError("FixedBatch was given a model without trainable parameters")
        _subjects.add(self)
        self.model, self._first = model, first
        self.given: Sequence[Tensor] = ()
        self.buffers = Buffers(model)
        self._watch = Watch()
        self._sight: Sight | None = None
        self._layout: Layout | None = None
        self._kinds: list[Any] = []
        self._known: list[Tensor] = []  # all parameters
        self._idle: list[Tensor] = []  # of these, those that do not require gradients
        self._synchronized: list[nn.Module] = []  # modules that compute with other ranks

    @property
    def device(self) -> torch.device:
        """The device of the parameters, and of small messages about them."""
        trained = self._layout.trained if self._layout is not None else []
        device: torch.device = (trained[0] if trained else self._first).device
        return device

    # ---- when a step begins --------------------------------------------------------------

    def look(self, *, alone: bool) -> Layout:
        """Return the layout of now; the same object as before if nothing has changed.

        Raises `UsageError` for what cannot be trained.
        """
        if self._sight is None or not self._sight.holds():
            self._sight = Sight(self.model)
            self._layout = None
        known = [*self._sight.parameters, *self._outside(self._sight.parameters)]
        if self._layout is None:
            self._require_shapes(known)
        kinds = list(map(_KIND, known))
        others = self.buffers.look(self._sight) or kinds != self._kinds
        if self._layout is None or others or not all(map(is_, known, self._known)):
            self._lay_out(known)
            self._kinds = kinds
        for each in self._synchronized:
            if each.training and not alone:
                raise UsageError(
                    "SyncBatchNorm computes with the samples of as many micro-batches as there "
                    "are workers; FixedBatch needs BatchNorm, whose statistics it combines"
                )
        assert self._layout is not None  # noqa: S101 - it was made above
        if not self._layout.trained and torch.is_grad_enabled():  # else BatchNorm is calibrated
            raise UsageError("FixedBatch has nothing to train: each parameter is frozen")
        self._watch.begin(self._known)
        return self._layout

    def _lay_out(self, known: list[Tensor]) -> None:
        self._layout, self._known = None, known
        trained = [each for each in known if each.requires_grad]
        self._idle = [each for each in known if not each.requires_grad]
        self._synchronized = [m for m in self.model.modules() if isinstance(m, nn.SyncBatchNorm)]
        names = names_of(self.model)
        self._layout = Layout(trained, [self.name(each, names) for each in trained], self.buffers)

    def _outside(self, own: Sequence[Tensor]) -> list[Tensor]:
        """Return the parameters of the state's optimizers that no subject's model has."""
        if not self.given:
            return []
        seen = {id(each) for each in own}
        for other in _subjects:
            if other.model is not self.model:
                seen.update(id(each) for each in other.model.parameters())
        return [each for each in self.given if id(each) not in seen]

    def _require_shapes(self, known: Sequence[Tensor]) -> None:
        assert self._sight is not None  # noqa: S101 - look() has just made it
        for each in (*known, *(buffer for *_, buffer in self._sight.buffers)):
            if is_lazy(each):
                raise UsageError(
                    f"{self.name(each)} has no shape yet, because its module is lazy; run the "
                    "model once on every rank before it is trained"
                )

    def name(self, tensor: Tensor, names: dict[int, str] | None = None) -> str:
        """Return the name of a parameter; `names` are those of the model."""
        name = (names_of(self.model) if names is None else names).get(id(tensor))
        if name is None:
            at = [number for number, each in enumerate(self.given) if each is tensor]
            name = f"{at[0]} of the optimizers" if at else "outside of the model"
        return name

    # ---- while it lasts ------------------------------------------------------------------

    def drop_gradients(self) -> None:
        """Drop the gradients of all parameters, also of frozen ones: optimizers would use them."""
        for parameter in self._known:
            parameter.grad = None

    def trains_any(self, parameters: Iterable[Tensor]) -> bool:
        """Return whether this step sums the gradient of any of these."""
        trained = {id(each) for each in self._layout.trained} if self._layout is not None else set()
        return any(id(each) in trained for each in parameters)

    # ---- when it ends --------------------------------------------------------------------

    def stray(self, step: str) -> Iterator[UsageError]:
        """Yield what this rank's micro-batches have done and must not do."""
        new: list[Tensor] = []
        if self._sight is not None and not self._sight.holds():
            sight = Sight(self.model)
            before = set(map(id, self._sight.modules))
            known = set(map(id, self._known))
            new = [each for each in sight.parameters if id(each) not in known]
            if any(buffers_of(each) and id(each) not in before for each in sight.modules):
                yield UsageError(
                    "a module with buffers was added inside the loop over micro-batches; add "
                    "modules between two steps"
                )
        for each in (*self._idle, *new):
            if each.grad is not None:
                yield UsageError(
                    f"parameter {self.name(each)} got a gradient, but did not require one when "
                    f"{step} began; unfreeze and add parameters before the loop over micro-batches"
                )
        if self.buffers.trouble is not None:
            yield self.buffers.trouble
        if (changed := self._watch.changed()) is not None:
            yield UsageError(
                f"parameter {self.name(changed)} was changed inside the loop over micro-batches, "
                "once for each one of this worker; change it once a step, after that loop"
            )


# ---- buckets ---------------------------------------------------------------------------

BUCKET_BYTES = 25 * 1024 * 1024  # DistributedDataParallel's default


class Bucket:
    """Tensors of one dtype and device that travel as one flat tensor.

    The values are followed by one flag for each entry: whether it has a value at all. A parameter
    that no micro-batch used keeps `grad=None`, as in plain torch: optimizers skip it. One flag more
    tells all ranks that one of them has something to say.
    """

    def __init__(self, entries: Sequence[int], tensors: Sequence[Tensor]) -> None:
        self._entries = list(entries)
        self._shapes = [tensors[entry].shape for entry in entries]
        self._sizes = [*(shape.numel() for shape in self._shapes), len(entries) + 1]
        self._like = tensors[entries[0]].new_empty(0)
        # The flags are nearly always the same as in the last step.
        self._flags = lru_cache(maxsize=1)(self._like.new_tensor)
        self.length = sum(self._sizes)

    def empty(self, length: int) -> Tensor:
        """Return a new flat tensor of the bucket's dtype and device."""
        return self._like.new_empty(length)

    def flatten(
        self,
        tensors: Sequence[Tensor | None],
        weight: float = 1,
        room: int | None = None,
        *,
        call: bool = False,
    ) -> Tensor:
        """Return weight · (this bucket's tensors, one behind the other), then the flags: (length,).

        `call` is the last flag. With `room` for more elements the rest is 0.
        """
        flat = self.empty(room or self.length)
        flat[self.length :].zero_()
        present = (*(tensors[entry] is not None for entry in self._entries), call)
        values = [
            self._like.new_zeros(size) if (tensor := tensors[entry]) is None else tensor.reshape(-1)
            for entry, size in zip(self._entries, self._sizes, strict=False)
        ]
        if weight == 1:
            torch.cat([*values, self._flags(present)], out=flat[: self.length])
            return flat
        *places, flags = flat[: self.length].split_with_sizes(self._sizes)
        for place, value in zip(places, values, strict=True):
            torch.mul(value, weight, out=place)  # copies and weighs in one pass over memory
        flags.copy_(self._flags(present))
        return flat

    def unflatten(self, flat: Tensor, found: list[Tensor | None]) -> bool:
        """Put into `found`, by entry, the view of each tensor that any worker had.

        Returns whether any worker called.
        """
        *views, flags = flat[: self.length].split_with_sizes(self._sizes)
        *flagged, call = flags.tolist()
        for entry, view, shape, present in zip(
            self._entries, views, self._shapes, flagged, strict=True
        ):
            found[entry] = view.view(shape) if present else None
        return bool(call)


def make_buckets(tensors: list[Tensor]) -> list[Bucket]:
    """Return buckets that are full at `BUCKET_BYTES`, as `DistributedDataParallel` makes them."""
    if not tensors:
        return []
    return [Bucket(entries, tensors) for entries in buckets(tensors, BUCKET_BYTES)]


# ---- the agreement of the ranks --------------------------------------------------------

MOST_BYTES = 1 << 22  # of one rank's text


class Agreement:
    """The proposal of this rank."""

    def __init__(self) -> None:
        self._sent: tuple[Tensor, Any] | None = None

    def propose(self, what: bytes, *, trouble: bool, device: torch.device) -> None:
        """Begin to compare `what` with that of all ranks, and tell them of trouble. Collective."""
        number = int.from_bytes(hashlib.blake2b(what, digest_size=8).digest(), "big") >> 2
        words = torch.tensor([number, -number, int(trouble)], device=of_control(device))
        self._sent = words, dist.all_reduce(words, dist.ReduceOp.MAX, async_op=True)

    def reached(self) -> bool:
        """Wait; return whether all ranks proposed the same, and none has trouble."""
        assert self._sent is not None  # noqa: S101 - propose() came first
        words, work = self._sent
        self._sent = None
        work.wait()
        highest, lowest, trouble = words.tolist()
        return bool(highest == -lowest and not trouble)


def of_control(device: torch.device) -> torch.device:
    """Return the device for small messages: the processor, if the group connects processors."""
    cpu = torch.device("cpu")
    if device.type != "cpu" and cpu not in torch_seams.device_types(dist.group.WORLD):
        return device
    return cpu


def common_error(
    trouble: UsageError | None, lines: Sequence[str], device: torch.device
) -> UsageError:
    """Return the error that all ranks raise; collective, after an agreement that failed.

    Args:
        trouble: what this rank refuses. Of several ranks' refusals the lowest rank's counts.
        lines: what this rank proposed; the first one names the step.
        device: of the parameters.
    """
    for text in exchange_texts(str(trouble or ""), device):
        if text:
            return UsageError(text)
    theirs = broadcast_text("\n".join(lines), device).split("\n")
    for text in exchange_texts(_difference(lines, theirs), device):
        if text:
            return UsageError(
                f"the ranks do not train the same: {text}; freeze, unfreeze, add, replace and "
                "resize the same on every rank, in the same step"
            )
    return UsageError(f"the ranks do not train the same in {lines[0]}")


def _difference(mine: Sequence[str], theirs: Sequence[str]) -> str:
    """Return how these lines differ from rank 0's; empty if they are the same."""
    if list(mine) == list(theirs):
        return ""
    rank = dist.get_rank()
    ours = set(mine)
    zeros = set(theirs)
    extra = [line for line in mine if line not in zeros]
    missing = [line for line in theirs if line not in ours]
    if extra and missing:
        return f"rank {rank} has {extra[0]}, rank 0 has {missing[0]}"
    if extra:
        return f"rank {rank} has {extra[0]}, rank 0 has not"
    if missing:
        return f"rank 0 has {missing[0]}, rank {rank} has not"
    return f"rank {rank} has the same parameters as rank 0 in another order"


# ---- texts -------------------------------------------------------------------------------


def exchange_texts(text: str, device: torch.device) -> list[str]:
    """Return every rank's text, by rank. Collective; texts are cut at `MOST_BYTES`."""
    device = of_control(device)
    data = text.encode(errors="replace")[:MOST_BYTES]
    world = dist.get_world_size()
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(world)]
    dist.all_gather(sizes, torch.tensor([len(data)], device=device))
    lengths = [int(size) for size in sizes]
    longest = max(lengths)
    if longest == 0:
        return [""] * world
    found = [torch.zeros(longest, dtype=torch.uint8, device=device) for _ in range(world)]
    dist.all_gather(found, _bytes(data, longest, device))
    return [_text(part[:length]) for part, length in zip(found, lengths, strict=True)]


def broadcast_text(text: str, device: torch.device) -> str:
    """Return rank 0's text. Collective."""
    device = of_control(device)
    data = text.encode(errors="replace")[:MOST_BYTES]
    size = torch.tensor([len(data)], device=device)
    dist.broadcast(size, 0)
    length = int(size)
    found = _bytes(data[:length], length, device)
    dist.broadcast(found, 0)
    return _text(found)


def _bytes(data: bytes, length: int, device: torch.device) -> Tensor:
    padded = bytearray(max(1, length))
    padded[: len(data)] = data
    return torch.frombuffer(padded, dtype=torch.uint8)[: max(1, length)].to(device)


def _text(data: Tensor) -> str:
    return bytes(data.cpu().tolist()).decode(errors="replace")


# ---- buffers that a step resizes or makes ----------------------------------------------

_DTYPES = {str(each): each for each in vars(torch).values() if isinstance(each, torch.dtype)}


class _Made(msgspec.Struct, frozen=True):
    """What one micro-batch left in a buffer that is no longer as the step began with it."""

    name: str
    late: bool  # made in this step; else resized
    virtual_worker: int
    dtype: str
    shape: tuple[int, ...]
    persistent: bool


Given = tuple[_Made, Tensor]


def settle_buffers(
    model: nn.Module,
    buffers: Buffers,
    weights: Sequence[float],
    ranges: Sequence[range],
    device: torch.device,
) -> None:
    """Give such buffers the same value on every rank. Collective, if there are several ranks."""
    found = list(_made(model, buffers))
    given = found if len(ranges) == 1 else _given_by_all(found, ranges, device)
    by_name: dict[str, list[Given]] = {}
    for made, value in given:
        by_name.setdefault(made.name, []).append((made, value))
    places = {buffers.name(place): place for place in buffers.places}
    for name in sorted(by_name):
        found = sorted(by_name[name], key=lambda each: each[0].virtual_worker)
        _require_one_shape(name, found)
        if name in places:
            _fill(places[name], _resized(buffers, places[name], found, weights))
        else:
            _add(model, *_late(found))


def _made(model: nn.Module, buffers: Buffers) -> list[Given]:
    known = [(name, False) for name in buffers.odd] + [(name, True) for name in buffers.late]
    found = []
    for name, late in known:
        owner, _, key = name.rpartition(".")
        persistent = key not in unsaved_buffers_of(model.get_submodule(owner))
        values: Mapping[int, Tensor] = (buffers.late if late else buffers.odd)[name]
        for virtual_worker, value in values.items():
            shape = tuple(value.shape)
            made = _Made(name, late, virtual_worker, str(value.dtype), shape, persistent)
            found.append((made, value))
    return found


def _given_by_all(
    own: Sequence[Given], ranges: Sequence[range], device: torch.device
) -> list[Given]:
    """Return what all ranks have made, with the values on this rank's device. Collective."""
    text = msgspec.json.encode([made for made, _ in own]).decode()
    values = {(made.name, made.virtual_worker): value for made, value in own}
    everything: list[Given] = []
    for rank, (theirs, mine) in enumerate(zip(exchange_texts(text, device), ranges, strict=True)):
        for made in msgspec.json.decode(theirs, type=list[_Made]):
            if made.dtype not in _DTYPES or made.virtual_worker not in mine:
                raise UsageError(f"rank {rank} sent a buffer {made.name} that it cannot have")
            value = values.get((made.name, made.virtual_worker))
            if value is None or rank != dist.get_rank():
                value = torch.empty(made.shape, dtype=_DTYPES[made.dtype], device=device)
            value = value.to(device).contiguous()
            if value.numel():
                dist.broadcast(value.view(-1).view(torch.uint8), rank)
            everything.append((made, value))
    return everything


def _require_one_shape(name: str, given: Sequence[Given]) -> None:
    first = given[0][0]
    for made, _ in given:
        if (made.shape, made.dtype, made.late) != (first.shape, first.dtype, first.late):
            raise UsageError(
                f"buffer {name} got another size in each micro-batch ({first.shape} and "
                f"{made.shape}); make it as large as it can become before training, or keep it "
                "out of the buffers"
            )


def _resized(
    buffers: Buffers, place: Place, given: Sequence[Given], weights: Sequence[float]
) -> Tensor:
    """Return the value of a buffer that micro-batches have resized."""
    if place.rule is Rule.CONSTANT:
        raise buffers.table(place)
    values = [value for _, value in given]
    if all(torch.equal(value, values[0]) for value in values):
        same = values[0]
    elif place.rule in _COMBINED:
        return _COMBINED[place.rule](torch.stack(values))
    elif place.rule is Rule.MEAN:
        part = torch.tensor([weights[made.virtual_worker] for made, _ in given])
        shares = (part / part.sum()).to(values[0]).view(-1, *[1] * values[0].dim())
        same = (torch.stack(values) * shares).sum(0)
    else:
        raise UsageError(
            f"buffer {buffers.name(place)} of whole numbers was resized and filled in another way "
            "by each micro-batch; change it once a step, after the loop over micro-batches"
        )
    if len(given) < len(weights) and place.start.numel():
        raise UsageError(
            f"buffer {buffers.name(place)} was resized by some micro-batches of a step and not by "
            "others; resize it before training, or between two steps"
        )
    return same


_COMBINED: dict[Rule, Callable[[Tensor], Tensor]] = {
    Rule.LOWEST: lambda values: values.amin(0),
    Rule.HIGHEST: lambda values: values.amax(0),
}


def _fill(place: Place, value: Tensor) -> None:
    with torch.no_grad():
        place.tensor.resize_(value.shape).copy_(value)


def _late(given: Sequence[Given]) -> Given:
    """Return a buffer that was made in this step: the same by all micro-batches."""
    made, value = given[0]
    for other, another in given:
        if not torch.equal(value, another):
            raise UsageError(
                f"buffer {made.name} was made in this step, with another value by virtual worker "
                f"{other.virtual_worker} than by {made.virtual_worker}; make it before training"
            )
    return made, value


def _add(model: nn.Module, made: _Made, value: Tensor) -> None:
    """Register a buffer that other ranks' micro-batches have made, unless it is there."""
    owner, _, key = made.name.rpartition(".")
    try:
        module: Any = model.get_submodule(owner)
    except AttributeError:
        module = None
    if module is None:
        raise UsageError(
            f"buffer {made.name} came with a module that other ranks do not have; add modules on "
            "every rank, between two steps"
        )
    if buffers_of(module).get(key) is None:
        if key in buffers_of(module):
            buffers_of(module)[key] = value
        else:
            module.register_buffer(key, value, persistent=made.persistent)
