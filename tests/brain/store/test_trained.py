"""The record of a job grows out of the samples of its driver."""

from __future__ import annotations

from elastic_driver.brain.grants import Kind, Speed
from elastic_driver.brain.store.records import Record, Sample, Trained
from elastic_driver.words.progress import Measured, WorkerMeasured

KIND = Kind(name="mnist", command="a")


class Job:
    def __init__(self) -> None:
        self.trained = Trained(Record(KIND, 1, 4))
        self.t, self.round = 0.0, 0

    def trains(self, size: int, hosts: int, step_time: float, steps: int) -> Record:
        """Train a new round, with a look each second."""
        self.round += 1
        for second in range(int(steps * step_time) + 1):
            self.t += 1.0
            speed = Speed(
                round=self.round,
                size=size,
                hosts=hosts,
                worker="n1.0.0",
                steps=int(second / step_time),
                at=self.t,
                micro_batches=8,
            )
            memory = WorkerMeasured(step=1, memory=size, memory_peak=size * 100)
            measured = Measured(workers={"n1.0.0": memory, "n1.0.1": WorkerMeasured(step=1)})
            self.trained.take(Sample(self.t, size, measured, speed, 10, 32))
        return self.trained.record


def test_sizes_are_measured_after_a_warm_up_and_kept() -> None:
    job = Job()
    assert job.trains(2, 1, 0.5, 20).speeds == (), "the first steps do not count"
    job.trains(2, 1, 0.5, 60)
    record = job.trains(4, 2, 0.25, 200)
    assert [(each.size, each.hosts, each.step_time) for each in record.speeds] == [
        (2, 1, 0.5),
        (4, 2, 0.25),
    ]
    newer = job.trains(2, 1, 1.0, 40)
    assert [each.step_time for each in newer.speeds] == [1.0, 0.25], "the newest counts"


def test_the_kind_and_the_largest_memory_are_kept() -> None:
    job = Job()
    job.trains(4, 1, 0.5, 4)
    record = job.trains(2, 1, 0.5, 4)
    assert record.memory == 400
    assert record.kind == Kind(name="mnist", command="a", parameters=10, batch=32)
    assert record.micro_batches == 8
    job.trained.take(Sample(job.t + 1, 0, Measured()))
    assert job.trained.record == record, "a moment without training forgets nothing"
