"""The routes of TensorFlow's clusters."""

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from elastic_driver.features.tensorflow import messages as tf
from elastic_driver.runtime.machine_api import machine_route, slot_of
from elastic_driver.token_roles import TRAINERS
from rendezvous.auth import Caller
from rendezvous.routes import Route

STATUS = {"timed_out": 408, "too_large": 413}


def _event(ticket: int, asked: Any, caller: Caller, _names: Mapping[str, str]) -> tf.TfRequest:
    return tf.TfRequest(ticket, asked, slot_of(caller))


def _row(method: str, path: str, kind: type[Struct], answer: Any) -> Route:
    note = "see [tensorflow.md](tensorflow.md)"
    return machine_route(method, path, TRAINERS, kind, answer, make=_event, note=note)


ROUTES = (
    _row("POST", tf.CLUSTER_SPEC_PATH, tf.ClusterSpecRequest, tf.ClusterSpec),
    _row("GET", tf.WAITING_NODES_PATH, tf.LookRequest, tf.WaitingNodes),
    _row("POST", tf.BARRIER_PATH, tf.BarrierRequest, tf.Passed),
    _row("POST", tf.SYNCHRONIZE_PATH, tf.SynchronizeRequest, tf.Synchronized),
)
