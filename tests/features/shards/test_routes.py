"""Data shards over real HTTP: who gets what, who waits, and what a lost worker leaves."""

from __future__ import annotations

import json
import threading
from typing import Any

import msgspec
import pytest

from elastic_driver.features.shards import machine as datasets
from elastic_driver.job.events import AgentLost
from elastic_driver.token_roles import agent_token, worker_token
from elastic_driver.words.wire_events import WorkerExited, WorkerStarted
from rendezvous.client import RendezvousClient
from rendezvous.errors import RequestError
from tests.runtime.jobs import JobUnderTest, StartJob
from tests.runtime.waiting import until

THIRTY = {"type": "range", "records": 30, "shard_records": 10, "shuffle": False}


class Shards:
    """A driver without hosts, and workers that send requests to it."""

    def __init__(self, job: JobUnderTest) -> None:
        self.job = job

    @property
    def quarantined(self) -> list[dict[str, Any]]:
        """The events that say so."""
        return [e for e in self.job.cluster.events() if e["event"] == "shard_quarantined"]

    def client(self) -> RendezvousClient:
        return RendezvousClient(self.job.driver.endpoint, self.job.cluster.token, timeout=5)

    def post(self, what: str, name: str = "d", **body: Any) -> Any:
        with self.client() as client:
            path = f"/v1/shards/{name}:{what}"
            answer = client.post_json(path, msgspec.json.encode(body), 10.0)
        return msgspec.json.decode(answer) if answer else None

    def next(self, worker: str, dataset: Any = None, wait: float = 0.0) -> Any:
        return self.post("next", worker=worker, dataset=dataset or THIRTY, wait=wait)

    def done(self, worker: str, granted: Any) -> Any:
        return self.post("done", worker=worker, shard=granted["shard"], token=granted["token"])

    def status(self) -> Any:
        with self.client() as client:
            return json.loads(client.get_bytes("/v1/shards/d"))

    def lose(self, worker: str, reason: str | None = "exit code -9") -> None:
        """A worker ends, lost for a reason or as planned."""
        self.job.driver.post(WorkerExited(worker, 0 if reason is None else -9, ""))


@pytest.fixture
def shards(start_job: StartJob) -> Shards:
    return Shards(start_job((), start_np=1))


def test_each_shard_is_handed_out_once_and_the_end_comes_when_all_are_done(shards: Shards) -> None:
    granted = [shards.next(worker) for worker in ("a", "b", "a")]
    assert [g["shard"]["start"] for g in granted] == [0, 10, 20]
    assert shards.next("b")["type"] == "wait"
    for worker, grant in zip(("a", "b", "a"), granted, strict=True):
        assert shards.done(worker, grant)["type"] == "accepted"
    assert shards.next("b") == {
        "type": "end",
        "complete": True,
        "quarantined": [],
        "reason": "every record was trained",
    }
    assert shards.status()["counts"]["done_records"] == 30


def test_who_waits_gets_a_lost_workers_shard_at_once(shards: Shards) -> None:
    first = shards.next("a")
    for _ in range(2):
        shards.done("b", shards.next("b"))
    answers: list[Any] = []
    waiter = threading.Thread(target=lambda: answers.append(shards.next("b", wait=8.0)))
    waiter.start()
    shards.lose("a")
    waiter.join(5)
    assert answers[0]["shard"] == first["shard"]
    assert answers[0]["token"] > first["token"]


def test_a_late_report_counts_if_nobody_began_the_shard_and_is_refused_if_somebody_has(
    shards: Shards,
) -> None:
    early, late = shards.next("a"), shards.next("a")
    shards.lose("a")
    assert shards.done("a", early) == {"type": "accepted", "shard": early["shard"], "late": True}
    assert shards.next("b")["shard"] == late["shard"]
    refused = shards.done("a", late)
    assert (refused["type"], refused["code"]) == ("refused", "held")


def test_a_gone_worker_is_given_nothing_that_nobody_would_train(shards: Shards) -> None:
    shards.lose("a")
    with pytest.raises(RequestError, match="a is gone"):
        shards.next("a")


def test_a_shard_that_kills_is_in_quarantine_by_name_and_the_data_are_not_complete(
    shards: Shards,
) -> None:
    for turn in range(3):
        assert shards.next(f"w{turn}")["shard"]["start"] == 0
        shards.lose(f"w{turn}")
    while (answer := shards.next("x"))["type"] == "granted":
        shards.done("x", answer)
    assert not answer["complete"]
    assert answer["quarantined"] == ["epoch 0, records 0–9"]
    (event,) = shards.quarantined
    assert (event["dataset"], event["shard"]) == ("d", "epoch 0, records 0–9")
    assert "w2: exit code -9" in event["reason"]
    assert "w2: exit code -9" in shards.job.stderr.getvalue()


