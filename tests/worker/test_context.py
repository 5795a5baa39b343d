"""What a worker makes of the environment it is born with."""

from __future__ import annotations

import pytest

from elastic_driver import contract
from elastic_driver.errors import UsageError
from elastic_driver.worker import context

BORN = {
    contract.WORKER_ID: "node1.2.3",
    contract.RENDEZVOUS: "http://127.0.0.1:1234",
    contract.TOKEN_FILE: "/x/token",
    contract.HEARTBEAT_TIMEOUT: "12.5",
    "LOCAL_RANK": "2",
    "WORLD_SIZE": "4",
}


def test_a_worker_reads_who_it_is_and_where_the_driver_listens() -> None:
    found = context.from_environment(BORN)
    assert found is not None
    assert (found.worker, found.slot) == ("node1.2.3", 2)
    assert (found.endpoint, found.token_file) == ("http://127.0.0.1:1234", "/x/token")
    assert found.heartbeat_timeout == 12.5


def test_a_process_without_elasticrun_has_no_context() -> None:
    assert context.from_environment({}) is None
    assert context.from_environment({"WORLD_SIZE": "1"}) is None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({contract.TOKEN_FILE: ""}, "ELASTIC_TOKEN_FILE missing.*elasticrun script.py"),
        ({contract.RENDEZVOUS: "localhost"}, "not http://HOST:PORT"),
        ({contract.HEARTBEAT_TIMEOUT: "soon"}, "ELASTIC_HEARTBEAT_TIMEOUT is 'soon'"),
        ({"LOCAL_RANK": "-1"}, "LOCAL_RANK is '-1'"),
        ({contract.HEARTBEAT_TIMEOUT: "nan"}, "ELASTIC_HEARTBEAT_TIMEOUT is 'nan'"),
    ],
)
def test_a_wrong_environment_is_named(change: dict[str, str], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        context.from_environment({**BORN, **change})


def test_a_process_of_another_launcher_is_not_taken_for_a_world_of_one() -> None:
    with pytest.raises(UsageError, match="elasticrun -np N"):
        context.from_environment({"WORLD_SIZE": "4", "RANK": "1"})
