"""Training scripts that are made of small operations, in any order: what a state has to survive.

A `Program` is plain data: what the script builds, and the operations of each of its steps. A
`Script` builds it and carries them out, as a user's script would: with objects of its own, which
it also gives to a `TorchState`. `told` is everything that it then holds, down to the bits. All
ranks train on the same data, so neither their number nor a failure changes a value.
"""

from __future__ import annotations

import collections
import copy
import datetime
import decimal
import hashlib
import pathlib
import random
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

import elastic_driver as elastic

WIDTH = 4
Meet = Callable[[Callable[[], Any]], None]  # carries out a collective, or raises


@dataclass(frozen=True)
class Program:
    """What a script builds, and the operations of each step; a commit ends each of them.

    `accumulate`: backward passes of each optimizer step; with more than one, there are commits
    between them.
    """

    layers: tuple[str, ...]
    optimizers: tuple[str, ...]
    schedule: str
    follower: str
    values: Any
    steps: tuple[tuple[str, ...], ...]
    accumulate: int = 1


@dataclass
class Kept:
    """A value of a class of the script's own."""

    n: int = 0
    names: list[str] = field(default_factory=list)


class Late(nn.Module):
    """A buffer that the first pass registers."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "mean"):
            self.register_buffer("mean", torch.zeros(WIDTH, dtype=x.dtype))
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x - self.mean


class Rebound(nn.Module):
    """A buffer that is another tensor after each pass."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


class Transient(nn.Module):
    """A buffer that `state_dict()` leaves out, and whose `.data` is changed."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.long), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.count.data += 1
        return x * (1 + self.count / 100)


class Extra(nn.Module):
    """A count that is extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[int] = [0]

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]

    def forward(self, x: Tensor) -> Tensor:
        self.calls[0] += 1
        return x * (1 + self.calls[0] / 100)


class Plain(nn.Module):
    """Attributes that are neither parameters nor buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.calls = 2.0, [0]
        self.mean, self.queue = torch.zeros(WIDTH).double(), collections.deque(maxlen=3)
        self.drawn = random.Random(1)

    def forward(self, x: Tensor) -> Tensor:
        self.scale = max(0.5, self.scale * 0.98)
        self.calls[0] += 1
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        self.queue.append(x.detach()[0])
        self.latest = x * 2  # computed anew in each pass, on a graph
        if self.calls[0] == 4:
            self.since = self.drawn.random()
        return (x - self.mean + 0.1 * self.queue[0]) * self.scale

    def told(self) -> list[Any]:
        """What it holds besides."""
        since = getattr(self, "since", None)
        drawn = self.drawn.getstate()
        return [self.scale, self.calls, digest(self.mean), list(self.queue), since, drawn]


class Momentum(nn.Module):
    """Weights that follow others in each pass."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = copy.deepcopy(self.query).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for q, k in zip(self.query.parameters(), self.key.parameters(), strict=True):
            k.data = 0.9 * k.data + 0.1 * q.data
        return self.query(x) + self.key(x)


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x).tanh())


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "norm": lambda: nn.BatchNorm1d(WIDTH),
    "mean norm": lambda: nn.BatchNorm1d(WIDTH, momentum=None),
    "dropout": lambda: nn.Dropout(0.3),
    "frozen": lambda: nn.Linear(WIDTH, WIDTH).requires_grad_(False),
    "spectral": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "tied": Tied,
    "momentum": Momentum,
    "late": Late,
    "rebound": Rebound,
    "transient": Transient,
    "extra": Extra,
    "plain": Plain,
}


