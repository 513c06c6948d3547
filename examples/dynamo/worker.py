"""A Dynamo worker that computes with mlxinfer: token ids in, token ids out, and what its prefix cache holds for KV-aware routing.

    pip install pyzmq msgspec ai-dynamo uvloop
    python examples/dynamo/worker.py path/to/model --name tiny
    python -m dynamo.frontend --discovery-backend file --http-host 127.0.0.1 --http-port 8000 --router-mode kv --kv-cache-block-size 64

Dynamo's frontend (https://github.com/ai-dynamo/dynamo) tokenizes, routes and detokenizes; it finds workers by files in
$DYN_FILE_KV, so neither etcd nor NATS is needed. `serve.py` starts all of it on this machine. The model must be a
directory with a tokenizer.json, which the frontend reads too.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Any

from dynamo.common.backend import EngineConfig, LLMEngine, LlmRegistration, WorkerConfig
from dynamo.common.backend.publisher import ComponentSnapshot, ZmqSource
from dynamo.common.backend.run import run
from dynamo.llm.exceptions import EngineShutdown, InvalidArgument

from mlxinfer import AsyncLLM, SamplingParams
from mlxinfer.errors import EngineError, MLXInferError

BLOCK = 64
"""Tokens of a page, which the events of the cache speak of."""
SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "n"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
"""Sampling options, which have the same names in Dynamo and here."""
REASONS = {"stop": "stop", "length": "length", "cancelled": "cancelled", "timeout": "cancelled"}


class MLXInferEngine(LLMEngine):
    """Implements Dynamo's contract for engines; `Worker` registers it, and calls `generate` for each request."""

    def __init__(self, given: argparse.Namespace) -> None:
        self._given = given
        self._llm: AsyncLLM | None = None
        self._events: Any = None
        self._snapshots: Any = None

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[MLXInferEngine, WorkerConfig]:
        parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("model", help="a directory with the model and its tokenizer.json")
        parser.add_argument("--name", help="what clients call it; default: the directory's name")
        parser.add_argument("--memory", type=float, metavar="GB", help="memory for weights, cache and a step together")
        parser.add_argument("--kv-events", metavar="ENDPOINT", help="send what is cached, such as tcp://127.0.0.1:5557")
        parser.add_argument("--namespace", default="dynamo")
        parser.add_argument("--discovery-backend", default="file", choices=["file", "etcd", "kubernetes", "mem"])
        given = parser.parse_args(argv)
        given.name = given.name or given.model.rstrip("/").rpartition("/")[2]
        config = WorkerConfig(
            namespace=given.namespace,
            component="mlxinfer",
            model_name=given.model,
            served_model_name=given.name,
            discovery_backend=given.discovery_backend,
            event_plane="zmq",
            enable_kv_routing=given.kv_events is not None,
        )
        return cls(given), config

    async def start(self, worker_id: int) -> EngineConfig:
        self._llm = llm = AsyncLLM(self._given.model, memory_gb=self._given.memory)
        await llm.ready()
        if self._given.kv_events is not None:
            from mlxinfer.server.routers.kv_events import KVEventPublisher

            self._events = KVEventPublisher(self._given.kv_events)
            llm.send_kv_events(partial(self._events.put, self._given.name))
        plan = llm.plan
        registration = LlmRegistration(
            context_length=llm.max_context,
            kv_cache_block_size=BLOCK,
            total_kv_blocks=plan.pool_tokens // BLOCK,
            max_num_seqs=plan.max_num_seqs,
            max_num_batched_tokens=plan.rows,
        )
        return EngineConfig(model=self._given.model, served_model_name=self._given.name, llm=registration)

    async def kv_event_sources(self) -> list[ZmqSource]:
        return [] if self._given.kv_events is None else [ZmqSource(endpoint=self._given.kv_events)]

    def component_metrics_dp_ranks(self) -> list[int]:
        return [0]

    def attach_snapshot_publisher(self, publisher: Any) -> None:
        self._snapshots = publisher

    async def generate(self, request: Any, context: Any) -> AsyncGenerator[dict[str, Any], None]:
        """Token ids in pieces. A client that leaves closes the generator, and with it the request."""
        assert self._llm is not None
        prompt = list(request["token_ids"])
        try:
            params = sampling_params(request)
            written = 0
            async with aclosing(self._llm.bursts(prompt, params)) as bursts:
                async for burst in bursts:
                    for chunk in burst:
                        written += len(chunk.token_ids)
                        yield piece(chunk, len(prompt), written)
                    self._publish()
        except EngineError as error:
            raise EngineShutdown(str(error)) from error
        except MLXInferError as error:
            raise InvalidArgument(str(error)) from error

    async def cleanup(self) -> None:
        if self._llm is not None:
            await self._llm.close()
        if self._events is not None:
            self._events.close()
        self._llm = self._events = None

    def _publish(self) -> None:
        """Tell the router how full the cache is."""
        if self._snapshots is None or self._llm is None:
            return
        stats = self._llm.stats()
        hits = stats.reused_tokens / stats.prompt_tokens if stats.prompt_tokens else None
        usage = stats.pages_used / stats.pages if stats.pages else 0.0
        self._snapshots.publish(0, ComponentSnapshot(stats.pages_used, stats.pages, usage, 0, hits))


def sampling_params(request: Any) -> SamplingParams:
    """What Dynamo's preprocessor asks for. It looks for stop strings itself, and tells of the tokens that end an answer."""
    options, stops = request.get("sampling_options") or {}, request.get("stop_conditions") or {}
    values: dict[str, Any] = {name: options[name] for name in SAMPLING if options.get(name) is not None}
    if stops.get("max_tokens") is not None:
        values["max_tokens"] = stops["max_tokens"]
    values["ignore_eos"] = bool(stops.get("ignore_eos"))
    ends = {*(stops.get("stop_token_ids") or ()), *(stops.get("stop_token_ids_hidden") or ())}
    return SamplingParams(stop_token_ids=() if values["ignore_eos"] else tuple(sorted(ends)), **values)


def piece(chunk: Any, prompt_tokens: int, written: int) -> dict[str, Any]:
    """One of ours as one of Dynamo's."""
    found: dict[str, Any] = {"token_ids": list(chunk.token_ids), "index": chunk.index}
    if chunk.finish_reason:
        found["finish_reason"] = REASONS.get(chunk.finish_reason, "error")
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": written, "total_tokens": prompt_tokens + written}
        found["completion_usage"] = usage
    return found


if __name__ == "__main__":
    sys.exit(run(MLXInferEngine))
