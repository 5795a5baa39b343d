"""Checks that the requests of several ranks are one operation; pure."""

from collections.abc import Callable, Mapping, Sequence

from elastic_driver.horovod.engine.messages import Agreement, Request

MAX_ERROR_CHARS = 2000
OPERATIONS = ("Average", "Sum", "Adasum", "Min", "Max", "Product")
_WITHOUT_JOIN = "allgather broadcast alltoall reducescatter add_process_set remove_process_set"


def agree(
    members: Sequence[int], requests: Mapping[int, Request], joined: Sequence[int]
) -> Agreement:
    """Return the agreement of all members, which is an error where they disagree.

    Args:
        members: the ranks of the process set, in order.
        requests: by rank; all have the same key. At least one.
        joined: members that have no request because they have joined.
    """
    first = next(iter(requests.values()))
    kind, name, process_set = first.kind, first.name, first.process_set
    error = disagreement(requests) or _joined_error(first, joined)
    if error:
        return Agreement(kind, name, process_set, error=error[:MAX_ERROR_CHARS])
    sizes: tuple[tuple[int, ...], ...] = ()
    if kind == "allgather":
        sizes = tuple(tuple(shape[0] for shape in requests[r].shapes) for r in members)
    elif kind == "alltoall":
        sizes = tuple(requests[r].splits for r in members)
    absent = tuple(sorted(joined))
    return Agreement(
        kind, name, process_set, sizes=sizes, absent=absent, pattern=first if absent else None
    )


def disagreement(requests: Mapping[int, Request]) -> str:
    """Return an error that names operation, ranks and values; "" if all ranks agree."""
    first = next(iter(requests.values()))
    if list(requests.values()).count(first) == len(requests):
        return ""
    for what, value in _COMPARED[first.kind]:
        values: dict[str, list[int]] = {}
        for rank, request in sorted(requests.items()):
            values.setdefault(value(request), []).append(rank)
        if len(values) > 1:
            told = "; ".join(f"{value} on {ranks(found)}" for value, found in values.items())
            return f"{title(first)}: ranks disagree about the {what}: {told}"
    return ""


def title(request: Request | Agreement) -> str:
    """Return how messages name an operation."""
    where = f" of process set {request.process_set}" if request.process_set else ""
    return f"{request.kind} {request.name!r}{where}"


def ranks(numbers: Sequence[int]) -> str:
    """Return "rank 3", or "ranks 0, 2, 5"."""
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    shown = ", ".join(map(str, numbers[:16]))
    more = f" and {len(numbers) - 16} more" if len(numbers) > 16 else ""
    return f"ranks {shown}{more}"


def _joined_error(first: Request, joined: Sequence[int]) -> str:
    if not joined:
        return ""
    adasum = first.kind == "allreduce" and OPERATIONS[first.op] == "Adasum"
    if first.kind in _WITHOUT_JOIN.split() or adasum:
        what = "Adasum" if adasum else first.kind
        verb = "has" if len(joined) == 1 else "have"
        return f"{title(first)}: {ranks(sorted(joined))} {verb} joined, and {what} needs all ranks"
    return ""


def _shapes(request: Request) -> str:
    return _told([list(shape) for shape in request.shapes])


def _shapes_but_first(request: Request) -> str:
    return _told([["*", *shape[1:]] for shape in request.shapes]).replace("'", "")


def _dtypes(request: Request) -> str:
    return _told(list(request.dtypes))


def _told(values: Sequence[object]) -> str:
    if len(values) == 1:
        return str(values[0])
    return f"({', '.join(map(str, values))})"


_Compared = tuple[tuple[str, Callable[[Request], str]], ...]
_NUMBER: _Compared = (("number of tensors", lambda request: str(len(request.shapes))),)
_TYPE: _Compared = (("dtype", _dtypes), ("device", lambda request: request.device))
_SHAPE: _Compared = (("shape", _shapes),)
_ROWS: _Compared = (("shape beyond the first dimension", _shapes_but_first),)
_SCALE: _Compared = (
    ("operation", lambda request: OPERATIONS[request.op]),
    ("prescale factor", lambda request: f"{request.prescale:g}"),
    ("postscale factor", lambda request: f"{request.postscale:g}"),
)
_ROOT: _Compared = (("root rank", lambda request: str(request.root)),)
_COMPARED: dict[str, _Compared] = {
    "allreduce": _NUMBER + _TYPE + _SHAPE + _SCALE,
    "reducescatter": _NUMBER + _TYPE + _SHAPE + _SCALE,
    "allgather": _NUMBER + _TYPE + _ROWS,
    "broadcast": _NUMBER + _TYPE + _ROOT + _SHAPE,
    "alltoall": _NUMBER + _TYPE + _ROWS,
    "barrier": (),
    "join": (),
    "add_process_set": (("ranks", lambda request: str(list(request.splits))),),
    "remove_process_set": (("process set", lambda request: str(request.root)),),
}
