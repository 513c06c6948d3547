"""What Prometheus is told of the models' states and memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .manager import Keeper
from .model_slot import Slot

_Number = Callable[[Slot], float]
_GAUGES: tuple[tuple[str, str, _Number], ...] = (
    ("model_loaded", "Whether a model is loaded, 1 or 0.", lambda slot: slot.state == "ready"),
    ("model_planned_bytes", "Memory that a loaded model may take.", lambda slot: slot.planned),
    ("model_requests_waiting", "Requests that wait for a model to be loaded.", lambda slot: len(slot.waiting)),
    ("model_load_seconds", "How long its last load took.", lambda slot: slot.load_s),
)
_COUNTERS: tuple[tuple[str, str, _Number], ...] = (
    ("model_loads", "Times that a model was loaded.", lambda slot: slot.loads),
    ("model_unloads", "Times that a model was unloaded.", lambda slot: slot.unloads),
    ("model_failures", "Times that a model could not be loaded, or failed.", lambda slot: slot.failures),
)


class ModelCollector(Collector):
    """The states of all models, by the first of their names."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper

    def collect(self) -> Iterator[Metric]:
        """One sample for each model and number."""
        yield GaugeMetricFamily("mlxinfer_models_planned_bytes", "Memory that loaded models may take.", value=self._keeper.room.planned)
        yield GaugeMetricFamily("mlxinfer_models_limit_bytes", "Memory that all models may take together.", value=self._keeper.room.limit)
        for kind, numbers in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for name, text, value in numbers:
                family = kind(f"mlxinfer_{name}", text, labels=("model_name",))
                for slot in self._keeper.slots:
                    family.add_metric([slot.name], float(value(slot)))  # type: ignore[no-untyped-call]
                yield family