def test_a_planned_leave_blames_no_shard(shards: Shards) -> None:
    for turn in range(5):
        assert shards.next(f"w{turn}")["shard"]["start"] == 0
        shards.lose(f"w{turn}", None)
    assert shards.quarantined == []


def test_a_worlds_shards_stay_with_it_when_a_member_dies(shards: Shards) -> None:
    granted = shards.next("world")
    shards.lose("a")
    held = {str(granted["token"]): 4}
    kept = shards.post("resume", worker="world", dataset=THIRTY, held=held)
    assert kept == {"lost": []}
    assert shards.done("world", granted)["type"] == "accepted"


def test_what_a_world_forgot_goes_back_to_the_front(shards: Shards) -> None:
    first, second = shards.next("world"), shards.next("world")
    held = {str(second["token"]): 0}
    shards.post("resume", worker="world", dataset=THIRTY, held=held)
    assert shards.next("world")["shard"] == first["shard"]


def test_a_world_that_goes_back_gets_what_its_model_lacks(shards: Shards) -> None:
    begun = shards.post("agree", worker="world", dataset=THIRTY, held=[])
    assert begun["held"] == []
    granted = shards.next("world")
    shards.done("world", granted)
    held = [{"shard": granted["shard"], "token": granted["token"], "trained": 3}]
    state = begun["state"]
    agreed = shards.post("agree", worker="world", dataset=THIRTY, held=held, state=state)
    assert [claim["trained"] for claim in agreed["held"]] == [3]
    assert agreed["held"][0]["token"] > granted["token"]
    assert shards.status()["counts"]["done"] == 0


def test_the_state_of_other_data_is_refused_by_what_it_lacks(shards: Shards) -> None:
    state = shards.post("agree", worker="world", dataset=THIRTY, held=[])["state"]
    stream = {"type": "stream", "offsets": {"p": 1}, "ends": {}, "closed": []}
    with pytest.raises(RequestError, match=r"422 other_source: .*of another data set"):
        shards.post(
            "agree", worker="world", dataset=THIRTY, held=[], state={**state, "source": stream}
        )


def test_a_world_without_progress_gives_its_shard_up_after_three_losses(shards: Shards) -> None:
    granted = shards.next("world")
    token = str(granted["token"])
    for turn, trained in enumerate((2, 5, 5)):
        shards.lose(f"w{turn}")
        kept = shards.post("resume", worker="world", dataset=THIRTY, held={token: trained})
        assert kept["lost"] == []  # progress speaks for the shard
    shards.lose("w3")
    until(lambda: shards.quarantined, "the quarantine")
    assert shards.quarantined[0]["shard"] == "epoch 0, records 0–9"
    kept = shards.post("resume", worker="world", dataset=THIRTY, held={token: 5})
    assert kept["lost"] == [granted["token"]]


def test_a_worker_asks_and_reports_in_its_own_name_and_for_its_world(shards: Shards) -> None:
    rounds = shards.job.driver._resources.routes.rounds
    rounds.publish(1, ["h.0.1"])
    token = worker_token(agent_token(shards.job.cluster.token, "h"), "h.0.1")
    mine, others = shards.next("h.0.1"), shards.next("h.1.1")
    with RendezvousClient(shards.job.driver.endpoint, token, timeout=5) as client:

        def post(what: str, **body: Any) -> Any:
            answer = client.post_json(f"/v1/shards/d:{what}", msgspec.json.encode(body), 10.0)
            return msgspec.json.decode(answer)

        for what, body in (
            ("next", {"worker": "h.1.1", "dataset": THIRTY}),
            ("done", {"worker": "h.1.1", "shard": others["shard"], "token": others["token"]}),
            ("resume", {"worker": "h.1.1", "dataset": THIRTY, "held": {}}),
            ("resume", {"worker": "opening", "dataset": THIRTY, "held": {"1": 0}}),
            ("agree", {"worker": "h.1.1", "dataset": THIRTY, "held": []}),
        ):
            with pytest.raises(RequestError, match=r"403 forbidden: .*h\.0\.1 may not speak for"):
                post(what, **body)
        done = post("done", worker="h.0.1", shard=mine["shard"], token=mine["token"])
        assert done["type"] == "accepted"
        assert post("resume", worker="opening", dataset=THIRTY, held={}) == {"lost": []}
        assert post("next", worker="world", dataset=THIRTY)["type"] == "granted"
        rounds.publish(2, ["h.1.1"])
        for what, body in (("next", {}), ("agree", {"held": []})):
            with pytest.raises(RequestError, match=r"403 forbidden: .* may not speak for 'world'"):
                post(what, worker="world", dataset=THIRTY, **body)
        with pytest.raises(RequestError, match=r"403 forbidden: .*h\.0\.1 may not speak for"):
            post("agree", worker="h.0.1", dataset=THIRTY, held=[], state=None)
        with pytest.raises(RequestError, match=r"403 forbidden: .* may not speak for 'world'"):
            post("extend", partition="p", end=2**62, closed=True)
    assert shards.done("h.1.1", others)["type"] == "accepted", "nobody has taken it away"


