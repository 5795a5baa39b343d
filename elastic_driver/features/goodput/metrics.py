"""The metrics of the goodput ledger, for Prometheus."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from elastic_driver.runtime.status_document import JobDocument, StatusDocument


def families(document: StatusDocument) -> Iterator[Metric]:
    """Yield the sums of a job, from its status."""
    if not isinstance(document, JobDocument):
        return
    text = "Seconds of worker slots, by what they were spent with."
    family = CounterMetricFamily("elastic_goodput_seconds", text, labels=("class",))
    for name, seconds in document.counters.slot_seconds.items():
        family.add_metric((name,), seconds)
    yield family
    text = "Share of all seconds of worker slots that was training, 0 to 1."
    share = None if document.goodput is None else document.goodput.goodput
    yield GaugeMetricFamily("elastic_goodput_ratio", text, value=share)
