"""What counts as a loss: the readers of the event log agree with the job."""

from __future__ import annotations

from elastic_driver.features.goodput.ledger import Ledger
from elastic_driver.features.telemetry.spans import RoundSpans, Span
from elastic_driver.job.decisions import Announce, PublishWorld
from elastic_driver.runtime.metrics import JobTimes
from elastic_driver.runtime.results import WorkerResults
from elastic_driver.words import wire_events as ev
from elastic_driver.words.orders import World
from tests.job.scenario import Scenario


class Readers:
    """A job, and everything that is told from its event log."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario, self.ledger, self.times = scenario, Ledger(), JobTimes()
        self.spans, self.results = RoundSpans("run", 0.0), WorkerResults()
        self.over: list[Span] = []
        self._world: World | None = None
        self._read = 0  # decisions

    def send(self, event: ev.Event) -> None:
        self.scenario.send(event)
        self.read()

    def read(self) -> None:
        """Read what was decided since the last time."""
        new, now = self.scenario.decisions[self._read :], self.scenario.now
        self._read += len(new)
        for decision in new:
            if isinstance(decision, PublishWorld):
                self._world = decision.world
                self.results.world_published(decision.world)
            elif isinstance(decision, Announce):
                line = decision.line(now)
                self.ledger.feed(line)
                self.over += self.spans.feed(line)
                self.times.announced(decision, self._world, now)
                self.results.note(decision, None, now)

    @property
    def losses(self) -> int:
        """Losses in the spans of the rounds."""
        return sum(int(span.attributes.get("elastic.losses", 0)) for span in self.over)

    def left_behind(self) -> None:
        """The script of a.1.1 ends; the others go on before its process has ended."""
        s = self.scenario
        self.send(ev.WorkerEnding("a.1.1", 1))
        s.ready("a.0.1", "a.2.1", version=7)
        s.step(*s.members, step=8)
        self.read()
        self.times.stepped(2, s.now + 1.0)
        assert [told.worker for told in s.announced("worker_left")] == ["a.1.1"]

    def finish(self) -> None:
        s = self.scenario
        for worker in ("a.0.1", "a.2.1"):
            self.send(ev.WorkerEnding(worker, 2))
            s.exit(worker, 0)
        self.read()


def test_a_worker_that_has_finished_is_no_loss_if_its_process_ends_late() -> None:
    job = Readers(Scenario(start_np=3, max_np=3).training(a=3))
    job.read()
    job.left_behind()
    job.finish()
    job.scenario.exit("a.1.1", 0)
    job.read()
    assert job.scenario.end is not None
    assert job.scenario.end.exit_code == 0
    assert job.scenario.job.outcome.budget.failures == 0
    recoveries = sum(job.times.recoveries.counts)
    assert (job.ledger.failures, job.losses, recoveries) == (0, 0, 0)
    assert not any(result.hung for result in job.results.of_job(job.scenario.end, 1.0).workers)


def test_its_late_failure_is_one_loss() -> None:
    job = Readers(Scenario(start_np=3, max_np=3).training(a=3))
    job.read()
    job.left_behind()
    job.scenario.exit("a.1.1", 1)
    job.scenario.ready("a.1.2", "a.0.1", "a.2.1", version=9)
    job.scenario.step(*job.scenario.members, step=10)
    job.read()
    assert job.scenario.job.outcome.budget.failures == 1
    assert job.losses == 1
