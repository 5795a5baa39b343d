"""A state keeps values, rolls them back, and reports its version; in one process."""

from __future__ import annotations

import contextlib
import gc
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from elastic_driver.errors import HostsUpdatedInterrupt, UsageError
from elastic_driver.words.world import SlotInfo, StateVersion
from elastic_driver.worker import current
from elastic_driver.worker.heartbeat.training_progress import AT_ONCE
from elastic_driver.worker.run import run as elastic_run
from elastic_driver.worker.state import ObjectState, State, TorchState, all_states
from elastic_driver.worker.world import session


@pytest.fixture
def alone(capsys: pytest.CaptureFixture[str]) -> Iterator[None]:
    """A world of one in this process."""
    session.init()
    yield
    session.shutdown()


class Position:
    """A sampler in miniature."""

    def __init__(self) -> None:
        self.at = 0
        self.resets = 0

    def advance(self) -> None:
        self.at += 1

    def reset(self) -> None:
        self.resets += 1

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def job(**more: Any) -> TorchState:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    return TorchState(model=model, optimizer=optimizer, step=0, **more)


def step(state: TorchState) -> None:
    state.optimizer.zero_grad()
    state.model(torch.randn(8, 3)).sum().backward()
    state.optimizer.step()


def values(module: nn.Module) -> list[torch.Tensor]:
    return [tensor.detach().clone() for tensor in module.state_dict().values()]


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# ---- its life ------------------------------------------------------------------------------


