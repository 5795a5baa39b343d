"""Checkpoints of a state trained in this process: what is loaded, refused, and said."""

from __future__ import annotations

import os
import random
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import elastic_driver as elastic
from elastic_driver.errors import UsageError
from elastic_driver.words.world import StateVersion
from elastic_driver.worker.checkpoints import folder as folders
from elastic_driver.worker.state import State
from elastic_driver.worker.state_sync.sharing import StateLostError, agree
from tests.support.coordinator import eventually

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """Each test is a process of its own, as far as the membership goes."""
    elastic.shutdown()
    yield
    elastic.shutdown()


class Job:
    """A model with buffers, Adam with a schedule, and plain values of several kinds."""

    def __init__(self, folder: Path, every: int = 5, width: int = 9, **more: Any) -> None:
        self.model = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Linear(width, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 3)
        self.state = elastic.TorchState(
            model=self.model,
            optimizer=self.optimizer,
            schedule=self.schedule,
            step=0,
            trail=[],
            counts=torch.zeros(4, dtype=torch.int64),
            nothing=torch.zeros(0, 3),
            checkpoint_dir=folder,
            every=every,
            **more,
        )

    def train(self, steps: int) -> Job:
        """Train up to a step in all, as a script would, and wait for the disk."""

        @elastic.run
        def run(state: Any) -> None:
            while state.step < steps:
                self.optimizer.zero_grad()
                self.model(torch.randn(8, 3)).pow(2).mean().backward()
                self.optimizer.step()
                self.schedule.step()
                state.step += 1
                state.trail.append(state.step)
                state.counts[state.step % 4] += 1
                state.commit()

        run(self.state)
        assert self.state._checkpoints is not None
        assert self.state._checkpoints.drain()
        elastic.shutdown()
        return self

    def contents(self) -> list[Any]:
        """Everything that training changes, as plain values."""
        tensors = [*self.model.state_dict().values(), self.state.counts]
        moments = [t for s in self.optimizer.state_dict()["state"].values() for t in s.values()]
        values = [t.tolist() for t in (*tensors, *moments)]
        return [values, self.schedule.state_dict(), self.state.step, self.state.trail]


def versions(folder: Path) -> list[int | None]:
    return [folders.version_of(p) for p in folders.checkpoints(folder) if folders.is_complete(p)]


def test_a_state_comes_back_whole_with_its_random_numbers(tmp_path: Path) -> None:
    torch.manual_seed(3)
    before = Job(tmp_path).train(10)
    after_it = torch.rand(3).tolist()
    torch.manual_seed(4)
    again = Job(tmp_path).train(10)
    assert again.contents() == before.contents()
    assert again.state.version == 10
    assert torch.rand(3).tolist() == after_it


def test_a_resumed_training_ends_as_one_that_was_never_interrupted(tmp_path: Path) -> None:
    torch.manual_seed(3)
    Job(tmp_path / "a", every=5).train(7)
    torch.manual_seed(99)
    resumed = Job(tmp_path / "a", every=5).train(20)
    torch.manual_seed(3)
    whole = Job(tmp_path / "b", every=5).train(20)
    assert resumed.contents() == whole.contents()


def test_the_newest_three_are_kept(tmp_path: Path) -> None:
    Job(tmp_path, every=2).train(11)
    assert versions(tmp_path) == [10, 8, 6]


def test_how_many_are_kept_can_be_said(tmp_path: Path) -> None:
    Job(tmp_path, every=2, keep=1).train(11)
    assert versions(tmp_path) == [10]


