"""What similar jobs say about a new one, and when that is not believed."""

from __future__ import annotations

from elastic_driver.brain.algorithm import JobView, SpeedAt
from elastic_driver.brain.grants import Kind
from elastic_driver.brain.store.records import Prior, Record, is_wrong, prior_of, with_prior

KIND = Kind(name="mnist", command="a")


def at(size: int, step_time: float, hosts: int = 1, error: float = 0.0) -> SpeedAt:
    return SpeedAt(size=size, hosts=hosts, step_time=step_time, error=error)


def record(*speeds: SpeedAt, memory: int | None = None) -> Record:
    return Record(KIND, micro_batches=8, speeds=speeds, memory=memory)


def test_no_similar_job_says_nothing() -> None:
    assert prior_of([]) is None


def test_the_median_of_several_jobs_counts_and_one_and_a_half_times_the_largest_memory() -> None:
    found = prior_of([
        record(at(1, 1.0), at(2, 0.5, error=0.02), memory=1000),
        record(at(2, 0.6), at(2, 0.7, hosts=2), memory=3001),
        record(at(2, 9.0), at(4, 1.0)),
    ])  # fmt: skip
    assert found == Prior(
        jobs=3,
        size=2,
        memory=4502,
        speeds=(at(1, 1.0), at(2, 0.6, error=0.02), at(2, 0.7, hosts=2), at(4, 1.0)),
    )


def test_jobs_that_were_not_measured_name_no_size() -> None:
    found = prior_of([record(memory=10)])
    assert found == Prior(1, None, 15, ())


def test_a_prior_is_wrong_from_a_fifth_on_at_a_size_that_was_measured() -> None:
    prior = Prior(1, 2, None, (at(1, 1.0), at(2, 0.5)))
    assert not is_wrong(prior, [at(1, 1.19), at(2, 0.41), at(4, 9.0), at(2, 9.0, hosts=2)])
    assert is_wrong(prior, [at(1, 1.0), at(2, 0.61)])
    assert is_wrong(prior, [at(2, 0.39)])


def test_a_job_gets_the_speeds_and_the_memory_that_it_has_not_measured() -> None:
    prior = Prior(2, 4, 100, (at(1, 1.0), at(2, 0.5), at(4, 0.3)))
    new = JobView(name="mnist", arrived=0.0, least=1)
    assert with_prior(new, None) == new
    found = with_prior(new, prior)
    assert (found.speeds, found.memory) == (prior.speeds, 100)
    own = JobView(name="mnist", arrived=0.0, least=1, speeds=(at(2, 0.55),), memory=7)
    found = with_prior(own, prior)
    assert (found.speeds, found.memory) == ((at(1, 1.0), at(2, 0.55), at(4, 0.3)), 7)
    wrong = JobView(name="mnist", arrived=0.0, least=1, speeds=(at(2, 0.7),))
    assert with_prior(wrong, prior) == wrong
