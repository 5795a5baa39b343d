"""Finds the rank with the newest state, and sends that state to the ranks that need it.

`state` asks `agree` after every rejoin, then calls, on every rank of the world and in the same
order: `send` on the source, `receive` on ranks that need the state, `stand_by` on ranks that have
it already, where all ranks take part. One document is sent first (the names of everything, and
every plain value), then all tensors, into the receivers' own.

A single receiver is sent to directly, so that no other rank waits; several receive by broadcast
(`Route`). Tensors are sent as bytes, in chunks of bounded size. Small ones are packed together;
large ones go straight from the sender's memory to the receiver's, in slices, so that each side
needs at most one chunk of memory beyond the state itself. Only a tensor that is not contiguous is
copied as a whole. Sizes are bytes.

The first words that the ranks of a new world exchange are a row of whole numbers from each
(`gather_rows`).
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from msgspec import Struct
from torch import Tensor

from elastic_driver.errors import ElasticError, ExitCode, UsageError
from elastic_driver.words.world import StateVersion, receivers_of, source_of
from elastic_driver.worker.current import say
from elastic_driver.worker.state_sync.contents import RandomStates, TensorSpec, as_bytes
from elastic_driver.worker.state_sync.message import Reader, Writer, places
from elastic_driver.worker.state_sync.part import Outgoing, StatePart
from elastic_driver.worker.state_sync.tree import Tree

VALUES, GRADIENTS = "(values)", "(gradients)"  # no attribute has such a name

# ---- the newest state --------------------------------------------------------------------


class Route(Struct, frozen=True):
    """The rank that sends and the ranks that receive."""

    source: int
    receivers: frozenset[int]

    @property
    def takes_all(self) -> bool:
        """True if every rank of the world has to take part in each transfer."""
        return len(self.receivers) > 1

    def begin(self, content: Tensor) -> dist.Work:
        """Begin to copy the source's contiguous CPU tensor into that of every rank that takes part.

        Transfers arrive in the order in which they begin. Wait for the returned work before
        `content` is used again.
        """
        if self.takes_all:
            return dist.broadcast(content, self.source, async_op=True)
        if dist.get_rank() == self.source:
            (receiver,) = self.receivers
            return dist.isend(content, receiver)
        return dist.irecv(content, self.source)


class StateLostError(ElasticError):
    """No worker holds the whole state any more."""

    exit_code = ExitCode.UNAVAILABLE


class UnfitError(UsageError):
    """This worker cannot take over the state of the others: it has built another one."""


class Agreement(Route, frozen=True):
    """The way of the newest state to the ranks that lack it; empty if every rank has it already.

    `version` is the number of committed steps that every state stands for afterwards. `fresh`:
    no rank has trained yet, and training starts from the source's first values.
    """

    version: int
    fresh: bool


def agree(
    states: Sequence[StateVersion],
    round_id: int,
    *,
    reloads: bool = False,
    least: int = 0,
    repair: bool = False,
    gone: int = 0,
) -> Agreement:
    """Apply the rule of `words.world` to the states of a world, by rank. Pure.

    All ranks know the same states, so all get the same answer without a message, and a round in
    which no rank has to receive moves no tensors.

    Args:
        states: what each rank has brought into the round.
        round_id: for errors.
        reloads: the source can load a checkpoint, so no rank needs to have a whole state.
        least: the committed steps from which an untrained state counts.
        repair: the ranks hold different states: all others receive from the source.
        gone: committed steps of a state that no rank may begin without; 0: there is none.

    Raises `StateLostError` where the state was trained and no rank has it as it was committed.
    """
    source = source_of(states)
    trained = any(state.trained or not state.clean for state in states)
    fresh = source is None or not states[source].trained
    if trained and fresh:
        if not reloads:
            raise StateLostError(
                f"round {round_id}: no worker holds the state of the last commit any more: a "
                "failure came in the middle of a step on all of them, or the last one with the "
                "whole state is gone; give the state a checkpoint_dir to survive this "
                "(docs/checkpoints.md), and start the job again"
            )
        source = 0
    if fresh and gone and not reloads:
        raise state_gone(gone, "it has no checkpoint_dir")
    if source is None:
        source = 0
    receivers = receivers_of(states, source, repair=repair or fresh)
    return Agreement(source, receivers, max(states[source].steps, least, 0), fresh)


def state_gone(steps: int, why: str) -> StateLostError:
    """Return the error for a state of so many committed steps that no worker holds any more."""
    return StateLostError(
        f"the state of step {steps} or later is gone: every worker that held it was lost, and "
        f"{why}; give the state a checkpoint_dir to survive this (docs/checkpoints.md), or begin "
        "anew with --restart-from-scratch"
    )


# ---- the state as a message --------------------------------------------------------------


class LiveState(Struct, frozen=True):
    """A state as it is, and the random generators that belong to it."""

    tree: Tree
    random: RandomStates

    @property
    def parts(self) -> dict[str, StatePart]:
        """The parts by path."""
        return self.tree.parts

    @property
    def values(self) -> dict[str, Any]:
        """All attributes by name."""
        return self.tree.values


class PackedValue(Struct, frozen=True):
    """One part of the state, or all its plain values: a document, and the specs of its tensors."""

    document: bytes
    specs: tuple[TensorSpec, ...]


class Envelope(Struct, frozen=True):
    """All of a state but its tensors, which follow in the order of the specs, `parts` first.

    Checkpoints store it too. `resumed`: the sender has read this state from a checkpoint, of this
    many committed steps. `durable`: what attributes add to checkpoints only (`keeper.Durable`).
    `problem`: the sender could not pack its state, and why; `lost`: it has none, as nobody has.
    """

    parts: dict[str, PackedValue]
    plain: dict[str, PackedValue]
    random: bytes
    resumed: int | None = None
    durable: dict[str, bytes] = {}
    problem: str = ""
    lost: bool = False


def split(state: LiveState) -> dict[str, Outgoing]:
    """Take the live tensors out of each part, then out of plain values and kept gradients.

    The documents are plain data, and share nothing with the state. A tensor's name is the attribute
    and its path in there, as `torch.distributed.checkpoint` would name it: `model.0.weight`,
    `optimizer.state.0.exp_avg`.
    """
    tree = state.tree
    contents = {name: part.outgoing() for name, part in state.parts.items()}
    numbers = {id(part.thing): number for number, part in enumerate(tree.parts.values())}
    writer = Writer(numbers)
    plain = {n: writer.write(v, n) for n, v in state.values.items() if n not in state.parts}
    contents[VALUES] = plain, writer.tensors
    gradients = tree.kept_gradients()
    named = [(f"gradients.{name}", tensor) for name, tensor in gradients]
    contents[GRADIENTS] = [name for name, _ in gradients], named
    return contents


def make_envelope(
    contents: Mapping[str, Outgoing],
    parts: Collection[str],
    random: dict[str, Any],
    resumed: int | None = None,
    durable: dict[str, bytes] | None = None,
) -> Envelope:
    """Return the envelope of a split state, with these states of the random generators."""
    packed_parts: dict[str, PackedValue] = {}
    plain: dict[str, PackedValue] = {}
    for name, (document, tensors) in contents.items():
        specs = tuple(TensorSpec.of(tensor) for _, tensor in tensors)
        target = packed_parts if name in parts else plain
        target[name] = PackedValue(msgspec.msgpack.encode(document), specs)
    return Envelope(packed_parts, plain, pack_random(random), resumed, durable or {})


def pack_random(states: dict[str, Any]) -> bytes:
    """Return the states of the random generators as bytes."""
    writer = Writer()
    written = writer.write(states, "the random state")
    tensors = [
        (tuple(t.shape), bytes(t.cpu().contiguous().view(torch.uint8).tolist()))
        for _, t in writer.tensors
    ]
    dtypes = [str(t.dtype).removeprefix("torch.") for _, t in writer.tensors]
    return msgspec.msgpack.encode([written, tensors, dtypes])


def unpack_random(data: bytes) -> dict[str, Any]:
    """Return what `pack_random` packed."""
    written, tensors, dtypes = msgspec.msgpack.decode(data)
    found = [
        torch.frombuffer(bytearray(content), dtype=getattr(torch, dtype)).view(shape)
        for (shape, content), dtype in zip(tensors, dtypes, strict=True)
    ]
    states: dict[str, Any] = Reader(found, what="the random state").read(written)
    return states


def unpack(data: bytes) -> Envelope:
    """Return the envelope in these bytes."""
    return msgspec.msgpack.decode(data, type=Envelope)


def take_over(
    state: LiveState,
    envelope: Envelope,
    fill: Callable[[list[Tensor]], None],
    with_random: bool,
    *,
    same_script: bool = True,
) -> None:
    """Load the contents of an envelope into a state.

    `fill` writes the tensors of the sender into the given ones, which are in the same order.
    `same_script`: the sender lives and runs this script, so it may have values that this process
    has not made yet. Raises `UsageError` where this script's state has other parts or values, or
    they are built differently.
    """
    state.tree.walk(lenient=True)
    parts = {n: (msgspec.msgpack.decode(v.document), v.specs) for n, v in envelope.parts.items()}
    plain = {n: (msgspec.msgpack.decode(v.document), v.specs) for n, v in envelope.plain.items()}
    _require_names(state, list(parts), plain[VALUES][0], same_script=same_script)
    arrived = [
        (state.parts[name], document, state.parts[name].places(document, specs))
        for name, (document, specs) in parts.items()
    ]
    values, specs = plain[VALUES]
    wrapped = ["dict", None, [*values, *values.values()]]
    lives = {name: state.values.get(name) for name in values}
    value_places = places(wrapped, specs, lives)
    names, specs = plain[GRADIENTS]
    gradients = [spec.allocate() for spec in specs]
    fill([t for *_, own in arrived for t in own] + value_places + gradients)
    for part, document, own in arrived:
        part.accept(document, own)
    things = [part.thing for part in state.parts.values()]
    by_sender = [state.parts[name].thing for name in parts]
    reader = Reader(value_places, by_sender, what="the state")
    for name, written in values.items():
        state.values[name] = reader.read(written, state.values.get(name))
    del things
    for name in [n for n in state.values if same_script and n not in state.parts]:
        if name not in values:  # this process made it in a step that came to nothing
            del state.values[name]
    state.tree.walk()
    state.tree.receive_gradients(list(zip(names, gradients, strict=True)))
    if with_random:
        state.random.put(unpack_random(envelope.random))


def _require_names(
    state: LiveState, parts: Sequence[str], values: Mapping[str, Any], *, same_script: bool
) -> None:
    if set(parts) != set(state.parts):
        raise UsageError(
            f"this worker's state has the parts {', '.join(state.parts) or '(none)'}, the "
            f"trained one {', '.join(parts) or '(none)'}; run the same script on every worker, "
            "and make all before the training function"
        )
    if same_script:
        return
    lacking = [name for name in values if name not in state.values]
    fresh = [name for name in state.values if name not in state.parts and name not in values]
    if lacking:
        renamed = f" ({fresh[0]!r} is new)" if fresh else ""
        raise UsageError(
            f"the trained state has a value {lacking[0]!r}, which this script's state lacks"
            f"{renamed}; give the state what it had, under the same names"
        )
    if fresh:
        say(f"the trained state has no {', '.join(map(repr, fresh))}; the first values are used")


# ---- the transfer ------------------------------------------------------------------------


def send(state: LiveState, route: Route, resumed: int | None = None) -> str:
    """Send the whole state from this rank; `resumed`: see `Envelope`.

    Returns "", or why it cannot be packed: then the receivers learn that, and this rank goes on.
    """
    try:
        contents = split(state)
        envelope = make_envelope(contents, state.parts, state.random.portable(), resumed)
    except Exception as error:  # whatever it is: this rank goes on
        problem = f"{error}"[:1000]
        carry_bytes(msgspec.msgpack.encode(Envelope({}, {}, b"", problem=problem)), route)
        return problem
    carry_bytes(msgspec.msgpack.encode(envelope), route)
    carry_tensors([tensor for _, own in contents.values() for _, tensor in own], route)
    return ""


def refuse(error: StateLostError, route: Route) -> None:
    """Tell the other ranks that there is no state to send."""
    carry_bytes(msgspec.msgpack.encode(Envelope({}, {}, b"", problem=str(error), lost=True)), route)


def stand_by(route: Route) -> None:
    """Take part in the transfer, and keep this rank's own state."""
    envelope = unpack(carry_bytes(None, route))
    specs = [spec for v in (envelope.parts | envelope.plain).values() for spec in v.specs]
    # Only the sizes matter here, and meta tensors take no memory.
    carry_tensors([spec.allocate("meta") for spec in specs], route)


