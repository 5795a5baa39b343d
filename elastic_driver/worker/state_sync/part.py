"""What a state needs of an object that can load its own state: the base of all parts.

A part knows what belongs to its object *now*: `look()` walks it and says whether its structure has
changed. A commit spares that as long as a glance at `structure()` shows nothing new. `tensors()`
are its leaves that live in memory of their own; whether they are copied at a commit is decided in
`leaves`. Everything else is small and is copied by `take()`: flags, settings of parameter groups,
extra state, a scheduler's `state_dict()`. `roll_back()` puts back structure and values, in the
script's own objects.

For sending, a part becomes a document of plain data and a list of tensors (`message`).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from elastic_driver.errors import UsageError
from elastic_driver.worker.state_sync.glance import Structure
from elastic_driver.worker.state_sync.message import Reader, Writer
from elastic_driver.worker.state_sync.taking import copied
from elastic_driver.worker.state_sync.values import TensorSpec, UnkeptError, too_deep

Named = list[tuple[str, Tensor]]
Outgoing = tuple[Any, Named]  # a document of plain data; name and tensor of each number in it


class Rest(NamedTuple):
    """How long commits can spare a part, while a glance at its structure shows nothing new."""

    until: float  # seconds, of the clock of `attributes`
    settings: Any = None  # and no longer than these live objects equal those that were kept
    kept: Any = None


NEVER = Rest(float("-inf"))


class StatePart:
    """Any object with `state_dict()` and `load_state_dict()`, all of it small: a scheduler, …"""

    def __init__(self, name: str, thing: Any) -> None:
        self.name, self.thing = name, thing
        self.kept: Any = None  # what `take` has returned at the last commit
        self._has_changed = False  # since the last look

    def look(self) -> bool:
        """Walk the object; return whether its structure is another than at the last look."""
        self._refresh()
        changed, self._has_changed = self._has_changed, False
        return changed

    def structure(self) -> Structure | None:
        """Return the containers that show what the last look has found.

        None: nothing shows it, so that the object has to be looked at, at each commit.
        """
        return Structure((), ())

    def _refresh(self) -> None:
        """Follow the structure of now."""

    def tensors(self) -> Named:
        """Return the leaves of this part that `leaves` looks after, by name."""
        return []

    def require_kept(self) -> None:
        """Raise `UnkeptError` for a tensor that cannot be kept; called for each new structure."""

    def take(self) -> Any:
        """Return a copy of all small things, for a commit.

        The commit counts once all parts have given theirs; `kept` is what they gave. Raises
        `UnkeptError` for what cannot be kept.
        """
        try:
            return copied(self._state())
        except UnkeptError as error:
            raise error.inside(self.name) from None
        except RecursionError:
            raise too_deep(self.name) from None

    def rest(self) -> Rest:
        """Return, right after a commit, how long `take` would return `kept` again."""
        return NEVER

    def copies(self) -> Any:
        """Return what is a copy in `kept`."""
        return self.kept

    def roll_back(self) -> None:
        """Put back the structure and the small things of `kept`."""
        self.thing.load_state_dict(copied(self.kept))

    def outgoing(self) -> Outgoing:
        """Return a document of the whole part, and the tensors that the document refers to."""
        writer = Writer()
        return [self._class(), writer.write(copied(self._state()), self.name)], writer.tensors

    def values(self) -> list[tuple[str, Any]]:
        """Return name and value of each small thing that ranks are to have alike."""
        state = self.kept
        if isinstance(state, dict):
            return [(f"{self.name}.{key}", value) for key, value in state.items()]
        return [(self.name, state)]

    def places(self, document: Any, specs: Sequence[TensorSpec], /) -> list[Tensor]:
        """Return the tensors to receive into: this part's own tensors where it has them.

        Raises `UsageError` where this part is built differently from the sender's.
        """
        self._require_class(document[0])
        return [spec.allocate() for spec in specs]

    def accept(self, document: Any, tensors: Sequence[Tensor], /) -> None:
        """Load the received document and tensors."""
        self.thing.load_state_dict(Reader(tensors, what=self.name).read(document[1]))

    def _state(self) -> Any:
        try:
            return self.thing.state_dict()
        except UsageError:
            raise
        except Exception as error:  # a script's own method
            problem = f"its state_dict() has failed ({error})"
            raise UnkeptError(
                self.name, problem, "mend it, or leave it out of the state"
            ) from error

    def _class(self) -> str:
        return type(self.thing).__qualname__

    def _require_class(self, theirs: str) -> None:
        if theirs != self._class():
            raise UsageError(
                f"{self.name} is of the class {self._class()}, in the trained state it is "
                f"{theirs}; build the same objects on every worker"
            )


def require_tensor(name: str, tensor: Tensor) -> None:
    """Raise `UnkeptError` for a tensor of a module or an optimizer that cannot be kept."""
    if nn.parameter.is_lazy(tensor):
        problem, hint = "it has no shape yet (it is lazy)", "run one batch before the first commit"
    elif tensor.is_meta:
        problem, hint = "it is on the meta device, without memory", "give it its first values"
    elif tensor.is_inference():
        problem, hint = "it was made under inference_mode", "create it under no_grad"
    elif tensor.layout != torch.strided:
        problem, hint = f"it is of layout {tensor.layout}", "keep dense tensors in the state"
    elif tensor.is_quantized:
        problem, hint = "it is quantized", "keep dense tensors of numbers in the state"
    else:
        return
    raise UnkeptError(name, problem, hint)


def names_in(written: Any) -> list[str]:
    """Return the keys of a dictionary that a `Writer` wrote; all are strings."""
    items = written[2]
    return list(items[: len(items) // 2])
