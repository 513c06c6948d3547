"""Endpoints that routers read from a worker."""

from __future__ import annotations

import json

import pytest

from mlxinfer._version import __version__

# vLLM's names, which its production stack and gateways read.
SCRAPED = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    'vllm:time_to_first_token_seconds_bucket{le="0.25"',
    "vllm:e2e_request_latency_seconds_count",
    "vllm:inter_token_latency_seconds_sum",
    "vllm:request_success_total",
)


def get(live, path):
    status, _, body = live.exchange(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    assert status == 200, body
    return body


def test_who_it_is(live):
    assert json.loads(get(live, "/version")) == {"version": __version__}
    info = json.loads(get(live, "/server_info"))
    assert info == json.loads(get(live, "/get_server_info"))
    name = next(iter(live.models))
    llm = live.models[name]
    assert (info["served_model_name"], info["engine"], info["page_size"]) == (name, "mlxinfer", 64)
    assert info["context_length"] == info["max_model_len"] == llm.max_context
    assert info["max_total_num_tokens"] == llm.stats().pages * 64
    assert [model["served_model_name"] for model in info["models"]] == list(live.models)
    model = json.loads(get(live, "/model_info"))
    assert model == json.loads(get(live, "/get_model_info"))
    assert (model["model_path"], model["is_generation"]) == (name, True)
    assert model["model_type"] == llm.config["model_type"]


@pytest.mark.parametrize("path", ["/v1/loads?include=core", "/loads?model=tiny"])
def test_how_busy_it_is(live, path):
    found = json.loads(get(live, path))
    assert [load["model"] for load in found["loads"]] == list(live.models)
    assert found["aggregate"]["total_reqs"] == sum(load["num_total_reqs"] for load in found["loads"])
    assert all(0 <= load["token_usage"] <= 1 and load["max_running_requests"] >= 1 for load in found["loads"])


def test_metrics_have_vllms_names_too(live, unix_client):
    unix_client.completions.create(model="tiny", prompt="a", max_tokens=3)
    text = get(live, "/metrics").decode()
    assert [name for name in SCRAPED if f"\n{name}" not in text] == []
    own, theirs = (
        next(line for line in text.splitlines() if line.startswith(f"{prefix}generation_tokens_total{{"))
        for prefix in ("mlxinfer_", "vllm:")
    )
    assert own.partition("{")[2] == theirs.partition("{")[2]
