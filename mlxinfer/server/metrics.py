"""Prometheus metrics under vLLM's names with the prefix `mlxinfer_` (https://docs.vllm.ai, "Production Metrics")."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ..types import Chunk, Completion, EngineStats, Usage
from ..util.device import device_memory, memory_in_use
from .model_manager.manager import ModelManager
from .model_manager.model_slot import ModelSlot
from .model_manager.registry import Registry

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0, 300.0)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_LABELS = ("model_name",)
_HISTOGRAMS = (
    ("time_to_first_token_seconds", "From the request to its first token.", SECONDS),
    ("e2e_request_latency_seconds", "From the request to the end of its answer.", SECONDS),
    ("request_queue_time_seconds", "Waiting in the queue.", SECONDS),
    ("request_prefill_time_seconds", "Reading the prompt.", SECONDS),
    ("request_decode_time_seconds", "Writing the answer.", SECONDS),
    ("request_prompt_tokens", "Tokens of a prompt.", TOKENS),
    ("request_generation_tokens", "Tokens of an answer.", TOKENS),
)


class TokenIntervals:
    """Histogram of the seconds between tokens of one model's answers. Every token counts, so this class avoids the cost of Prometheus'
    own."""

    def __init__(self) -> None:
        self._counts = [0] * (len(SECONDS) + 1)
        self._sum = 0.0

    def observe(self, seconds: float, times: int = 1) -> None:
        """Count one interval, or `times` intervals of the same length."""
        self._counts[bisect_left(SECONDS, seconds)] += times
        self._sum += seconds * times

    def add_to(self, family: HistogramMetricFamily, model: str) -> None:
        """Add the histogram to Prometheus' family, labelled with the model."""
        names = [*(str(bound) for bound in SECONDS), "+Inf"]
        family.add_metric([model], buckets=list(zip(names, accumulate(self._counts), strict=True)), sum_value=self._sum)


class Metrics:
    """Metrics of one server; `/metrics` writes `registry`."""

    def __init__(self, models: Registry, manager: ModelManager) -> None:
        self.registry = CollectorRegistry()
        self._made = {
            name: Histogram(f"mlxinfer_{name}", text, _LABELS, buckets=b, registry=self.registry) for name, text, b in _HISTOGRAMS
        }
        self._histograms: dict[str, dict[str, Histogram]] = {}
        self._intervals: dict[str, TokenIntervals] = {}
        self._prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts.")
        self._generation_tokens = self._counter("generation_tokens", "Tokens of answers.")
        self._reasoning_tokens = self._counter("reasoning_tokens", "Tokens of reasoning.")
        self._tool_calls = self._counter("tool_calls", "Tool calls in answers.")
        self._success = self._counter("request_success", "Finished answers.", "finished_reason")
        self._cancelled = self._counter("requests_cancelled", "Requests whose client disconnected, or that were stopped.")
        self.registry.register(_Memory())
        names = ("method", "path", "status")
        self._http = Counter("mlxinfer_http_requests", "Requests, by route and status.", names, registry=self.registry)
        self.registry.register(_Engines(models, self._intervals))
        self.registry.register(_Models(manager))
        for entry in models:
            if entry.slot.state == "ready":
                self._add(entry.name)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"mlxinfer_{name}", text, (*_LABELS, *labels), registry=self.registry)

    def _add(self, model: str) -> None:
        """Create a model's metrics at its first request: models that are only listed would fill the page with zeros."""
        self._histograms[model] = {name: made.labels(model) for name, made in self._made.items()}
        self._intervals[model] = TokenIntervals()

    def begin(self, model: str) -> RequestMetrics:
        """Metrics of a request that starts now."""
        if model not in self._intervals:
            self._add(model)
        return RequestMetrics(self, model, self._histograms[model], self._intervals[model])

    def answered(self, method: str, path: str, status: int) -> None:
        """Count an HTTP response. `path` is an endpoint's path pattern, which limits the number of labels."""
        self._http.labels(method, path, str(status)).inc()

    def finished(self, model: str, reason: str) -> None:
        """Count a finished answer."""
        self._success.labels(model, reason).inc()

    def tokens(self, model: str, prompt: int, usage: Usage) -> None:
        """Count the tokens of a prompt and of an answer."""
        self._prompt_tokens.labels(model).inc(prompt)
        self._generation_tokens.labels(model).inc(usage.completion_tokens)
        self._reasoning_tokens.labels(model).inc(usage.reasoning_tokens)

    def calls(self, model: str, count: int) -> None:
        """Count tool calls."""
        self._tool_calls.labels(model).inc(count)

    def cancelled(self, model: str) -> None:
        """Count a request that was stopped early."""
        self._cancelled.labels(model).inc()


