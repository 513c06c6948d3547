"""What Prometheus is told of the process's memory."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..device import device_memory, memory_in_use


class MemoryCollector(Collector):
    """Memory in use and what may be used, read when Prometheus asks."""

    def __init__(self) -> None:
        self._usable = device_memory().usable

    def collect(self) -> Iterator[Metric]:
        """Two gauges."""
        yield GaugeMetricFamily("mlxinfer_memory_bytes", "Memory in use: MLX's on a GPU, the process's elsewhere.", value=memory_in_use())
        yield GaugeMetricFamily("mlxinfer_memory_limit_bytes", "Memory that models and their caches may take.", value=self._usable)
