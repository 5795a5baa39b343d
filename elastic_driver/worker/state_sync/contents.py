"""Tensors and random generators: what they hold, and what of them can be kept and sent.

`TorchState` keeps the states of all generators of this process at a commit (Python's, NumPy's,
torch's, the accelerator's), puts them back after a failed step, and gives a newcomer the states of
the member that sends it the model. NumPy and the accelerator count only where the script has loaded
them already; nothing here imports or initialises them. A script may also keep generators of its own
in a state. Those are values: the state of each is read, written, and put into a new one
(`random_state`, `new_random`).

Equal content of a tensor gives equal numbers, on every rank (`contents`). Memory on the CPU is read
once, by CRC-32 (zlib computes it at several GB/s and without the interpreter's lock). On a device
three sums of its words are taken, and only these are copied to the CPU. Two numbers that differ
prove that the contents differ; contents that differ give equal numbers once in four billion cases.

A tensor is sent if its content is all there is: not where it is on an autograd graph, or without
memory (`require_sent`). A receiver makes one of the same kind (`TensorSpec`). What cannot be kept
is an `UnkeptError`, which names it.
"""

import ctypes
import functools
import importlib
import random
import sys
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from elastic_driver.errors import UsageError

# ---- the accelerator ---------------------------------------------------------------------


def accelerator_in_use() -> Any:
    """Return torch's module for the accelerator (`torch.xpu`) if this process uses it, else None.

    No device is touched.
    """
    module = _accelerator_module()
    if module is None or not getattr(module, "is_initialized", module.is_available)():
        return None
    return module


@functools.cache
def _accelerator_module() -> Any:
    kind = torch.accelerator.current_accelerator()
    return None if kind is None else torch.get_device_module(kind)


# ---- the generators of this process ------------------------------------------------------

_WORD_BYTES = 4
_KEY_BYTES = 624 * _WORD_BYTES  # NumPy stores the position behind the key


class MersenneWatch:
    """NumPy's global Mersenne Twister; its state is read again only after it was used.

    Reading takes 80 to 120 µs at the end of a step, when the processor's caches hold other things,
    and most loops draw from torch alone. Two words of its state, which NumPy gives the address of,
    tell whether it moved: the position changes with each draw, and every word of the key when the
    position starts over, or with another seed. (Seeding sets the first word to a constant, so the
    second is read.)

    Args:
        generator: of bits, of the kind MT19937; a reference keeps its memory valid.
        ask: returns the state.
    """

    def __init__(self, generator: Any, ask: Callable[[], Any]) -> None:
        self.generator = generator
        self._ask = ask
        key = generator.ctypes.state_address
        self._second = ctypes.c_uint32.from_address(key + _WORD_BYTES)
        self._position = ctypes.c_uint32.from_address(key + _KEY_BYTES)
        self._seen: tuple[int, int] | None = None
        self._state: Any = None

    def state(self) -> Any:
        """Return the state of the generator now."""
        words = self._second.value, self._position.value
        if words != self._seen:
            self._state = self._ask()
            # Using up a stored Gaussian changes neither word: ask again while one is stored.
            has_gaussian = self._state[3]
            self._seen = None if has_gaussian else words
        return self._state


class RandomStates:
    """Takes and puts back the states of all generators of this process."""

    def __init__(self) -> None:
        self._numpy: MersenneWatch | None = None

    def take(self) -> dict[str, Any]:
        """Return the states now, by generator.

        Torch's is a copy of the generator, which takes half the time of a state tensor. NumPy's is
        a tuple for a Mersenne Twister, and a dictionary for another kind of generator.
        """
        states: dict[str, Any] = {"python": random.getstate()}
        states["torch"] = torch.default_generator.clone_state()
        if (numpy_random := sys.modules.get("numpy.random")) is not None:
            states["numpy"] = self._numpy_state(numpy_random)
        if (device := accelerator_in_use()) is not None:
            states["device"] = device.get_rng_state()
        return states

    def _numpy_state(self, numpy_random: Any) -> Any:
        generator = numpy_random.get_bit_generator()
        if self._numpy is not None and self._numpy.generator is generator:
            return self._numpy.state()
        if type(generator).__name__ != "MT19937":
            return numpy_random.get_state(legacy=False)
        self._numpy = MersenneWatch(generator, numpy_random.get_state)
        return self._numpy.state()

    def portable(self) -> dict[str, Any]:
        """Return the states now, made of plain values and tensors only.

        NumPy's is left out where it is not a Mersenne Twister: each process keeps its own.
        """
        states = self.take()
        states["torch"] = states["torch"].get_state()
        numpy_state = states.pop("numpy", None)
        if isinstance(numpy_state, tuple):
            name, key, *rest = numpy_state
            states["numpy"] = (name, torch.from_numpy(key.astype("int64")), *rest)
        return states

    def put(self, states: dict[str, Any]) -> None:
        """Set the generators to the result of `take` or, of another process, of `portable`.

        A generator that is not in `states` stays as it is.
        """
        random.setstate(states["python"])
        kept = states["torch"]
        torch.set_rng_state(kept.get_state() if isinstance(kept, torch.Generator) else kept)
        if "numpy" in states and "numpy.random" in sys.modules:
            sys.modules["numpy.random"].set_state(states["numpy"])
        if "device" in states and (device := accelerator_in_use()) is not None:
            device.set_rng_state(states["device"])


