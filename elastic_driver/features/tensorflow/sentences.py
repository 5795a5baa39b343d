"""What people read of TensorFlow's clusters."""

from collections.abc import Mapping
from typing import Any

import msgspec

from elastic_driver.features import Row, Sentences
from elastic_driver.features.tensorflow.messages import TfStatus


def _status(document: Mapping[str, Any]) -> list[Row]:
    """Return a row for each node, where there is no job but the nodes."""
    if document["state"] != "serving":
        return []
    tf = msgspec.convert(document["tf"], TfStatus)
    rows = [
        (n, f"{t.type} {t.index}", f"generation {tf.generation}") for n, t in tf.members.items()
    ]
    rows += [(node, "-", "waiting") for node in tf.waiting]
    rows += [(node, "-", "lost") for node in tf.lost]
    return [("NODE", "TASK", "STATE"), *rows]


SENTENCES = Sentences(status=_status)
