"""What is sent of a status: everything of a small job, groups of a large one, and changes."""

from __future__ import annotations

import json

import msgspec

from elastic_driver.features.page.live import MOST_ROWS, changes, event_row, picture_of
from tests.support.pictures import status_of_size


def encoded(document: object) -> bytes:
    return json.dumps(document).encode()


def test_a_small_job_is_sent_row_by_row() -> None:
    picture = picture_of(encoded(status_of_size(3)))
    assert list(picture.members) == ["h0.0.1", "h0.1.1", "h0.2.1"]
    row = picture.members["h0.2.1"]
    assert row is not None
    assert (row["rank"], row["state"], row["step"], row["cpu"]) == (2, "running", 7, 0.5)
    assert picture.job["states"] == {"running": 3}
    assert picture.job["goodput"].goodput == 1.0


def test_a_large_job_is_sent_in_groups_with_those_in_trouble_one_by_one() -> None:
    document = status_of_size(1000, per_host=4)
    document["members"][990]["state"] = "lost"
    document["hosts"][249]["state"] = "cool-down"
    document["slow"] = [
        {"rank": 995, "host": "h248", "worker": "h248.3.1", "kind": "compute", "ratio": 2.0}
        | {"step": 4}
    ]
    picture = picture_of(encoded(document))
    assert len(picture.members) == len(picture.hosts) == MOST_ROWS
    assert {"h247.2.1", "h248.3.1"} <= set(picture.members), "the lost one and the slow one"
    assert {"h247", "h249"} <= set(picture.hosts)
    assert picture.job["states"] == {"running": 999, "lost": 1}
    assert picture.job["host_states"] == {"usable": 249, "cool-down": 1}
    assert (picture.job["member_count"], picture.job["host_count"]) == (1000, 250)
    assert len(msgspec.json.encode(picture)) < 64_000


def test_a_change_has_only_what_has_changed() -> None:
    before = status_of_size(3)
    now = status_of_size(2)
    now["members"][0]["state"] = "ready"
    found = changes(picture_of(encoded(before)), picture_of(encoded(now)))
    assert not found.full
    assert set(found.members) == {"h0.0.1", "h0.2.1"}
    assert found.members["h0.2.1"] is None
    assert "run_id" not in found.job
    same = changes(picture_of(encoded(now)), picture_of(encoded(now)))
    assert (same.job, same.hosts, same.members) == ({}, {}, {})


def test_while_nodes_are_checked_the_picture_says_so() -> None:
    report = {"state": "checking", "rounds": 1, "hosts": {"a": 1}, "nodes": []}
    assert picture_of(encoded(report)).job["state"] == "checking"


def test_an_event_has_its_sentence_and_no_empty_facts() -> None:
    line = {"n": 4, "t": 1.5, "event": "worker_lost", "worker": "a.0.1", "rank": -1, "reason": "x"}
    row = event_row(encoded({**line, "host": None}))
    assert row == {"n": 4, "t": 1.5, "event": "worker_lost", "worker": "a.0.1", "reason": "x"} | {
        "loss": True,
        "text": "worker a.0.1 lost: x",
    }