@pytest.fixture
def without_collector() -> Iterator[None]:
    """Only what nobody holds any more is gone, not what holds itself."""
    job()  # the first optimizer imports more of torch, whose errors hold all frames
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def fails(folder: Path, how: str) -> str:
    """A script that fails; return its error."""
    if how == "in a checkpoint":
        other = TorchState(checkpoint_dir=folder, every=1, model=nn.Linear(3, 1), step=0)
        elastic_run(lambda state: state.commit())(other)
        assert other._checkpoints is not None
        assert other._checkpoints.drain()
        session.shutdown()
        state = job(checkpoint_dir=folder, every=1)
    else:
        state = job()

    @elastic_run
    def train(state: TorchState) -> None:
        if how == "by itself":
            raise ValueError("a mistake")
        state.bad = object()  # of no kind that can be kept
        state.commit()

    try:
        train(state)
    except (ValueError, UsageError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("how", ["by itself", "at a commit", "in a checkpoint"])
@pytest.mark.usefixtures("without_collector")
def test_a_state_ends_with_its_last_reference_whatever_has_ended_its_script(
    how: str, tmp_path: Path
) -> None:
    before = len(all_states())
    assert fails(tmp_path, how)
    session.shutdown()
    assert len(all_states()) == before


def hooks_on(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """The hooks on a script's own objects."""
    on_parameters = [
        hook
        for p in model.parameters()
        for hooks in (p._post_accumulate_grad_hooks, p._backward_hooks)
        for hook in hooks or ()
    ]
    steps = [*optimizer._optimizer_step_pre_hooks, *optimizer._optimizer_step_post_hooks]
    return len(on_parameters) + len(steps)


@pytest.mark.usefixtures("without_collector")
def test_no_hooks_are_left_when_a_state_is_gone() -> None:
    state = job()
    model, optimizer = state.model, state.optimizer
    step(state)
    state.commit()
    step(state)
    assert hooks_on(model, optimizer) > 0
    del state
    assert hooks_on(model, optimizer) == 0


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("how", ["returns", "fails"])
def test_steps_are_timed_in_a_training_function_only(how: str) -> None:
    state, other = job(), job()
    before = hooks_on(state.model, state.optimizer)
    inside = []

    @elastic_run
    def train(state: TorchState) -> None:
        for _ in range(3):
            _train_once(state)
        inside.append((hooks_on(state.model, state.optimizer), state._progress.times))
        if how == "fails":
            raise ValueError("a mistake")

    for _ in range(2):
        with contextlib.suppress(ValueError):
            train(state)
        assert state._meter.clock._hooks == other._meter.clock._hooks == []
        assert hooks_on(state.model, state.optimizer) <= before
    for hooks, times in inside:
        assert hooks > before
        assert times is not None
        assert times.compute is not None


# ---- what a commit copies --------------------------------------------------------------------

MEGABYTE = 250_000  # numbers of four bytes
LARGE: dict[str, Any] = {
    "a tensor": lambda: torch.zeros(3 * MEGABYTE),
    "tensors in containers": lambda: {"a": [torch.zeros(MEGABYTE)], "b": (torch.ones(MEGABYTE),)},
    "an array": lambda: [np.zeros(3 * MEGABYTE, dtype=np.float32)],
    "one tensor twice": lambda: [torch.zeros(2 * MEGABYTE)] * 2,
    "a state dictionary": lambda: Metric(3 * MEGABYTE),
}


class Metric:
    """An object with a large state of its own."""

    def __init__(self, size: int) -> None:
        self.seen = torch.zeros(size)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": [self.seen]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"][0]


def copies_said(state: TorchState, capsys: pytest.CaptureFixture[str], commits: int) -> list[str]:
    elastic_run(lambda state: [_train_once(state) for _ in range(commits)])(state)
    return [line for line in capsys.readouterr().err.splitlines() if "each commit copies" in line]


def _train_once(state: TorchState) -> None:
    step(state)
    state.commit()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("kind", LARGE)
def test_large_values_are_said_to_be_copied_at_each_commit(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (said,) = copies_said(job(table=LARGE[kind]()), capsys, 8)
    size, count = {
        "tensors in containers": ("2.0", 2),
        "one tensor twice": ("2.0", 1),
    }.get(kind, ("3.0", 1))
    statistics = 3  # of the model, which move in each pass
    assert f"each commit copies {size} MB in {count + statistics} tensors" in said
    assert said.endswith("(table: it is a value of the state, and no parameter or buffer)")


@pytest.mark.usefixtures("alone")
def test_small_values_are_copied_without_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    assert copies_said(job(table=torch.zeros(1000)), capsys, 8) == []


@pytest.mark.usefixtures("alone")
def test_a_table_that_grows_is_said_when_it_has_become_large(
    capsys: pytest.CaptureFixture[str],
) -> None:
    state = job(table=[])
    assert copies_said(state, capsys, 6) == []
    state.table.append(torch.zeros(MEGABYTE))

    @elastic_run
    def train(state: TorchState) -> None:
        for _ in range(60):
            _train_once(state)
            if state.step == 0:
                state.table.append(torch.zeros(2 * MEGABYTE))

    train(state)
    said = [s for s in capsys.readouterr().err.splitlines() if "each commit copies" in s]
    assert 2 <= len(said) <= 4, "each time that it is twice as much"


# ---- attributes --------------------------------------------------------------------------


def test_attributes_are_read_and_written_like_any_objects() -> None:
    state = ObjectState(epoch=0, seen=[])
    state.epoch += 1
    state.seen.append(3)
    assert (state.epoch, state.seen) == (1, [3])
    with pytest.raises(AttributeError, match=r"no 'batch'; give it to the constructor"):
        _ = state.batch


@pytest.mark.parametrize("name", ["commit", "version", "_values"])
def test_a_name_of_the_states_own_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="choose another name"):
        State(**{name: 1})


def test_restore_puts_back_values_that_were_changed_in_place() -> None:
    state = ObjectState(step=1, seen=[1, {"a": [2]}], table={"x": torch.zeros(2)})
    state.commit()
    state.step = 2
    state.seen[1]["a"].append(5)
    state.table["x"] += 1
    state.restore()
    assert state.step == 1
    assert state.seen == [1, {"a": [2]}]
    assert torch.equal(state.table["x"], torch.zeros(2))
    state.seen[1]["a"].append(6)
    state.restore()
    assert state.seen == [1, {"a": [2]}], "the copy itself is not handed out"


# ---- clean and dirty ---------------------------------------------------------------------


def test_a_step_makes_the_state_dirty_and_a_commit_clean() -> None:
    state = job()
    assert state.state_version() == StateVersion(steps=-1, clean=True)
    state.commit()
    assert state.state_version() == StateVersion(steps=0, clean=True)
    step(state)
    assert not state.clean
    assert state.state_version() == StateVersion(steps=0, clean=False)
    state.commit()
    assert state.state_version() == StateVersion(steps=1, clean=True)


def test_a_step_that_was_interrupted_is_dirty_and_counts_as_no_step() -> None:
    state = job()
    state.commit()
    with pytest.raises(KeyError):
        state.optimizer.step(lambda: {}["no loss"])
    assert state.state_version() == StateVersion(steps=0, clean=False)


def test_restore_of_a_clean_state_touches_no_parameter_but_all_small_things() -> None:
    state = job(schedule=None)
    state.schedule = torch.optim.lr_scheduler.StepLR(state.optimizer, 1, gamma=0.5)
    step(state)
    state.schedule.step()
    state.commit()
    kept = values(state.model)
    pointers = [p.data_ptr() for p in state.model.parameters()]
    drawn = (random.random(), float(np.random.rand()), float(torch.rand(1)))
    state.restore()
    state.model(torch.randn(8, 3)).sum().backward()  # moves running means, makes gradients
    state.optimizer.param_groups[0]["lr"] = 9.0
    state.schedule.last_epoch = 77
    state.restore()
    assert equal(values(state.model), kept)
    assert [p.data_ptr() for p in state.model.parameters()] == pointers
    assert all(p.grad is None for p in state.model.parameters())
    assert state.optimizer.param_groups[0]["lr"] == 0.05
    assert state.schedule.last_epoch == 1
    assert (random.random(), float(np.random.rand()), float(torch.rand(1))) == drawn


def test_restore_of_a_dirty_state_leaves_it_as_it_is() -> None:
    state = job()
    state.commit()
    step(state)
    state.step = 1
    kept = values(state.model)
    state.restore()
    assert equal(values(state.model), kept)
    assert state.step == 1
    assert not state.clean


def test_a_snapshot_is_exact_after_any_number_of_steps() -> None:
    state = job(snapshot=True)
    step(state)
    state.commit()
    kept, moments = (
        values(state.model),
        [s["exp_avg"].clone() for s in state.optimizer.state.values()],
    )
    for _ in range(3):
        step(state)
    assert state.clean, "it can be put back"
    state.restore()
    assert equal(values(state.model), kept)
    assert equal([s["exp_avg"] for s in state.optimizer.state.values()], moments)


def test_a_model_without_an_optimizer_is_kept_as_a_snapshot() -> None:
    state = TorchState(model=nn.Linear(2, 2))
    state.commit()
    kept = values(state.model)
    with torch.no_grad():
        state.model.weight += 1
    state.restore()
    assert equal(values(state.model), kept)


def test_an_optimizer_that_is_exchanged_is_followed() -> None:
    state = job()
    state.commit()
    old = state.optimizer
    state.optimizer = torch.optim.SGD(state.model.parameters(), lr=0.1)
    old.step()
    assert state.clean
    step(state)
    assert not state.clean


# ---- positions ---------------------------------------------------------------------------


def test_a_position_moves_with_the_commit_and_goes_back_to_it() -> None:
    state = job(sampler=Position())
    step(state)
    assert state.sampler.at == 0, "what was trained is not committed yet"
    state.commit()
    assert state.sampler.at == 1
    state.sampler.at = 50
    state.restore()
    assert state.sampler.at == 1
    state.on_reset()
    assert state.sampler.resets == 1


def test_a_position_moves_once_a_commit_whatever_optimizers_do() -> None:
    model = nn.Linear(2, 2)
    optimizers = [torch.optim.SGD([p], lr=0.1) for p in model.parameters()]
    state = TorchState(model=model, sampler=Position(), a=optimizers[0], b=optimizers[1])
    model(torch.ones(1, 2)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    state.commit()
    assert state.sampler.at == 1
    without_optimizer = TorchState(model=model, sampler=Position())
    without_optimizer.commit()
    assert without_optimizer.sampler.at == 1


class Scaler:
    """The public face of `torch.amp.GradScaler`, without a device."""

    def __init__(self) -> None:
        self.scale = 8.0

    def get_scale(self) -> float:
        return self.scale

    def state_dict(self) -> dict[str, float]:
        return {"scale": self.scale}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.scale = state["scale"]


def test_a_step_that_the_scaler_skipped_has_used_its_batch_up() -> None:
    state = job(sampler=Position(), scaler=Scaler())
    state.commit()
    state.scaler.scale = 4.0  # infinite gradients: no optimizer step, a lower scale
    state.commit()
    assert state.sampler.at == 2


# ---- commits -----------------------------------------------------------------------------


def test_a_commit_interrupts_at_the_named_step_and_not_before() -> None:
    state = ObjectState(step=0)
    state.commit()
    state._progress.leave_reason, state._progress.leave_after = "a host joins", 2
    state.commit()
    with pytest.raises(HostsUpdatedInterrupt, match="a host joins"):
        state.commit()
    assert (state.version, state.clean) == (2, True)
    with pytest.raises(HostsUpdatedInterrupt):
        state.check_host_updates()


def test_a_check_counts_as_a_commit_does_and_commits_where_the_world_is_left() -> None:
    state = ObjectState(step=0)
    state.commit()
    state._progress.leave_reason, state._progress.leave_after = "a host joins", 3
    state.commit()
    state.step = 5
    state.check_host_updates()
    assert state.version == 1
    with pytest.raises(HostsUpdatedInterrupt, match="a host joins"):
        state.check_host_updates()
    assert (state.version, state.clean) == (2, True)
    state.step = 6
    state.restore()
    assert state.step == 5  # nothing that was trained until then is lost


def test_a_check_amid_an_accumulation_leaves_the_world_to_the_next_one() -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = TorchState(model=model, optimizer=optimizer)
    state.commit()
    state._progress.leave_reason, state._progress.leave_after = "a host joins", 1
    model(torch.ones(1, 1)).sum().backward()
    state.check_host_updates()
    assert state.version == 0, "nothing is committed"
    optimizer.step()
    with pytest.raises(HostsUpdatedInterrupt, match="a host joins"):
        state.check_host_updates()


def test_told_to_leave_at_once_any_commit_interrupts() -> None:
    state = ObjectState(step=0)
    state._progress.leave_after = AT_ONCE
    with pytest.raises(HostsUpdatedInterrupt):
        state.commit()


def test_commit_copies_no_parameter_and_no_optimizer_tensor() -> None:
    state = job()
    step(state)
    state.commit()
    large = {p.data_ptr() for p in state.model.parameters()}
    large |= {t.data_ptr() for s in state.optimizer.state.values() for t in s.values()}
    with _Recorder() as seen:
        state.commit()
    assert not large & seen.touched


class _Recorder(TorchDispatchMode):
    """Notes the memory of every tensor that an operation reads."""

    def __init__(self) -> None:
        super().__init__()
        self.touched: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for arg in args:
            for tensor in arg if isinstance(arg, list | tuple) else [arg]:
                if isinstance(tensor, torch.Tensor):
                    self.touched.add(tensor.data_ptr())
        return func(*args, **(kwargs or {}))


# ---- alone -------------------------------------------------------------------------------


@pytest.mark.usefixtures("alone")
def test_the_first_sync_counts_as_committed_and_later_ones_do_nothing() -> None:
    state = job()
    state.sync()
    assert state.state_version() == StateVersion(steps=0, clean=True)
    step(state)
    state.sync()
    assert not state.clean, "once a round"


@pytest.mark.usefixtures("alone")
def test_an_attribute_that_could_not_be_sent_is_named_at_the_first_sync() -> None:
    class Odd:
        pass

    state = ObjectState(step=0, helper=Odd())
    with pytest.raises(UsageError, match=r"attribute 'helper' cannot be sent.*state_dict\(\)"):
        state.sync()


def test_a_state_that_was_never_the_same_on_all_ranks_is_not_committed() -> None:
    second = ObjectState(best=0)
    try:
        current.enter(SlotInfo("h", 0, 0, 0, 0, 2, 2, 1, 0, 0), 1)
        with pytest.raises(UsageError, match=r"never made the same on all ranks.*call its sync"):
            second.commit()
    finally:
        current.forget()
