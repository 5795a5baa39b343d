"""TF_CONFIG by value: who gets which task, who keeps it, and where it listens."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_driver.options import TfRoles
from elastic_driver.words.tf_config import Task, assign


@settings(deadline=None, max_examples=100)
@given(st.lists(st.sets(st.sampled_from("abcdefgh"), min_size=4), min_size=1, max_size=6))
def test_every_history_leaves_each_task_with_one_member(worlds: list[set[str]]) -> None:
    tasks: dict[str, Task] = {}
    age: list[str] = []
    for world in worlds:
        age = [m for m in age if m in world] + sorted(world - set(age))
        roles: TfRoles = (("chief", 1), ("ps", 1), ("worker", None))
        before, tasks = tasks, assign(age, roles, tasks)
        assert set(tasks) == world
        found = sorted((task.type, task.index) for task in tasks.values())
        workers = [("worker", i) for i in range(len(world) - 2)]
        assert found == [("chief", 0), ("ps", 0), *workers]
        chief = Task("chief", 0)
        if before and chief not in (before.get(m) for m in world):
            were_workers = [m for m in age if m in before and before[m].type == "worker"]
            assert not were_workers or tasks[were_workers[0]] == chief