# ---- generators as values ----------------------------------------------------------------

_RANDOM = (  # module, class, how its state is read and written
    ("random", "Random", "getstate", "setstate"),
    ("numpy.random", "RandomState", "get_state", "set_state"),
)


def random_state(value: Any) -> tuple[Callable[[], Any], Callable[[Any], None]] | None:
    """Return how the state of a random generator is read and written; None for other objects."""
    if isinstance(value, torch.Generator):
        return value.get_state, value.set_state
    numpy = sys.modules.get("numpy.random")
    if numpy is not None and type(value) is numpy.Generator:
        bits = value.bit_generator
        if getattr(numpy, type(bits).__name__, None) is not type(bits):
            return None
        return (lambda: bits.state), (lambda state: setattr(bits, "state", state))
    for module, name, read, write in _RANDOM:
        kind = getattr(sys.modules.get(module), name, None)
        if kind is not None and type(value) is kind:
            return getattr(value, read), getattr(value, write)
    return None


_OF_TORCH = "torch on "


def new_random(name: str, more: Any) -> Any:
    """Return a new random generator of the class `name`; `more` is what `random_more` returned."""
    if name == "Generator" and more.startswith(_OF_TORCH):
        return torch.Generator(device=more.removeprefix(_OF_TORCH))
    if name == "Generator":
        import numpy  # noqa: PLC0415 - only where a script uses it

        bits = getattr(numpy.random, more)
        if not issubclass(bits, numpy.random.BitGenerator):
            raise ValueError(f"numpy.random.{more} generates no bits")
        return numpy.random.Generator(bits())
    for module, each, *_ in _RANDOM:
        if name == each:
            return getattr(importlib.import_module(module), name)()
    raise ValueError(f"{name} is no random generator")


def random_more(value: Any) -> Any:
    """Return what it takes to make a random generator: its device, or the name of its bits."""
    if isinstance(value, torch.Generator):
        return f"{_OF_TORCH}{value.device.type}"
    bits = getattr(value, "bit_generator", None)
    return None if bits is None else type(bits).__name__


# ---- the content of tensors --------------------------------------------------------------

_BEGINNING = 64  # bytes
_STRIDES = (1, 3, 7)  # of the words in each sum on a device: what moves changes at least one


def contents(tensors: Sequence[Tensor]) -> list[int]:
    """Return the number of each tensor's content; waits once for a device."""
    found: list[int | None] = [_on_cpu(t) if t.device.type == "cpu" else None for t in tensors]
    elsewhere = [number for number, value in enumerate(found) if value is None]
    if elsewhere:
        sums = [_sums_on_device(tensors[number]) for number in elsewhere]
        home = sums[0].device
        rows = torch.stack([each.to(home) for each in sums]).tolist()
        for number, row in zip(elsewhere, rows, strict=True):
            found[number] = zlib.crc32(repr(row).encode())
    return [value or 0 for value in found]


def beginnings(tensors: Sequence[Tensor]) -> list[bytes]:
    """Return the first bytes of tensors: a new content mostly begins otherwise.

    Costs a microsecond for each tensor on the CPU, and one wait for a device.
    """
    found = [_beginning(tensor) for tensor in tensors if tensor.device.type == "cpu"]
    elsewhere = [t for t in tensors if t.device.type != "cpu" and t.is_contiguous() and t.numel()]
    if elsewhere:
        heads = [t.detach().reshape(-1)[:4].view(torch.uint8) for t in elsewhere]
        home = heads[0].device
        found.append(bytes(torch.cat([each.to(home) for each in heads]).tolist()))
    return found


def _beginning(tensor: Tensor) -> bytes:
    size = min(tensor.nbytes, _BEGINNING) if tensor.is_contiguous() else 0
    address = tensor.data_ptr() if size else 0
    return ctypes.string_at(address, size) if address else b""


def is_capturing() -> bool:
    """Return whether a graph is captured at this moment, in which no content can be read."""
    device = accelerator_in_use()
    return bool(getattr(device, "is_current_stream_capturing", bool)())


def _on_cpu(tensor: Tensor) -> int:
    if tensor.is_conj() or tensor.is_neg() or not tensor.is_contiguous():
        tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    size = tensor.nbytes
    address = tensor.data_ptr()
    if not size or not address:  # it has no memory at this moment
        return 0
    return zlib.crc32((ctypes.c_char * size).from_address(address))


