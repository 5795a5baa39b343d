"""What `torch_seams.autograd`, `scalers` and `saved_files` expect of torch."""

from __future__ import annotations

import torch
from torch import nn

from elastic_driver.worker import torch_seams
from elastic_driver.worker import torch_seams as autograd
from elastic_driver.worker import torch_seams as saved_files


def test_a_backward_pass_has_a_number_and_an_end() -> None:
    assert autograd.number_of_pass() == -1
    seen: list[object] = []
    parameter = nn.Parameter(torch.ones(2))

    def note(_: object) -> None:
        seen.append(autograd.number_of_pass())
        autograd.when_backward_ends(lambda: seen.append("end"))

    parameter.register_hook(note)
    (parameter * 2).sum().backward()
    (parameter * 2).sum().backward()
    first, end, second, again = seen
    assert isinstance(first, int)
    assert isinstance(second, int)
    assert 0 <= first < second
    assert (end, again) == ("end", "end")


def test_an_optimizer_that_torch_has_not_made_calls_no_hooks() -> None:
    class Bare(torch.optim.Optimizer):
        def __init__(self) -> None:
            """Like a usual Lookahead: torch's constructor is not called."""

    assert autograd.calls_hooks(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1))
    assert not autograd.calls_hooks(Bare())


def test_a_scaler_has_its_numbers_from_its_first_use_and_notes_each_step() -> None:
    scaler = torch.amp.GradScaler("cpu")
    assert torch_seams.scaler_state(scaler) is None
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler.scale(parameter.sum()).backward()
    state = torch_seams.scaler_state(scaler)
    assert state is not None
    plain = {
        key: getattr(value, "item", lambda value=value: value)() for key, value in state.items()
    }
    assert plain == scaler.state_dict()
    scaler.unscale_(optimizer)
    assert list(torch_seams.scaler_steps(scaler)) == [id(optimizer)]
    scaler.step(optimizer)
    scaler.update()
    assert torch_seams.scaler_steps(scaler) == {}
    assert torch_seams.scaler_steps(torch.amp.GradScaler("cpu", enabled=False)) == {}


def test_the_place_of_a_chunk_has_file_start_and_length() -> None:
    place = saved_files.place_in("rank0.data", 16, 8)
    assert (place.relative_path, place.offset, place.length) == ("rank0.data", 16, 8)
