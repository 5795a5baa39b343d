"""The last checkpoint as a worker sees it: asked between two rounds, told when it is on disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import elastic_driver as elastic
from elastic_driver.words.orders import SaveRequest
from elastic_driver.words.wire_events import WorkerSaved
from elastic_driver.worker.checkpoints import folder as folders
from elastic_driver.worker.heartbeat.driver_connection import FinalCheckpointTask
from tests.support.coordinator import eventually

ME, OTHER = "a.0.1", "b.0.1"


class Trained:
    """A state after three steps, as every worker holds it; the script has gone on since."""

    def __init__(self, folder: Path | None, steps: int = 3) -> None:
        torch.manual_seed(1)
        self.model = torch.nn.Linear(3, 2)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        durable = {} if folder is None else {"checkpoint_dir": folder, "every": 1000}
        self.state = elastic.TorchState(
            model=self.model, optimizer=self.optimizer, step=0, **durable
        )

        @elastic.run
        def train(state: elastic.TorchState) -> None:
            while state.step < steps:
                self.optimizer.zero_grad()
                self.model(torch.ones(4, 3)).pow(2).mean().backward()
                self.optimizer.step()
                state.step += 1
                state.commit()

        train(self.state)
        elastic.shutdown()
        self.state.step = 99  # after the commit: no part of the state that is to be written


def request(*members: str, number: int = 1, step: int = 3, seconds: float = 20.0) -> SaveRequest:
    return SaveRequest(number, step, members, seconds, "all leave")


def posted(checkpoint: FinalCheckpointTask) -> WorkerSaved | None:
    """The result that it posts now, if any."""
    results: list[WorkerSaved] = []
    checkpoint.report(results.append)
    return results[0] if results else None


def news(*workers: FinalCheckpointTask) -> WorkerSaved:
    """What the first of these has to say in the end; the others have nothing to say."""

    def look() -> WorkerSaved | None:
        assert [posted(worker) for worker in workers[1:]] == [None] * (len(workers) - 1)
        return posted(workers[0])

    return eventually(look, "the first of them reports")


def test_those_who_are_asked_write_one_checkpoint_and_the_first_tells(tmp_path: Path) -> None:
    states = [Trained(tmp_path).state, Trained(tmp_path).state]
    first, second = FinalCheckpointTask(ME, states[0]), FinalCheckpointTask(OTHER, states[1])
    first.begin(request(ME, OTHER))
    results: list[WorkerSaved] = []
    assert first.report(results.append), "the other's share is missing"
    assert results == []
    second.begin(request(ME, OTHER))
    told = news(first, second)
    assert (told.worker, told.number, told.problem) == (ME, 1, "")
    assert folders.is_complete(Path(told.folder))
    assert not first.report(results.append)
    assert results == [], "it is posted once"


def test_a_result_that_cannot_be_posted_is_kept() -> None:
    last = FinalCheckpointTask(ME, Trained(None).state)
    last.begin(request(ME))

    def fails(_event: WorkerSaved) -> None:
        raise ConnectionError("the driver is away")

    with pytest.raises(ConnectionError):
        last.report(fails)
    assert posted(last) == WorkerSaved(ME, 1, "", "")


def test_a_new_start_goes_on_from_the_last_commit(tmp_path: Path) -> None:
    before = Trained(tmp_path)
    last = FinalCheckpointTask(ME, before.state)
    last.begin(request(ME))
    news(last)
    again = Trained(tmp_path, steps=0)  # takes no step of its own
    assert again.state.version == 3
    assert torch.equal(again.model.weight, before.model.weight)


def test_a_state_without_a_folder_says_so_at_once() -> None:
    last = FinalCheckpointTask(ME, Trained(None).state)
    last.begin(request(ME))
    assert posted(last) == WorkerSaved(ME, 1, "", "")


def test_who_is_not_asked_writes_nothing(tmp_path: Path) -> None:
    last = FinalCheckpointTask(ME, Trained(tmp_path).state)
    last.begin(request(OTHER))
    assert posted(last) is None
    assert list(tmp_path.glob("step-*")) == []


def test_who_holds_another_step_says_so(tmp_path: Path) -> None:
    last = FinalCheckpointTask(OTHER, Trained(tmp_path).state)
    last.begin(request(ME, OTHER, step=4))
    told = posted(last)
    assert told is not None
    assert told.problem == "step 4 was requested; this worker is at 3"


def _remove(folder: Path) -> None:
    folder.rmdir()


def _fill(folder: Path) -> None:
    folder.rmdir()
    folder.write_text("a file where the folder should be")


@pytest.mark.parametrize("harm", [_remove, _fill])
def test_a_disk_that_fails_is_told_of_in_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], harm: Callable[[Path], None]
) -> None:
    folder = tmp_path / "checkpoints"
    state = Trained(folder).state
    harm(folder)
    last = FinalCheckpointTask(ME, state)
    last.begin(request(ME))
    told = news(last)
    assert bool(told.folder) == (harm is _remove), "a folder that is gone is made again"
    assert bool(told.problem) == (harm is _fill)
    assert "training goes on" not in capfd.readouterr().err


def test_one_that_died_while_writing_is_done_without(tmp_path: Path) -> None:
    last = FinalCheckpointTask(ME, Trained(tmp_path).state)
    last.begin(request(ME, OTHER))
    assert posted(last) is None
    last.begin(request(ME, number=2))
    told = news(last)
    assert (told.number, told.problem) == (2, "")
    assert folders.is_complete(Path(told.folder))