class Hand:
    """An optimizer of the script's own, which torch's hooks do not see."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self.parameters, self.lr = parameters, 0.05
        self.velocity = [torch.zeros_like(p) for p in parameters]

    @torch.no_grad()
    def step(self) -> None:
        for p, v in zip(self.parameters, self.velocity, strict=True):
            if p.grad is not None:
                v.mul_(0.9).add_(p.grad)
                p.sub_(v, alpha=self.lr)

    def zero_grad(self) -> None:
        for p in self.parameters:
            p.grad = None

    def state_dict(self) -> dict[str, Any]:
        return {"lr": self.lr, "velocity": self.velocity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.lr = state["lr"]
        for mine, theirs in zip(self.velocity, state["velocity"], strict=True):
            mine.copy_(theirs)


class Counting(torch.optim.SGD):
    """An optimizer that counts its steps, and keeps copies of weights, in attributes of its own."""

    def __init__(self, parameters: list[Tensor]) -> None:
        super().__init__(parameters, 0.05)
        self.count = 0
        self.slow = [p.detach().clone() for p in parameters_of(self)]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.count += 1
        for group in self.param_groups:
            group["lr"] = 0.05 / self.count
        loss = super().step(closure)
        for p, slow in zip(parameters_of(self), self.slow, strict=False):
            slow.lerp_(p, 0.3)
            p.lerp_(slow, 0.5)
        return loss


OPTIMIZERS: dict[str, Callable[[list[Tensor]], Any]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9),
    "plain sgd": lambda p: torch.optim.SGD(p, 0.05),
    "adam": lambda p: torch.optim.Adam(p, 0.01),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01, amsgrad=True, foreach=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01),
    "lbfgs": lambda p: torch.optim.LBFGS(p, 0.1, max_iter=2, history_size=3),
    "hand": Hand,
    "counting": Counting,
}
SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "step": lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.9),
    "cycle": lambda o: torch.optim.lr_scheduler.CyclicLR(
        o, 0.01, 0.05, step_size_up=3, cycle_momentum=False
    ),
    "plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, factor=0.9, patience=1),
    "chain": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [
            torch.optim.lr_scheduler.ConstantLR(o, 0.5, 3),
            torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
        ],
        [3],
    ),
}
FOLLOWERS = ("", "copy", "data", "rebind", "dict", "averaged")
# What any step may have; those that change what there is come once in a while.
USUAL = [
    *("follow", "schedule", "clamp", "collective", "evaluate", "noise", "values", "rebind"),
    *("numpy", "tensors", "normalize", "lr"),
]
RARE = [
    *("add_group", "drop_group", "replace", "clear", "reload", "freeze", "flags", "late_value"),
    *("attribute", "snapshot_load", "follow_by_data", "clamp_by_data"),
]


def data(step: int) -> Tensor:
    """The batch of a step."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, WIDTH, generator=generator, dtype=torch.double)


