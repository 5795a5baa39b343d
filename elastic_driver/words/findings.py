"""What is found out about workers, as it stands in log events and in messages."""

from msgspec import Struct


class StackGroup(Struct, frozen=True):
    """Ranks with their training threads at the same place."""

    ranks: tuple[int, ...]
    where: str  # "collective", "elsewhere", or in the words of the agent
    stack: str  # innermost last; empty: unknown
    odd: bool = False  # at another place than the others, which may wait for these ranks


class StateValue(Struct, frozen=True):
    """What some ranks hold in one leaf of their states, in short."""

    ranks: tuple[int, ...]
    value: str


class Failure(Struct, frozen=True):
    """The failure that decides a job's exit status: the first of its round."""

    worker: str
    rank: int
    host: str
    pid: int
    exit_code: int  # as subprocess gives it: negative for a signal
    log_tail: str = ""
    lost: str = ""  # what happened, where the worker did not end by itself