class RequestMetrics:
    """Metrics of one running request."""

    def __init__(self, metrics: Metrics, model: str, histograms: dict[str, Histogram], intervals: TokenIntervals) -> None:
        self._metrics = metrics
        self._model = model
        self._histograms = histograms
        self._observe_interval = intervals.observe
        self._began = time.monotonic()
        self._last: dict[int, float] = {}
        self.first_s: float | None = None
        """Seconds to the first token; None before."""

    def burst(self, chunks: Sequence[Chunk]) -> None:
        """Count chunks that arrived together. The time since the previous chunks is divided evenly among their tokens."""
        now = time.monotonic()
        if self.first_s is None:
            self.first_s = now - self._began
            self._histograms["time_to_first_token_seconds"].observe(self.first_s)
        counts: dict[int, int] = {}
        for chunk in chunks:
            counts[chunk.index] = counts.get(chunk.index, 0) + 1
        for index, count in counts.items():
            if index in self._last:
                self._observe_interval((now - self._last[index]) / count, count)
            self._last[index] = now
        for chunk in chunks:
            if chunk.tool_calls:
                self._metrics.calls(self._model, sum(piece.name is not None for piece in chunk.tool_calls))
            if chunk.finish_reason and chunk.usage:
                self._finished(chunk.finish_reason, chunk.usage, chunk.index)

    def completion(self, completion: Completion) -> None:
        """Count an answer that was not streamed, with the average time between its tokens."""
        usage = completion.usage
        if self.first_s is None:
            self.first_s = usage.ttft_s
            self._histograms["time_to_first_token_seconds"].observe(usage.ttft_s)
        if usage.completion_tokens > 1:
            self._observe_interval(usage.stats.decode_s / (usage.completion_tokens - 1))
        if completion.tool_calls:
            self._metrics.calls(self._model, len(completion.tool_calls))
        self._finished(completion.finish_reason, usage, completion.index)

    def _finished(self, reason: str, usage: Usage, index: int) -> None:
        stats = usage.stats
        self._metrics.finished(self._model, reason)
        self._metrics.tokens(self._model, usage.prompt_tokens if index == 0 else 0, usage)
        self._histograms["request_queue_time_seconds"].observe(stats.queued_s)
        self._histograms["request_prefill_time_seconds"].observe(stats.prefill_s)
        self._histograms["request_decode_time_seconds"].observe(stats.decode_s)
        self._histograms["request_generation_tokens"].observe(usage.completion_tokens)
        if index == 0:
            self._histograms["request_prompt_tokens"].observe(usage.prompt_tokens)

    def end(self, finished: bool) -> None:
        """Count the end of the request; `finished` is True if all its answers are complete."""
        self._histograms["e2e_request_latency_seconds"].observe(time.monotonic() - self._began)
        if not finished:
            self._metrics.cancelled(self._model)


_Number = Callable[[EngineStats], float]
_GAUGES: tuple[tuple[str, str, _Number], ...] = (
    ("num_requests_running", "Requests in the batch.", lambda s: s.running),
    ("num_requests_waiting", "Requests in the queue.", lambda s: s.waiting),
    (
        "kv_cache_usage_perc",
        "Part of the pages in use by running requests, from 0 to 1.",
        lambda s: s.pages_used / s.pages if s.pages else 0.0,
    ),
    ("kv_cache_pages", "All pages.", lambda s: s.pages),
    ("kv_cache_pages_used", "Pages in use by running requests.", lambda s: s.pages_used),
    ("kv_cache_pages_cached", "Pages that are only cached for reuse.", lambda s: s.pages_cached),
    ("experts", "Routed experts, if not all of them are in memory.", lambda s: s.experts),
    ("expert_slots", "Routed experts that are in memory at once.", lambda s: s.expert_slots),
)
_COUNTERS: tuple[tuple[str, str, _Number], ...] = (
    ("prefix_cache_queries", "Tokens of prompts looked up in the prefix cache.", lambda s: s.prompt_tokens),
    ("prefix_cache_hits", "Tokens of prompts found in the prefix cache.", lambda s: s.reused_tokens),
    ("images", "Images in prompts.", lambda s: s.images),
    ("image_tokens", "Tokens of prompts that are rows of images.", lambda s: s.image_tokens),
    ("images_cached", "Images that needed no vision tower.", lambda s: s.images_cached),
    ("image_encode_seconds", "Seconds of the vision tower.", lambda s: s.image_encode_s),
    ("num_preemptions", "Times that a running request was preempted.", lambda s: s.preemptions),
    ("spec_decode_num_draft_tokens", "Tokens drafted.", lambda s: s.drafted_tokens),
    ("spec_decode_num_accepted_tokens", "Drafted tokens that were accepted.", lambda s: s.accepted_tokens),
    ("expert_bytes_read", "Bytes of routed experts read from the disk.", lambda s: s.expert_bytes_read),
    ("expert_hits", "Chosen experts that were in memory.", lambda s: s.expert_hits),
    ("expert_misses", "Chosen experts that were read from the disk.", lambda s: s.expert_misses),
    ("expert_wait_seconds", "Seconds in which steps waited for experts.", lambda s: s.expert_wait_s),
    ("engine_steps", "Steps of the engine.", lambda s: s.steps),
    ("engine_restarts", "Restarts of the engine after a failure.", lambda s: s.restarts),
)


