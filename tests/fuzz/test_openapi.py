"""Requests made from `/v1/openapi.json`, sent to a job that trains: no answer is 500."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import Case

from elastic_driver.contract import STOP_PATH
from elastic_driver.token_roles import agent_token, worker_token
from rendezvous.auth import operator_token, read_token_file
from tests.chaos.watch import longest_gap
from tests.support.job import JOBS, elasticrun

EXAMPLES = 5  # for each route and token
ANSWER_S = 5.0
WAIT_S = 0.02  # the longest wait that is asked for
# Fixed: nobody may scale it, and it goes on after any failure.
JOB = ("-np", "2", "--min-np", "2", "--max-np", "2", "--", str(JOBS / "train.py"))
GAP_S = 5.0  # the machine is busy with other tests
FEW = settings(
    max_examples=EXAMPLES,
    database=None,
    deadline=None,
    phases=(Phase.generate,),
    suppress_health_check=list(HealthCheck),
)


def read_endpoint(run_dir: Path) -> str:
    return str(json.loads((run_dir / "endpoint.json").read_text())["url"])


def hastened(schema: Any) -> Any:
    """The document with short waits: requests that wait for others only take time here."""
    if isinstance(schema, list):
        return [hastened(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: hastened(value) for key, value in schema.items()}
    for parameter in ("wait", "gather", "timeout"):
        field = found.get("properties", {}).get(parameter)
        if isinstance(field, dict) and "maximum" in field:
            field["maximum"] = WAIT_S
    if found.get("name") == "wait":
        found["schema"]["maximum"] = WAIT_S
    return found


@pytest.mark.slow
def test_no_request_of_the_document_is_answered_500_and_the_job_trains_on() -> None:
    with elasticrun(*JOB, env={"STEPS": "1000000", "STEP_MS": "20"}) as job:
        job.until_size(2)
        url, driver = read_endpoint(job.run_dir), read_token_file(job.run_dir / "token")
        worker = worker_token(agent_token(driver, "rogue"), "rogue.0.1")
        document = requests.get(f"{url}/v1/openapi.json", headers=bearer(worker), timeout=10)
        schema = schemathesis.openapi.from_dict(hastened(document.json()))
        began = max(record.t for record in job.steps())
        answers: Counter[int] = Counter()
        for token in (worker, operator_token(driver)):
            for found in schema.get_all_operations():
                operation = found.ok()
                if operation.path != STOP_PATH or token == worker:
                    ask(operation, url, token, answers)
        ended = time.time()
        print(f"answers by status: {dict(sorted(answers.items()))}")
        assert answers[200], "no request was good"
        assert answers[403], "the worker may do everything"
        assert len(job.events("round_completed")) == 1
        gap = longest_gap(job.steps(), began, ended)
        print(f"the longest gap between two steps: {gap:.2f} s")
        assert gap < GAP_S


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def ask(operation: Any, url: str, token: str, answers: Counter[int]) -> None:
    @FEW
    @given(case=operation.as_strategy())
    def one(case: Case) -> None:
        call = case.as_transport_kwargs(base_url=url, headers=bearer(token))
        answer = requests.request(**call, timeout=ANSWER_S, stream=True)
        answers[answer.status_code] += 1
        assert answer.status_code != 500, f"{case.method} {case.formatted_path}: {answer.text}"
        answer.close()

    one()