class Script:
    """One process's objects of a program. `salt` makes the first values of each process others."""

    def __init__(self, program: Program, salt: int, meet: Meet) -> None:
        self.program, self.meet = program, meet
        torch.manual_seed(salt)
        self.net = nn.Sequential(*(LAYERS[name]() for name in program.layers)).double()
        trained = [p for p in self.net.parameters() if p.requires_grad]
        shares = [trained[n :: len(program.optimizers)] for n in range(len(program.optimizers))]
        self.kinds = [kind for kind, share in zip(program.optimizers, shares, strict=True) if share]
        self.optimizers = [
            OPTIMIZERS[kind](share)
            for kind, share in zip(program.optimizers, shares, strict=True)
            if share
        ]
        given: dict[str, Any] = {f"optimizer{n}": o for n, o in enumerate(self.optimizers)}
        first = self.optimizers[0]
        self.schedule: Any = None
        if program.schedule and isinstance(first, torch.optim.Optimizer):
            self.schedule = given["schedule"] = SCHEDULES[program.schedule](first)
        self.follower: Any = None
        if program.follower:
            self.follower = given["follower"] = self._new_follower()
        self.values = copy.deepcopy(program.values)
        self.table, self.tensors = np.zeros(3), [torch.zeros(2), {"x": torch.ones(2)}]
        self.kept = Kept(salt)
        self.deque: Any = collections.deque(maxlen=3)
        self.state = elastic.TorchState(
            net=self.net,
            step=0,
            values=self.values,
            table=self.table,
            tensors=self.tensors,
            kept=self.kept,
            deque=self.deque,
            figure=0,
            losses=[],
            snapshot_of_net=None,
            **given,
        )

    def _new_follower(self) -> Any:
        kind = self.program.follower
        if kind == "dict":
            return {n: p.detach().clone() for n, p in self.net.named_parameters()}
        # torch's own follower refuses a module with a buffer that was not there yet.
        if kind == "averaged" and "late" not in self.program.layers:
            return torch.optim.swa_utils.AveragedModel(self.net)
        return copy.deepcopy(self.net).requires_grad_(False)

    def seed(self, seed: int) -> None:
        """Seed all generators: a program draws the same on all ranks."""
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)

    # ---- operations ------------------------------------------------------------------------

    def do(self, operation: str, step: int) -> None:
        """Carry out one operation of a step."""
        name, _, number = operation.partition(":")
        call = getattr(self, f"_{name}")
        call(step, int(number)) if number else call(step)

    def _zero(self, _step: int) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def _pass(self, step: int) -> None:
        """A forward and a backward pass, and the exchange of the gradients."""
        x = data(step)
        loss = (self.net(x) - x).pow(2).mean() / self.program.accumulate
        self.loss = float(loss.detach())
        if loss.requires_grad:
            loss.backward()
        gradients = [p.grad for p in self.net.parameters() if p.grad is not None]
        if gradients:
            self.meet(lambda: self._exchange(gradients))

    def _exchange(self, gradients: list[Tensor]) -> None:
        flat = torch.cat([g.reshape(-1) for g in gradients])
        dist.all_reduce(flat, dist.ReduceOp.MAX)  # of equal ones: exact for any number of ranks
        at = 0
        for gradient in gradients:
            gradient.copy_(flat[at : at + gradient.numel()].view_as(gradient))
            at += gradient.numel()

    def _step(self, step: int, number: int) -> None:
        if number >= len(self.optimizers):
            return
        optimizer = self.optimizers[number]
        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(lambda: self._closure(step))
        else:
            optimizer.step()

    def _closure(self, step: int) -> float:
        self._zero(step)
        self._pass(step)
        return self.loss

    def _schedule(self, _step: int) -> None:
        if isinstance(self.schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
            self.schedule.step(1.0)
        elif self.schedule is not None:
            self.schedule.step()

    @torch.no_grad()
    def _follow(self, _step: int) -> None:
        kind, own = self.program.follower, list(self.net.parameters())
        if kind == "dict":
            for name, p in self.net.named_parameters():
                self.follower[name] = 0.9 * self.follower[name] + 0.1 * p.detach()
        elif isinstance(self.follower, torch.optim.swa_utils.AveragedModel):
            self.follower.update_parameters(self.net)
        elif kind:
            for f, p in zip(self.follower.parameters(), own, strict=True):
                if kind == "copy":
                    f.lerp_(p, 0.1)
                elif kind == "data":
                    f.data.mul_(0.9).add_(p.data, alpha=0.1)
                else:
                    f.data = 0.9 * f.data + 0.1 * p.data

    @torch.no_grad()
    def _clamp(self, _step: int) -> None:
        for p in self.net.parameters():
            p.clamp_(-0.4, 0.4)

    @torch.no_grad()
    def _normalize(self, _step: int) -> None:
        for p in self.net.parameters():
            if p.dim() > 1:
                p.div_(p.norm() + 1)

    def _clamp_by_data(self, _step: int) -> None:
        for p in self.net.parameters():
            p.data.clamp_(-0.3, 0.3)

    def _follow_by_data(self, _step: int) -> None:
        if isinstance(self.follower, nn.Module):
            for f in self.follower.parameters():
                f.data.mul_(0.5)

    def _collective(self, step: int) -> None:
        box = torch.tensor([float(step)])
        self.meet(lambda: dist.all_reduce(box, dist.ReduceOp.MAX))
        self.state.losses = [*self.state.losses[-3:], float(box)]

    def _evaluate(self, _step: int) -> None:
        was = [module.training for module in self.net.modules()]
        self.net.eval()
        with torch.no_grad():
            value = self.net(data(1000)).sum()
        self.meet(lambda: dist.all_reduce(value, dist.ReduceOp.MAX))
        for module, training in zip(self.net.modules(), was, strict=True):
            module.training = training
        self.state.losses = [*self.state.losses[-3:], float(value)]

    def _noise(self, _step: int) -> None:
        drawn = [float(torch.rand(1)), random.random(), float(np.random.rand()), random.gauss(0, 1)]
        self.state.losses = [*self.state.losses[-3:], *drawn]

    def _lr(self, step: int) -> None:
        for optimizer in self.optimizers:
            for group in getattr(optimizer, "param_groups", ()):
                group["lr"] = 0.05 / (1 + step % 4)
                group["seen"] = step

    def _values(self, step: int) -> None:
        change(self.values, step)
        self.kept.n += 1
        self.kept.names.append(str(step))
        self.deque.append([step])

    def _rebind(self, step: int) -> None:
        kinds = [step, float(step), str(step), [step], {"s": (step,)}, None, torch.full((2,), step)]
        self.state.figure = kinds[step % len(kinds)]

    def _numpy(self, step: int) -> None:
        self.table[step % 3] += step
        self.state.scalar = np.float32(step)

    def _tensors(self, step: int) -> None:
        self.tensors[0] = self.tensors[0] + step
        self.tensors[1]["x"].mul_(1.5)

    # ---- operations that change what there is ------------------------------------------------

    def _add_group(self, step: int) -> None:
        optimizer = self.optimizers[0]
        if type(optimizer) not in (torch.optim.SGD, torch.optim.Adam) or self.schedule is not None:
            return
        trained = {id(p) for o in self.optimizers for p in parameters_of(o)}
        free = [p for p in self.net.parameters() if id(p) not in trained]
        if free:
            for p in free:
                p.requires_grad_(True)
            optimizer.add_param_group({"params": free, "lr": 0.01 / (1 + step)})

    def _drop_group(self, _step: int) -> None:
        groups = getattr(self.optimizers[0], "param_groups", ())
        if len(groups) > 1 and self.schedule is None:
            for p in groups.pop()["params"]:
                self.optimizers[0].state.pop(p, None)

    def _replace(self, _step: int) -> None:
        if isinstance(self.optimizers[0], torch.optim.Optimizer) and self.schedule is None:
            groups = parameters_of(self.optimizers[0])
            self.optimizers[0] = OPTIMIZERS[self.kinds[0]](groups)
            self.state.optimizer0 = self.optimizers[0]

    def _clear(self, _step: int) -> None:
        for optimizer in self.optimizers:
            if isinstance(optimizer, torch.optim.Optimizer):
                optimizer.state.clear()

    def _reload(self, _step: int) -> None:
        for optimizer in self.optimizers:
            if isinstance(optimizer, torch.optim.Optimizer):
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    def _freeze(self, _step: int) -> None:
        for p in self.net[0].parameters():
            if p.dtype.is_floating_point:
                p.requires_grad_(not p.requires_grad)

    def _flags(self, _step: int) -> None:
        self.net[-1].train(not self.net[-1].training)

    def _late_value(self, step: int) -> None:
        self.values["late"] = {"since": step, "set": {step}}

    def _attribute(self, step: int) -> None:
        self.state.later = [step]

    def _snapshot_load(self, _step: int) -> None:
        if self.state.snapshot_of_net is None:
            kept = {n: t.detach().clone() for n, t in self.net.named_parameters()}
            self.state.snapshot_of_net = kept
        else:
            with torch.no_grad():
                for name, p in self.net.named_parameters():
                    p.copy_(self.state.snapshot_of_net[name])

    # ---- after a change of the world ----------------------------------------------------------

    def rejoin(self) -> None:
        """What a script does at the top of its function: take what may have been replaced."""
        if self.kinds and hasattr(self.state, "optimizer0"):
            self.optimizers[0] = self.state.optimizer0

    def told(self) -> dict[str, str]:
        """Everything that this process holds, by name: equal if and only if all bits are."""
        found: dict[str, str] = {}
        net = self.net
        for name, value in [*net.named_parameters(), *net.named_buffers()]:
            found[f"net.{name}"] = digest(value)
        found["net flags"] = repr([m.training for m in net.modules()])
        found["net requires_grad"] = repr([p.requires_grad for p in net.parameters()])
        found["net extra"] = repr([m.calls for m in net.modules() if isinstance(m, Extra)])
        found["net plain"] = repr([m.told() for m in net.modules() if isinstance(m, Plain)])
        for number, optimizer in enumerate(self.optimizers):
            found |= flat(optimizer.state_dict(), f"optimizer{number}")
            if isinstance(optimizer, Counting):
                found |= flat([optimizer.count, *optimizer.slow], f"optimizer{number} plain")
        if self.schedule is not None:
            found |= flat(self.schedule.state_dict(), "schedule")
        if isinstance(self.follower, nn.Module):
            found |= flat(dict(self.follower.state_dict()), "follower")
        elif self.follower is not None:
            found |= flat(self.follower, "follower")
        state = self.state
        if self.program.accumulate > 1:
            gradients = {n: p.grad for n, p in net.named_parameters() if p.grad is not None}
            found |= flat(gradients, "gradient")
        mine = {"values": self.values, "table": self.table, "tensors": self.tensors}
        mine |= {"kept": vars(self.kept), "deque": self.deque}
        found |= flat(mine, "script")
        names = ("step", "figure", "losses", "scalar", "later", "snapshot_of_net")
        found |= flat({n: getattr(state, n, None) for n in names}, "state")
        same = ("values", "table", "tensors", "kept", "deque", "follower", "schedule", "net")
        found["the state has the script's own objects"] = repr(
            [n for n in same if getattr(state, n, None) is not getattr(self, n)]
        )
        found["random"] = digest(
            [torch.get_rng_state(), repr(random.getstate()), repr(np.random.get_state())]
        )
        return found


def parameters_of(optimizer: Any) -> list[Tensor]:
    """The parameters that an optimizer trains."""
    if isinstance(optimizer, Hand):
        return optimizer.parameters
    return [p for group in optimizer.param_groups for p in group["params"]]


def change(value: Any, step: int) -> None:
    """Change plain values in place, everywhere inside."""
    if isinstance(value, dict):
        for inner in list(value.values()):
            change(inner, step)
        value[f"k{step % 3}"] = step
    elif isinstance(value, list):
        for inner in value:
            change(inner, step)
        value.append((step, decimal.Decimal(step) / 7))
        del value[:-6]
    elif isinstance(value, set):
        value.add(step % 5)
        value.discard((step + 2) % 5)
    elif isinstance(value, collections.deque):
        value.appendleft(datetime.timedelta(seconds=step))
    elif isinstance(value, types.SimpleNamespace):
        value.path = pathlib.Path(f"/a/{step}")
        value.when = datetime.datetime(2026, 1, 1 + step % 28)
    elif isinstance(value, np.ndarray):
        value += step
    elif isinstance(value, Tensor):
        value.add_(step)


def flat(value: Any, name: str) -> dict[str, str]:
    """The leaves of a value by name, as text or digests."""
    found: dict[str, str] = {f"{name} kind": type(value).__name__}
    if isinstance(value, dict):
        found[f"{name} keys"] = repr(list(value))
        for key, inner in value.items():
            found |= flat(inner, f"{name}.{key}")
    elif isinstance(value, list | tuple | collections.deque):
        found[f"{name} length"] = repr(len(value))
        for index, inner in enumerate(value):
            found |= flat(inner, f"{name}.{index}")
    elif isinstance(value, Tensor | np.ndarray):
        found[name] = digest(value)
    elif isinstance(value, set):
        found[name] = repr(sorted(value))
    elif isinstance(value, types.SimpleNamespace):
        found |= flat(vars(value), name)
    elif hasattr(value, "state_dict"):
        found |= flat(value.state_dict(), name)
    else:
        found[name] = repr(value)
    return found


def digest(value: Any) -> str:
    """A short hash of tensors, arrays and text."""
    made = hashlib.sha256()
    for each in value if isinstance(value, list) else [value]:
        if isinstance(each, Tensor):
            made.update(f"{tuple(each.shape)}{each.dtype}".encode())
            plain = each.detach().contiguous().reshape(-1).view(torch.uint8)
            made.update(plain.numpy().tobytes())
        elif isinstance(each, np.ndarray):
            made.update(f"{each.shape}{each.dtype}".encode() + each.tobytes())
        else:
            made.update(str(each).encode())
    return made.hexdigest()[:12]
