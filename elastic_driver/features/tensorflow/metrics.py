"""The metrics of TensorFlow's clusters."""

from collections.abc import Iterator

import msgspec
from prometheus_client.core import GaugeMetricFamily, Metric

from elastic_driver.features.tensorflow.messages import TfStatus
from elastic_driver.runtime.status_document import StartingDocument, StatusDocument


def families(document: StatusDocument) -> Iterator[Metric]:
    """Yield the metrics of the cluster that the status shows, if there is one."""
    if isinstance(document, StartingDocument) or document.tf is None:
        return
    nodes = msgspec.convert(document.tf, TfStatus)
    text = "How often a cluster of TensorFlow nodes has formed."
    yield GaugeMetricFamily("elastic_tf_generation", text, value=nodes.generation)
    family = GaugeMetricFamily("elastic_tf_nodes", "TensorFlow nodes by state.", labels=("state",))
    family.add_metric(("member",), len(nodes.members))
    family.add_metric(("waiting",), len(nodes.waiting))
    family.add_metric(("lost",), len(nodes.lost))
    yield family