class _Engines(Collector):
    """Metrics that are computed on request: the time between tokens, and the statistics of the engines."""

    def __init__(self, models: Registry, intervals: Mapping[str, TokenIntervals]) -> None:
        self._models = models
        self._intervals = intervals

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily("mlxinfer_inter_token_latency_seconds", "Between the tokens of an answer.", labels=_LABELS)
        for model, intervals in self._intervals.items():
            intervals.add_to(family, model)
        yield family
        stats: list[tuple[str, EngineStats]] = [(slot.name, slot.stats) for slot in self._models.slots]
        for name, text, value in _GAUGES:
            yield _filled(GaugeMetricFamily(f"mlxinfer_{name}", text, labels=_LABELS), ((m, value(s)) for m, s in stats))
        for name, text, value in _COUNTERS:
            yield _filled(CounterMetricFamily(f"mlxinfer_{name}", text, labels=_LABELS), ((m, value(s)) for m, s in stats))


_SlotNumber = Callable[[ModelSlot], float]
_MODEL_GAUGES: tuple[tuple[str, str, _SlotNumber], ...] = (
    ("model_loaded", "1 if the model is loaded, otherwise 0.", lambda slot: slot.state == "ready"),
    ("model_planned_bytes", "Memory that the loaded model may use.", lambda slot: slot.planned),
    ("model_requests_waiting", "Requests that wait for a model to be loaded.", lambda slot: len(slot.waiting)),
    ("model_load_seconds", "Seconds of the last load.", lambda slot: slot.load_s),
)
_MODEL_COUNTERS: tuple[tuple[str, str, _SlotNumber], ...] = (
    ("model_loads", "Loads of the model.", lambda slot: slot.loads),
    ("model_unloads", "Unloads of the model.", lambda slot: slot.unloads),
    ("model_failures", "Failed loads and failures of the model.", lambda slot: slot.failures),
)


class _Models(Collector):
    """States and memory of all models, labelled with each model's first name."""

    def __init__(self, manager: ModelManager) -> None:
        self._manager = manager

    def collect(self) -> Iterator[Metric]:
        room, slots = self._manager.room, self._manager.slots
        yield GaugeMetricFamily("mlxinfer_models_planned_bytes", "Memory that loaded models may use.", value=room.planned)
        yield GaugeMetricFamily("mlxinfer_models_limit_bytes", "Memory that all models together may use.", value=room.limit)
        for name, text, value in _MODEL_GAUGES:
            yield _filled(GaugeMetricFamily(f"mlxinfer_{name}", text, labels=_LABELS), ((slot.name, float(value(slot))) for slot in slots))
        for name, text, value in _MODEL_COUNTERS:
            yield _filled(
                CounterMetricFamily(f"mlxinfer_{name}", text, labels=_LABELS), ((slot.name, float(value(slot))) for slot in slots)
            )


_VLLM = frozenset(
    (
        *(name for name, *_ in _HISTOGRAMS),
        *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_queries", "prefix_cache_hits"),
        *("num_preemptions", "prompt_tokens", "generation_tokens", "request_success", "inter_token_latency_seconds"),
        *("spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"),
    )
)


class WithVLLMNames(Collector):
    """All metrics of a registry. Metrics that vLLM has too appear a second time under vLLM's name, `vllm:...`: its production stack,
    gateways and dashboards look for these names."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            yield metric
            name = metric.name.removeprefix("mlxinfer_")
            if name in _VLLM:
                twin = Metric(f"vllm:{name}", metric.documentation, metric.type)
                twin.samples = [sample._replace(name=f"vllm:{sample.name.removeprefix('mlxinfer_')}") for sample in metric.samples]
                yield twin


class _Memory(Collector):
    """The process's memory, computed on request."""

    def __init__(self) -> None:
        self._usable = device_memory().usable

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("mlxinfer_memory_bytes", "Memory in use: of MLX on a GPU, otherwise of the process.", value=memory_in_use())
        yield GaugeMetricFamily("mlxinfer_memory_limit_bytes", "Memory that models and their caches may use.", value=self._usable)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, values: Iterable[tuple[str, float]]) -> Metric:
    for model, value in values:
        family.add_metric([model], value)  # type: ignore[no-untyped-context]
    return family
