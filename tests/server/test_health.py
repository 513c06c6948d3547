"""Health, metrics, and the OpenAPI document."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from pydantic import TypeAdapter
from support.hostile.cases import request
from support.http.live_server import LiveServer, live_server

from mlxinfer.engine.async_llm import AsyncLLM
from mlxinfer.server.openai.chat import ChatCompletion
from mlxinfer.server.openai.completions import TextCompletion
from mlxinfer.server.openai.responses import ResponseObject

if TYPE_CHECKING:
    from openai import OpenAI


def get(live: LiveServer, path: str) -> tuple[int, dict[str, str], bytes]:
    return live.exchange(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode(), unix=True)


def samples(live: LiveServer) -> dict[str, float]:
    """Samples by name, with labels other than the model's."""
    _, headers, body = get(live, "/metrics")
    assert headers["content-type"].startswith("text/plain; version=0.0.4")
    found = {}
    for family in text_string_to_metric_families(body.decode()):
        for sample in family.samples:
            assert sample.labels.get("model_name", "tiny") == "tiny"
            labels = [value for name, value in sorted(sample.labels.items()) if name != "model_name"]
            found[" ".join([sample.name, *labels])] = sample.value
    return found


def test_health(live: LiveServer) -> None:
    status, headers, body = get(live, "/health")
    assert (status, json.loads(body)["status"], json.loads(body)["models"]) == (200, "ok", ["tiny"])
    assert len(headers["x-request-id"]) == 32
    assert "server" not in headers


def test_metrics_count_what_was_done(live: LiveServer, unix_client: OpenAI) -> None:
    before = samples(live)
    unix_client.completions.create(model="tiny", prompt="Hello", max_tokens=7, n=2)
    with unix_client.completions.create(model="tiny", prompt="Hello", max_tokens=3000, stream=True) as stream:
        next(stream)
        live.until(lambda s: s.running == 1)
    live.until(lambda s: s.running == 0)
    after = samples(live)

    def more(name: str) -> float:
        return after[name] - before.get(name, 0)

    assert more("mlxinfer_generation_tokens_total") == 14
    assert more("mlxinfer_prompt_tokens_total") == 5
    assert more("mlxinfer_request_success_total length") == 2
    assert more("mlxinfer_requests_cancelled_total") == 1
    assert more("mlxinfer_time_to_first_token_seconds_count") == 2
    assert more("mlxinfer_e2e_request_latency_seconds_count") == 2
    assert more("mlxinfer_request_prompt_tokens_count") == 1
    assert more("mlxinfer_inter_token_latency_seconds_count") >= 2
    assert after["mlxinfer_inter_token_latency_seconds_bucket +Inf"] == after["mlxinfer_inter_token_latency_seconds_count"]
    assert more("mlxinfer_http_requests_total POST /v1/completions 200") >= 1
    assert more("mlxinfer_prefix_cache_queries_total") >= 10
    assert after["mlxinfer_num_requests_running"] == after["mlxinfer_num_requests_waiting"] == after["mlxinfer_kv_cache_usage_perc"] == 0


NAMES = """num_requests_running num_requests_waiting kv_cache_usage_perc prefix_cache_queries_total prefix_cache_hits_total
num_preemptions_total prompt_tokens_total generation_tokens_total time_to_first_token_seconds_bucket inter_token_latency_seconds_bucket
e2e_request_latency_seconds_bucket request_queue_time_seconds_bucket request_prefill_time_seconds_bucket
request_decode_time_seconds_bucket request_prompt_tokens_bucket request_generation_tokens_bucket
spec_decode_num_draft_tokens_total spec_decode_num_accepted_tokens_total"""


def test_the_names_are_vllms(live: LiveServer, unix_client: OpenAI) -> None:
    unix_client.completions.create(model="tiny", prompt="Hello", max_tokens=1)
    names = {name.split()[0] for name in samples(live)}
    assert {f"mlxinfer_{name}" for name in NAMES.split()} <= names


@pytest.fixture
def document(live: LiveServer) -> dict[str, Any]:
    found = json.loads(get(live, "/openapi.json")[2])
    assert isinstance(found, dict)
    return found


def test_the_document_has_every_route_and_every_reference(document: dict[str, Any]) -> None:
    paths = {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/models", "/v1/models/{model}", "/v1/embeddings"}
    assert paths | {"/health", "/metrics"} <= set(document["paths"])
    schemas = document["components"]["schemas"]
    text = json.dumps(document)
    references = {part.partition('"')[0] for part in text.split('"#/components/schemas/')[1:]}
    assert references <= set(schemas)
    assert schemas["ChatRequest"]["additionalProperties"] is False
    assert schemas["ChatRequest"]["properties"]["modalities"]["enum"] == [None, ["text"]]
    assert set(document["paths"]["/v1/chat/completions"]["post"]["responses"]) >= {"200", "400", "401", "403", "404", "413", "429", "503"}


def test_answers_are_as_the_document_says(live: LiveServer, unix_client: OpenAI, tiny_path: Path) -> None:
    body: dict[str, Any] = {"model": "tiny", "max_tokens": 2}
    messages = [{"role": "user", "content": "x"}]
    asked: list[tuple[str, dict[str, Any], Any]] = [
        ("/chat/completions", {**body, "messages": messages, "logprobs": True, "top_logprobs": 1}, ChatCompletion),
        ("/completions", {**body, "prompt": "x", "logprobs": 1, "echo": True}, TextCompletion),
        ("/responses", {"model": "tiny", "max_output_tokens": 2, "input": "x"}, ResponseObject),
    ]
    for path, fields, kind in asked:
        answer = unix_client.post(path, body=fields, cast_to=object)
        assert TypeAdapter(kind).validate_python(answer) == answer


KEY = "a key of the test"


@pytest.fixture(scope="module")
def locked(tiny_path: Path) -> Iterator[LiveServer]:
    with live_server({"tiny": lambda: AsyncLLM(tiny_path)}, api_key=KEY) as server:
        yield server


def test_health_tells_the_network_no_more_than_health(locked: LiveServer) -> None:
    status, _, body = locked.exchange(request("/health", method="GET"))
    assert (status, json.loads(body)) == (200, {"status": "ok", "version": "", "models": [], "states": {}})
    for unix, lines in ((False, (f"Authorization: Bearer {KEY}",)), (False, (f"x-api-key: {KEY}",)), (True, ())):
        found = json.loads(locked.exchange(request("/health", b"", *lines, method="GET"), unix=unix)[2])
        assert found["models"] == ["tiny"]
        assert found["version"]
    assert json.loads(locked.exchange(request("/health", b"", "x-api-key: another", method="GET"))[2])["models"] == []