def test_a_worker_restores_only_what_no_other_one_trains(shards: Shards) -> None:
    mine = worker_token(agent_token(shards.job.cluster.token, "h"), "h.0.1")
    with (
        RendezvousClient(shards.job.driver.endpoint, mine, timeout=5) as client,
        shards.client() as operator,
    ):

        def read() -> Any:
            return json.loads(client.get_bytes("/v1/shards/d/checkpoint"))

        def restore(saved: Any, by: RendezvousClient = client) -> None:
            by.put_json("/v1/shards/d/checkpoint", msgspec.json.encode(saved), 10.0)

        shards.post("resume", worker="opening", dataset=THIRTY, held={})
        begun = read()
        restore(begun)
        shards.done("h.0.1", shards.next("h.0.1"))
        restore(begun)  # nobody else has got any
        other = shards.next("h.1.1")
        for saved in (begun, read()):
            with pytest.raises(
                RequestError, match=r"h\.1\.1 has got shards of this data"
            ) as caught:
                restore(saved)
            assert (caught.value.status, caught.value.code) == (409, "in_use")
        assert shards.done("h.1.1", other)["type"] == "accepted", "it still has its shard"
        with pytest.raises(RequestError, match="in_use"):
            restore(begun)
        shards.lose("h.1.1")
        restore(begun)
        shards.next("h.1.2")
        restore(begun, operator)


def test_the_first_description_holds_and_another_one_is_refused(shards: Shards) -> None:
    shards.next("a")
    with pytest.raises(RequestError, match="was opened as") as caught:
        shards.next("b", {**THIRTY, "records": 31})
    assert caught.value.status == 409


@pytest.mark.parametrize(
    ("name", "dataset", "says"),
    [
        ("no name!".replace(" ", "%20"), THIRTY, "is no name"),
        ("d", {**THIRTY, "records": -1}, "wrong form"),
        ("d", {**THIRTY, "what": 1}, "wrong form"),
        ("d", {"type": "stream", "partitions": {}, "shard_records": 5}, "wrong form"),
    ],
)
def test_nonsense_opens_nothing(shards: Shards, name: str, dataset: Any, says: str) -> None:
    with pytest.raises(RequestError, match=says) as caught:
        shards.post("next", name, worker="a", dataset=dataset, wait=0)
    assert caught.value.status == 422


def test_a_stream_grows_and_ends_only_when_its_partitions_are_closed(shards: Shards) -> None:
    stream = {"type": "stream", "partitions": {"p": 7}, "shard_records": 5}
    assert shards.next("a", stream)["type"] == "wait"
    answers: list[Any] = []
    waiter = threading.Thread(target=lambda: answers.append(shards.next("a", stream, wait=8.0)))
    waiter.start()
    shards.post("extend", partition="p", end=10)
    waiter.join(5)
    assert (answers[0]["shard"]["start"], answers[0]["shard"]["stop"]) == (7, 10)
    shards.done("a", answers[0])
    assert shards.next("a", stream)["type"] == "wait"
    shards.post("extend", partition="p", end=10, closed=True)
    assert shards.next("a", stream)["complete"]
    with pytest.raises(RequestError, match="no partition 'q'"):
        shards.post("extend", partition="q", end=10)


def test_a_checkpoint_brings_back_what_was_not_done(shards: Shards) -> None:
    shards.done("a", shards.next("a"))
    open_shard = shards.next("a")
    with shards.client() as client:
        saved = client.get_bytes("/v1/shards/d/checkpoint")
        shards.done("a", open_shard)
        client.put_json("/v1/shards/d/checkpoint", saved)
    assert shards.next("b")["shard"] == open_shard["shard"]


def test_a_silent_stranger_loses_its_shards_and_a_worker_that_is_heard_keeps_them(
    shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets, "LEASE_S", 0.4)
    shards.job.driver.post(WorkerStarted("a.0.1", 1))
    shards.next("a.0.1")
    shards.next("stranger")
    until(lambda: shards.status()["counts"]["returned"] == 1, "the stranger's lease is over")
    assert shards.status()["counts"]["doing"] == 1
    shards.job.driver.post(AgentLost("a", 1, "its agent was killed"))
    until(lambda: shards.status()["counts"]["returned"] == 2, "the host's workers are gone")


def test_an_unknown_data_set_is_named(shards: Shards) -> None:
    with pytest.raises(RequestError, match="no data set 'd'") as caught:
        shards.status()
    assert caught.value.status == 404