def _sums_on_device(tensor: Tensor) -> Tensor:
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    kind = torch.int32 if flat.nbytes % 4 == 0 and flat.nbytes else torch.uint8
    words = flat.view(torch.uint8).view(kind) if flat.numel() else flat.new_zeros(1, dtype=kind)
    return torch.stack([words[::stride].sum(dtype=torch.int64) for stride in _STRIDES])


# ---- tensors as they are sent ------------------------------------------------------------

# The dtype (torch's name for it) and the shape of a tensor.
TensorKind = tuple[str, tuple[int, ...]]


class UnkeptError(UsageError):
    """A value of the state cannot be kept and sent; `path` names it."""

    def __init__(self, path: str, problem: str, hint: str) -> None:
        super().__init__(
            f"the attribute {path!r} cannot be sent to other workers or put back: {problem}; {hint}"
        )
        self.path = path
        self._problem = problem
        self._hint = hint

    def inside(self, name: str) -> "UnkeptError":
        """Return the error for a value inside of the state of an object with this name."""
        return UnkeptError(name, f"{self.path}: {self._problem}", self._hint)


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's dtype; raises `UsageError` where this version of torch has none."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        problem = f"the state has a torch.{name}, which torch {torch.__version__} does not know"
        raise UsageError(f"{problem}; use the version of torch that wrote it")
    return dtype


class TensorSpec(NamedTuple):
    """Dtype, shape and type of device ("cpu", "xpu") of a tensor that a receiver allocates."""

    dtype: str
    shape: tuple[int, ...]
    device: str

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorSpec":
        """Return the spec of a tensor; its first two fields are a `TensorKind`."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        return cls(dtype, tuple(tensor.shape), tensor.device.type)

    def allocate(self, device: str | None = None) -> Tensor:
        """Return an uninitialised tensor, on `device` or this process's device of the same type."""
        return torch.empty(self.shape, dtype=torch_dtype(self.dtype), device=device or self.device)

    def fits(self, tensor: Tensor) -> bool:
        """Return whether a tensor can hold the content: it is of this kind, and has memory."""
        if self[:2] != TensorSpec.of(tensor)[:2] or tensor.layout != torch.strided:
            return False
        has_memory = not (tensor.is_meta or shares_memory(tensor) or tensor.is_inference())
        is_plain = not (tensor.is_conj() or tensor.is_neg())
        return has_memory and is_plain and tensor.grad_fn is None


def require_kept(tensor: Tensor, path: str) -> None:
    """Raise `UnkeptError` for a tensor that cannot be kept as a plain value."""
    if type(tensor) not in (Tensor, torch.nn.Parameter):
        raise UnkeptError(
            path,
            f"it is a tensor of the class {type(tensor).__qualname__}, and would arrive as a "
            "plain one",
            "keep a plain tensor: tensor.as_subclass(torch.Tensor)",
        )
    require_sent(tensor, path)


def require_sent(tensor: Tensor, path: str) -> None:
    """Raise `UnkeptError` for a tensor that cannot be sent: its content is not all there is."""
    if tensor.grad_fn is not None:
        raise UnkeptError(
            path,
            "it is a tensor on an autograd graph, whose history cannot be kept",
            "store tensor.detach() or tensor.item()",
        )
    require_dense(tensor, path)


def require_dense(tensor: Tensor, path: str) -> None:
    """Raise `UnkeptError` for a tensor without elements one behind the other in memory."""
    if torch.nn.parameter.is_lazy(tensor):
        raise UnkeptError(path, "it has no shape yet (it is lazy)", "give it its first values")
    if tensor.is_meta or tensor.is_quantized:
        kind = "a quantized tensor" if tensor.is_quantized else "on the meta device, without memory"
        raise UnkeptError(path, f"it is {kind}", "keep dense tensors of numbers in the state")
    if tensor.is_nested or (tensor.layout != torch.strided and not tensor.is_sparse):
        raise UnkeptError(
            path, f"it is a tensor of layout {tensor.layout}", "keep dense tensors in the state"
        )
    if tensor.is_sparse:
        raise UnkeptError(
            path, "it is a sparse tensor", "keep its indices and values as dense ones"
        )


def shares_memory(tensor: Tensor) -> bool:
    """Return whether elements of a tensor have one memory, as after `expand`."""
    return any(
        step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True)
    )


def fill_tensor(target: Tensor, content: Tensor) -> None:
    """Write a tensor's content into another one, also where that was resized meanwhile."""
    with torch.inference_mode(target.is_inference()), torch.no_grad():
        if target.shape != content.shape or target.dtype != content.dtype:
            target.data = content.to(target.device, copy=True)
        elif not shares_memory(target):
            target.detach().copy_(content)
        elif not torch.equal(target, content):
            target.data = content.to(target.device, copy=True)


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the content of a tensor as a row of bytes: its own memory where it is contiguous."""
    flat = tensor.detach().contiguous()
    # `reshape(-1)` would keep the step of a single element, which no view as bytes takes.
    flat = flat.as_strided((flat.numel(),), (1,)) if flat.numel() else flat.reshape(-1)
    return flat.view(torch.uint8)
