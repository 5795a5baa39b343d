"""`--tf-config` and `--tf-roles`: what they come to in a plan, and what they refuse."""

from __future__ import annotations

import pytest

from elastic_driver.errors import UsageError
from elastic_driver.words.tf_config import WORKERS_ONLY
from launcher.launch.plan import TF_PORTS
from tests.launcher.launch.test_plan import plan


def test_tf_config_makes_every_process_a_worker_with_a_port_and_keeps_none_warm() -> None:
    made = plan("-np", "2", "--tf-config")
    assert made.settings.tf_roles == WORKERS_ONLY
    assert (made.spec.slot_ports, made.spec.warm) == (TF_PORTS, 0)
    assert plan("--tf-config", "--warm", "2").spec.warm == 2


def test_without_it_nothing_of_it_is_there() -> None:
    made = plan("-np", "2")
    assert (made.settings.tf_roles, made.spec.slot_ports, made.spec.warm) == (None, 0, None)


def test_roles_keep_their_order_and_imply_tf_config() -> None:
    roles = plan("--min-np", "5", "--tf-roles", "chief=1,ps=2,worker=*,evaluator=1")
    assert roles.settings.tf_roles == (("chief", 1), ("ps", 2), ("worker", None), ("evaluator", 1))
    added = plan("--min-np", "2", "--tf-roles", "ps=1").settings.tf_roles
    assert added == (("ps", 1), ("worker", None))
    assert plan("--tf-roles", "chief=1").settings.tf_roles == (("chief", 1), ("worker", None))


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("--tf-roles", "boss=1"), "knows the roles chief, worker, ps, evaluator, got 'boss'"),
        (("--tf-roles", "chief=2"), "allows TensorFlow's one chief at most, got 2"),
        (("--tf-roles", "worker=3"), "needs worker=\\*, got worker=3"),
        (("--tf-roles", "ps=1,ps=1"), "names ps twice"),
        (("--tf-roles", "ps=x"), "needs a whole number"),
        (("-np", "4", "--tf-roles", "ps=2"), "2 ps and a worker are 3 processes.*--min-np 3"),
        (("--tf-roles", "chief=1,ps=1"), "1 chief, 1 ps and a worker are 3 processes"),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_say(argv: tuple[str, ...], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        plan(*argv)
