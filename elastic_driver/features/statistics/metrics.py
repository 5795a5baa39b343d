"""The metrics of what workers and agents have measured, for Prometheus."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from elastic_driver.runtime.status_document import JobDocument, StatusDocument

_SPEEDS = (  # name, key in the document's `measured`, help
    ("steps_per_second", "steps_per_s", "Steps of the world in a second."),
    ("samples_per_second", "samples_per_s", "Samples of all ranks in a second."),
)
MOST_HOSTS = 1024  # that have series of their own, the first by name
_OF_HOSTS = (  # name, key in the document's `measured.hosts`, help
    ("host_cpu_ratio", "cpu", "Share of all cores that worked, 0 to 1."),
    ("host_memory_used_bytes", "memory_used", "Memory in use."),
    ("host_memory_bytes", "memory_total", "Memory in all."),
    ("host_disk_used_bytes", "disk_used", "Disk in use."),
    ("host_disk_bytes", "disk_total", "Disk in all."),
    ("host_network_receive_bytes_per_second", "net_in", "Network, without loopback."),
    ("host_network_transmit_bytes_per_second", "net_out", "Network, without loopback."),
    ("host_disk_read_bytes_per_second", "disk_read", "From all disks."),
    ("host_disk_written_bytes_per_second", "disk_write", "To all disks."),
)
_OF_GPUS = (  # name, key in the host's `gpus`, help
    ("gpu_used_ratio", "used", "Share of time in which the GPU computed, 0 to 1."),
    ("gpu_memory_used_bytes", "memory_used", "Memory of the GPU in use."),
    ("gpu_memory_bytes", "memory_total", "Memory of the GPU in all."),
)


def families(document: StatusDocument) -> Iterator[Metric]:
    """Yield the metrics of a job, from its status."""
    if not isinstance(document, JobDocument):
        return
    measured = document.measured
    for name, key, text in _SPEEDS:
        yield GaugeMetricFamily(f"elastic_{name}", text, value=getattr(measured, key))
    text = "Samples that workers have trained, also in steps that were done again."
    yield CounterMetricFamily("elastic_samples", text, value=measured.samples)
    hosts = dict(sorted(measured.hosts.items())[:MOST_HOSTS])
    for name, key, text in _OF_HOSTS:
        family = GaugeMetricFamily(f"elastic_{name}", text, labels=("host",))
        for host, usage in hosts.items():
            if (value := getattr(usage, key)) is not None:
                family.add_metric((host,), value)
        yield family
    text = "Share of ten seconds in which a process waited for this resource, 0 to 1."
    family = GaugeMetricFamily("elastic_host_pressure_ratio", text, labels=("host", "resource"))
    for host, usage in hosts.items():
        for resource in usage.pressure.__struct_fields__:
            if (share := getattr(usage.pressure, resource)) is not None:
                family.add_metric((host, resource), share)
    yield family
    for name, key, text in _OF_GPUS:
        family = GaugeMetricFamily(f"elastic_{name}", text, labels=("host", "gpu"))
        for host, usage in hosts.items():
            for gpu in usage.gpus:
                family.add_metric((host, str(gpu.index)), getattr(gpu, key))
        yield family