def test_a_damaged_one_is_named_and_the_one_before_is_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Job(tmp_path).train(15)
    newest = folders.checkpoints(tmp_path)[0]
    data = newest / "__0_0.distcp"
    content = bytearray(data.read_bytes())
    content[len(content) // 3] ^= 4
    data.write_bytes(content)
    job = Job(tmp_path)
    job.train(10)  # it is at step 10 already, if step 10 was taken
    assert job.state.trail == list(range(1, 11))
    said = capsys.readouterr().err
    assert f"damaged-{newest.name} is damaged: __0_0.distcp" in said
    assert "going on from step 10" in said


def test_a_half_written_one_is_never_loaded_and_is_deleted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Job(tmp_path).train(10)
    newest = folders.checkpoints(tmp_path)[0]
    (newest / folders.MANIFEST).unlink()
    job = Job(tmp_path).train(5)
    assert job.state.step == 5
    assert not newest.exists()
    assert f"{newest} was half written" in capsys.readouterr().err


def test_where_none_can_be_used_training_starts_over_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Job(tmp_path).train(5)
    (folders.checkpoints(tmp_path)[0] / folders.VALUES).write_bytes(b"")
    job = Job(tmp_path).train(1)
    assert job.state.step == 1
    assert "training starts from the beginning" in capsys.readouterr().err


def test_a_model_of_another_size_is_an_error_that_names_the_checkpoint(tmp_path: Path) -> None:
    Job(tmp_path).train(5)
    with pytest.raises(UsageError, match=r"step-000000000005.* does not fit .*model"):
        Job(tmp_path, width=10).train(6)


def test_an_attribute_that_is_new_in_the_script_keeps_its_first_value(tmp_path: Path) -> None:
    Job(tmp_path).train(5)
    job = Job(tmp_path, patience=3).train(6)
    assert (job.state.step, job.state.patience) == (6, 3)


def test_torch_reads_the_folder_with_its_own_reader(tmp_path: Path) -> None:
    job = Job(tmp_path).train(5)
    expected = {name: tensor.clone() for name, tensor in job.model.state_dict().items()}
    fresh = Job(tmp_path / "other").model
    found = {"model": fresh.state_dict()}
    folder = folders.checkpoints(tmp_path)[0]
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(found, checkpoint_id=folder, no_dist=True)
    assert all(torch.equal(found["model"][name], expected[name]) for name in expected)


def test_torch_converts_the_folder_to_one_file(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    job = Job(tmp_path).train(5)
    dcp_to_torch_save(folders.checkpoints(tmp_path)[0], tmp_path / "model.pt")
    read = torch.load(tmp_path / "model.pt", weights_only=True)
    job.model.load_state_dict(read["model"])
    assert torch.equal(read["counts"], job.state.counts)


def test_nothing_that_is_loaded_is_unpickled(tmp_path: Path) -> None:
    """DCP's own index is a pickle; a harmful one, correctly listed, is checked but never loaded."""
    Job(tmp_path).train(5)
    folder = folders.checkpoints(tmp_path)[0]
    harm = tmp_path / "harm"
    (folder / ".metadata").write_bytes(f"cos\nmkdir\n(V{harm}\ntR.".encode())
    manifest = folders.read_document(folder / folders.MANIFEST, folders.Manifest)
    manifest.files[".metadata"] = folders.mark_of(folder / ".metadata")
    folders.complete(folder, manifest)
    assert Job(tmp_path).train(5).state.trail == [1, 2, 3, 4, 5]
    assert not harm.exists()


@pytest.mark.parametrize(
    "wrong",
    [{"every": 5}, {"keep": 2}, {"checkpoint_dir": "x"}]
    + [{"checkpoint_dir": "x", "every": every} for every in (0, -1, 2.5, True)]
    + [{"checkpoint_dir": "x", "every": 1, "keep": 0}],
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"every|keep"):
        State(**wrong)


LIMITED = """
import sys, torch, elastic_driver as elastic
model = torch.nn.Linear(1000, 200)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
state = elastic.TorchState(model=model, optimizer=optimizer, step=0,
                           checkpoint_dir=sys.argv[1], every=2)
@elastic.run
def train(state):
    while state.step < 10:
        model(torch.randn(2, 1000)).sum().backward()
        optimizer.step()
        state.step += 1
        state.commit()
train(state)
print("done", state.step)
"""


def run_limited(folder: Path, limit: int) -> subprocess.CompletedProcess[str]:
    """The script above, in a process none of whose files may be larger than `limit` bytes."""
    return subprocess.run(
        [sys.executable, "-c", LIMITED, str(folder)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


def test_a_write_that_fails_is_one_line_and_the_training_goes_on(tmp_path: Path) -> None:
    done = run_limited(tmp_path, 100_000)
    assert (done.returncode, done.stdout) == (0, "done 10\n"), done.stderr
    lines = [line for line in done.stderr.splitlines() if "is not written" in line]
    assert len(lines) == 1
    assert "File too large" in lines[0]
    assert str(tmp_path) in lines[0]
    assert "Traceback" not in done.stderr
    assert folders.checkpoints(tmp_path) == [], "what was written of it is deleted"


def test_a_script_that_ends_waits_for_its_last_checkpoint(tmp_path: Path) -> None:
    done = run_limited(tmp_path, resource.RLIM_INFINITY)
    assert (done.returncode, done.stdout) == (0, "done 10\n"), done.stderr
    assert versions(tmp_path)[0] == 10
    assert "not written" not in done.stderr


# ---- every holder of the state was lost, but some half-received it -----------------------


TORN = [StateVersion(clean=False), StateVersion(clean=False)]  # their sender died meanwhile


def test_half_received_states_are_no_end_where_there_is_a_checkpoint(tmp_path: Path) -> None:
    verdict = agree(TORN, 7, reloads=True)
    assert (verdict.source, verdict.receivers, verdict.fresh) == (0, {1}, True)
    before = Job(tmp_path).train(5)
    job = Job(tmp_path)
    job.state._torn = True
    with torch.no_grad():
        for parameter in job.model.parameters():
            parameter.fill_(float("nan"))
    assert job.train(5).contents() == before.contents()
    assert not job.state._torn


def test_half_received_states_without_a_checkpoint_end_the_job_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(StateLostError, match="checkpoint_dir"):
        agree(TORN, 7)
    job = Job(tmp_path)
    job.state._torn = True
    with pytest.raises(SystemExit) as ended:
        job.train(5)
    assert ended.value.code == 75
    assert "there is no checkpoint yet" in capsys.readouterr().err


ENDLESS = """
import sys, torch, elastic_driver as elastic
model = torch.nn.Linear(2000, 500)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
state = elastic.TorchState(model=model, optimizer=optimizer, step=0,
                           checkpoint_dir=sys.argv[1], every=1)
@elastic.run
def train(state):
    weight = float(model.weight.detach().mean())
    assert state.step == 0 or weight == state.step, (state.step, weight)
    print(state.step, flush=True)
    while True:
        optimizer.step()
        with torch.no_grad():
            model.weight.fill_(state.step + 1)
        state.step += 1
        state.commit()
train(state)
"""


@pytest.mark.slow
def test_a_kill_at_any_moment_of_writing_leaves_the_newest_complete_one_usable(
    tmp_path: Path,
) -> None:
    seed = random.randrange(10**6)
    print("seed", seed)
    dice, newest = random.Random(seed), 0
    for _ in range(3):
        process = subprocess.Popen(
            [sys.executable, "-c", ENDLESS, str(tmp_path)],
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stdout is not None
            started_at = process.stdout.readline()
            assert started_at, process.communicate(timeout=10)[1]
            assert int(started_at) >= newest
            wanted = int(started_at) + dice.randrange(3, 9)
            # Not after it is written but in the middle of it: its folder has just appeared.
            eventually(lambda n=wanted: list(tmp_path.glob(f"step-{n:012d}-*")), "it is begun")
        finally:
            process.kill()
            process.communicate(timeout=10)
        newest = max(v for v in versions(tmp_path) if v is not None)
        assert newest >= wanted - 1