def receive(state: LiveState, route: Route, with_random: bool) -> int | None:
    """Take over the state of the route's source.

    `with_random`: its random generators as well. Returns the envelope's `resumed`. Raises
    `UnfitError` for what `take_over` refuses, and where the sender could not pack its state.
    """
    envelope = unpack(carry_bytes(None, route))
    if envelope.lost:
        raise StateLostError(envelope.problem)
    if envelope.problem:
        raise UnfitError(f"rank {route.source} cannot send its state: {envelope.problem}")
    with_random = with_random or envelope.resumed is not None
    try:
        take_over(state, envelope, lambda tensors: carry_tensors(tensors, route), with_random)
    except UsageError as error:
        raise UnfitError(str(error)) from None
    return envelope.resumed


# ---- the first words of a world --------------------------------------------------------


def gather_rows(row: Sequence[int], size: int) -> list[list[int]]:
    """Return the rows of all ranks, by rank. Collective; all rows have the same length.

    Costs a fifth of a millisecond between processes of one machine.
    """
    mine = torch.tensor([int(each) for each in row], dtype=torch.int64)
    if size == 1:
        return [mine.tolist()]
    rows = [torch.empty_like(mine) for _ in range(size)]
    work = dist.all_gather(rows, mine, async_op=True)
    assert work is not None  # noqa: S101 - it is asynchronous
    work.wait()  # in slices: see `world.gloo`
    return [each.tolist() for each in rows]


