"""Embedding and reranking requests: fair scheduling, time limits and adapters. Also routers' views of workers with several names."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.hostile.cases import request
from support.http.live_server import LiveServer, Served, live_registry
from support.models.adapters import random_changes, shapes_of, write_peft
from support.models.tiny_directory import tiny_directory

from mlxinfer.engine.async_llm import AsyncLLM
from mlxinfer.engine.request_keywords import RequestOptions
from mlxinfer.server.model_manager.manager import ModelManager
from mlxinfer.server.model_manager.memory_room import MemoryRoom
from mlxinfer.server.model_manager.model_slot import ModelSlot
from mlxinfer.server.model_manager.registry import Registry
from mlxinfer.server.settings import Limits

EMBEDDER = Path(__file__).parents[2] / "golden" / "embeddings" / "last"
POOLED = (("/v1/embeddings", {"input": "Hello"}), ("/v1/rerank", {"query": "Hello", "documents": ["you"]}))


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server of `emb` with an adapter, also named `again`, and of `other`."""
    folder = tmp_path_factory.mktemp("models")
    adapter = write_peft(folder / "a", random_changes(shapes_of(EMBEDDER), 1, size=0.2))
    other = tiny_directory(folder / "other", eos=False)

    async def make() -> Served:
        models = {"emb": AsyncLLM(EMBEDDER, adapters={"a": adapter}), "other": AsyncLLM(other)}
        await asyncio.gather(*(llm.ready() for llm in models.values()))
        slots = {name: ModelSlot.running(llm) for name, llm in models.items()}
        registry = Registry({"other": slots["other"], "emb": slots["emb"], "again": slots["emb"]})
        return Served(registry, ModelManager(registry.slots, MemoryRoom()), models)

    with live_registry(make, limits=Limits(request_s=50)) as live:
        yield live


def post(live: LiveServer, path: str, *, unix: bool = True, **body: Any) -> tuple[int, Any]:
    status, _, answer = live.exchange(request(path, json.dumps(body).encode(), "Content-Type: application/json"), unix=unix)
    return status, json.loads(answer)


def get(live: LiveServer, path: str) -> tuple[int, Any]:
    status, _, answer = live.exchange(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode(), unix=True)
    return status, json.loads(answer)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[RequestOptions]:
    """Keyword arguments that the engine gets for each request."""
    found: list[RequestOptions] = []
    of = RequestOptions.of

    def kept(method: str, given: Any) -> RequestOptions:
        found.append(of(method, given))
        return found[-1]

    monkeypatch.setattr(RequestOptions, "of", kept)
    return found


@pytest.mark.parametrize(("path", "body"), POOLED)
def test_turns_go_by_peer_and_by_user(live: LiveServer, seen: list[RequestOptions], path: str, body: dict[str, Any]) -> None:
    assert post(live, path, model="emb", **body)[0] == 200
    assert post(live, path, model="emb", unix=False, **body)[0] == 200
    assert post(live, path, model="emb", user="somebody", **body)[0] == 200
    peers = [each.client_id.partition(" ")[::2] for each in seen]
    assert [kind for kind, _ in peers] == ["process", "connection", "user"]
    assert peers[2][1] == "somebody"


@pytest.mark.parametrize(("path", "body"), POOLED)
def test_the_time_for_loading_counts(live: LiveServer, seen: list[RequestOptions], path: str, body: dict[str, Any]) -> None:
    assert post(live, path, model="emb", **body)[0] == 200
    assert all(each.timeout_s is not None and 0 < each.timeout_s < 50 for each in seen)


@pytest.mark.parametrize(("path", "body"), [*POOLED, ("/v1/completions", {"prompt": "Hello", "max_tokens": 1})])
def test_the_longest_name_of_a_user(live: LiveServer, path: str, body: dict[str, Any]) -> None:
    status, answer = post(live, path, model="emb", user="u" * 256, **body)
    assert status == 200, answer
    assert post(live, path, model="emb", user="u" * 257, **body)[0] == 400


@pytest.mark.parametrize(("path", "body"), [*POOLED, ("/v1/score", {"text_1": "a", "text_2": "b"}), ("/api/embed", {"input": "Hello"})])
def test_an_adapter_is_handed_on(live: LiveServer, seen: list[RequestOptions], path: str, body: dict[str, Any]) -> None:
    assert [post(live, path, model=name, **body)[0] for name in ("emb:a", "emb")] == [200, 200]
    assert [each.adapter for each in seen] == ["a", None]


def test_a_model_with_two_names_is_one_load(live: LiveServer) -> None:
    _, found = get(live, "/v1/loads")
    assert [(load["dp_rank"], load["model"]) for load in found["loads"]] == [(0, "other"), (1, "emb")]
    assert found["dp_rank_count"] == 2
    assert [each["served_model_name"] for each in get(live, "/server_info")[1]["models"]] == ["other", "emb", "again"]


def test_a_failed_engine_hides_no_other(live: LiveServer) -> None:
    """Must be the last test: `other` has ended afterwards."""
    asyncio.run(live.models["other"].close())
    assert get(live, "/health")[0] == 503
    status, found = get(live, "/v1/loads")
    assert (status, [load["model"] for load in found["loads"]]) == (200, ["emb"])
    status, found = get(live, "/server_info")
    assert (status, found["served_model_name"]) == (200, "emb")
    assert b"mlxinfer_engine_steps" in live.exchange(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n", unix=True)[2]


def test_a_pinned_model_is_not_said_to_be_unloaded(live: LiveServer) -> None:
    """All models of this server were loaded by the caller, and are pinned."""
    status, answer = post(live, "/models/unload", model="emb:a")
    assert (status, answer["error"]["code"], answer["error"]["message"]) == (400, "model_pinned", "'emb' is pinned: it is never unloaded")