# ---- bytes and tensors on their way ----------------------------------------------------

CHUNK_BYTES = 32 * 1024 * 1024
ALONE_BYTES = 1024 * 1024  # a tensor of this size is not worth packing with others


def carry_bytes(data: bytes | None, route: Route) -> bytes:
    """Return the source's bytes on every rank that takes part; all but the source pass None."""
    length = torch.tensor([0 if data is None else len(data)])
    route.begin(length).wait()
    content = bytearray(int(length)) if data is None else bytearray(data)
    route.begin(torch.frombuffer(content, dtype=torch.uint8)).wait()
    return bytes(content)


def carry_tensors(tensors: Sequence[Tensor], route: Route) -> None:
    """Copy the source's tensors into the receivers'.

    Every rank that takes part passes tensors of the same shapes and dtypes in the same
    order. A rank that is neither source nor receiver passes meta tensors.
    """
    sending = dist.get_rank() == route.source
    receiving = dist.get_rank() in route.receivers
    pending: list[dist.Work] = []  # one large tensor is read from memory while another is sent
    for group in _groups(tensors):
        flat = [as_bytes(tensor) for tensor in group]
        alone = [[part] for part in flat[0].split(CHUNK_BYTES)]
        for parts in alone if len(flat) == 1 else [flat]:
            if len(parts) == 1 and parts[0].device.type == "cpu":
                pending.append(route.begin(parts[0]))
                continue
            sizes = [len(part) for part in parts]
            chunk = torch.empty(sum(sizes), dtype=torch.uint8)
            if sending:
                torch.cat([part.cpu() for part in parts], out=chunk)
            route.begin(chunk).wait()
            if receiving:
                for part, data in zip(parts, chunk.split(sizes), strict=True):
                    part.copy_(data)
        if receiving and not all(tensor.is_contiguous() for tensor in group):
            while pending:
                pending.pop().wait()
            for tensor, data in zip(group, flat, strict=True):  # the data are in a copy
                tensor.detach().copy_(data.view(tensor.dtype).view(tensor.shape))
    for work in pending:
        work.wait()


def _groups(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield each large tensor alone, and small ones together, up to the size of a chunk."""
    group: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if tensor.nbytes >= min(ALONE_BYTES, CHUNK_BYTES):
            yield [tensor]
        elif tensor.nbytes:
            if size + tensor.nbytes > CHUNK_BYTES:
                yield group
                group, size = [], 0
            group.append(tensor)
            size += tensor.nbytes
    if group:
        yield group
