"""Embeddings and reranking over HTTP: the openai and ollama clients, and plain requests, against tiny models of each kind."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter
from support.hostile.cases import request
from support.http.live_server import LiveServer, live_server, openai_client
from support.models.tiny_directory import tiny_directory
from support.processes.optional import needs

from mlxinfer.engine.async_llm import AsyncLLM
from mlxinfer.server.openai.embeddings import Embeddings
from mlxinfer.server.openai.reranking import RerankReply, ScoreList

GOLDEN = Path(__file__).parents[2] / "golden" / "embeddings"
LAST, MEAN, RERANKER = (json.loads((GOLDEN / name / "reference.json").read_text()) for name in ("last", "mean", "reranker"))
BODIES = {"Content-Type: application/json"}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    writer = tiny_directory(tmp_path_factory.mktemp("models") / "writer")
    models = {"tiny": GOLDEN / "last", "mean": GOLDEN / "mean", "reranker": GOLDEN / "reranker", "writer": writer}
    with live_server({name: lambda path=path: AsyncLLM(path, dtype="float32") for name, path in models.items()}) as server:  # type: ignore[misc]
        yield server


def post(served: LiveServer, path: str, **body: Any) -> tuple[int, Any]:
    status, _, answer = served.exchange(request(path, json.dumps({"model": "tiny", **body}).encode(), *BODIES), unix=True)
    return status, json.loads(answer)


def close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(np.array(found), np.array(expected), atol=1e-5)


@pytest.mark.parametrize("unix", [True, False])
def test_openais_client_asks_for_base64_and_gets_floats(served: LiveServer, unix: bool) -> None:
    with openai_client(served, unix=unix) as client:
        found = client.embeddings.create(model="tiny", input=LAST["texts"])
        close([each.embedding for each in found.data], LAST["vectors"]["none"])
        assert [each.index for each in found.data] == list(range(6))
        assert found.usage.prompt_tokens == found.usage.total_tokens == sum(map(len, LAST["ids"]))
        floats = client.embeddings.create(model="tiny", input=LAST["texts"][0], encoding_format="float", dimensions=8)
        close(floats.data[0].embedding, LAST["first_8"][0])
        ids = client.embeddings.create(model="mean", input=MEAN["ids"])
        close([each.embedding for each in ids.data], MEAN["vectors"]["none"])
        prompted = client.embeddings.create(model="mean", input=MEAN["texts"], extra_body={"input_type": "query"})
        close([each.embedding for each in prompted.data], MEAN["vectors"]["query"])


def test_the_bytes_of_base64_and_the_shape_of_the_answer(served: LiveServer) -> None:
    status, answer = post(served, "/v1/embeddings", input=LAST["ids"][0], encoding_format="base64")
    assert status == 200
    TypeAdapter(Embeddings).validate_python(answer)
    close(np.frombuffer(base64.b64decode(answer["data"][0]["embedding"]), "<f4"), LAST["vectors"]["none"][0])


def test_ollamas_client(served: LiveServer) -> None:
    ollama = needs("ollama")
    client = ollama.Client(served.url, verify=False)
    found = client.embed("tiny:latest", LAST["texts"])
    close(found.embeddings, LAST["vectors"]["none"])
    assert found.prompt_eval_count == sum(map(len, LAST["ids"]))
    assert found.total_duration > 0
    close(client.embed("tiny", LAST["texts"][0], dimensions=8).embeddings, LAST["first_8"][:1])
    close(client.embeddings("mean", MEAN["texts"][1]).embedding, MEAN["vectors"]["none"][1])
    assert client.embed("tiny", "").embeddings == []
    assert len(client.embed("tiny", "long " * 100).embeddings) == 1
    with pytest.raises(ollama.ResponseError, match="maximum context length is 256"):
        client.embed("tiny", "long " * 100, truncate=False)
    assert client.show("tiny").capabilities == ["embedding"]
    assert client.show("writer").capabilities[0] == "completion"


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank"])
def test_rerank(served: LiveServer, path: str) -> None:
    documents = [*RERANKER["documents"][:-1], {"text": RERANKER["documents"][-1]}]
    status, answer = post(served, path, model="reranker", query=RERANKER["query"], documents=documents, return_documents=True)
    assert status == 200, answer
    TypeAdapter(RerankReply).validate_python(answer)
    order = np.argsort(RERANKER["scores"])[::-1]
    assert [each["index"] for each in answer["results"]] == list(order)
    close([each["relevance_score"] for each in answer["results"]], np.array(RERANKER["scores"])[order])
    assert [each["document"]["text"] for each in answer["results"]] == [RERANKER["documents"][i] for i in order]
    assert answer["usage"]["total_tokens"] == sum(map(len, RERANKER["ids"]))
    _, best = post(served, path, model="reranker", query=RERANKER["query"], documents=documents, top_n=1)
    assert [set(each) for each in best["results"]] == [{"index", "relevance_score"}]
    _, cosines = post(served, path, query=LAST["texts"][0], documents=LAST["texts"][1:])
    expected = np.array(LAST["vectors"]["document"])[1:] @ np.array(LAST["vectors"]["query"])[0]
    assert [each["index"] for each in cosines["results"]] == list(np.argsort(expected)[::-1])


def test_score(served: LiveServer) -> None:
    one_to_many = {"text_1": RERANKER["query"], "text_2": RERANKER["documents"]}
    pairs = {"text_1": [RERANKER["query"]] * len(RERANKER["documents"]), "text_2": RERANKER["documents"]}
    for body in (one_to_many, pairs):
        status, answer = post(served, "/v1/score", model="reranker", **body)
        assert status == 200
        TypeAdapter(ScoreList).validate_python(answer)
        close([each["score"] for each in answer["data"]], RERANKER["scores"])
    assert post(served, "/v1/score", model="reranker", text_1=["a", "b"], text_2=["a", "b", "c"])[0] == 400


@pytest.mark.parametrize(
    ("path", "body", "param", "says"),
    [
        ("/v1/embeddings", {"input": []}, "input", "at least one text"),
        ("/v1/embeddings", {"input": [[]]}, None, "empty"),
        ("/v1/embeddings", {"input": ["x"] * 2049}, "input", "at most 2048"),
        ("/v1/embeddings", {"input": [1, 99999]}, "input", "check_embedding_ctx_length=False"),
        ("/v1/embeddings", {"input": [[1], [-4]]}, "input", "check_embedding_ctx_length=False"),
        ("/v1/embeddings", {"input": "x", "dimensions": 33}, "dimensions", "1 to 32"),
        ("/v1/embeddings", {"input": "x", "dimensions": 0}, "dimensions", "greater than or equal to 1"),
        ("/v1/embeddings", {"input": "x", "encoding_format": "int8"}, "encoding_format", "float"),
        ("/v1/embeddings", {"input": "x", "input_type": "clustering"}, "input_type", "query or document"),
        ("/v1/embeddings", {"input": "x", "prompt_name": "passage"}, "prompt_name", "known: document, query"),
        ("/v1/embeddings", {"input": "x" * 300}, None, "maximum context length is 256"),
        ("/v1/embeddings", {"input": "x", "model": "writer"}, "model", "copy modules.json"),
        ("/v1/embeddings", {"input": "\ud800"}, None, "not valid"),
        ("/v1/rerank", {"query": "x", "documents": []}, "documents", "at least one text"),
        ("/v1/rerank", {"query": "x", "documents": ["y"], "top_n": 0}, "top_n", "greater than or equal to 1"),
        ("/v1/rerank", {"query": "x", "documents": ["y"], "model": "writer"}, "model", "neither a reranker"),
        ("/v1/rerank", {"query": "x", "documents": [{"title": "y"}]}, "documents[0].text", "Missing"),
        ("/v1/score", {"text_1": [], "text_2": "x"}, "text_1", "at least one text"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "model": "mean"}, None, ""),
        ("/v1/completions", {"prompt": "x", "model": "mean"}, "model", "use embed"),
    ],
)
def test_bad_input_is_refused_by_name(served: LiveServer, path: str, body: dict[str, Any], param: str | None, says: str) -> None:
    status, answer = post(served, path, **body)
    assert status == 400, answer
    assert param is None or answer["error"]["param"] == param
    assert says in answer["error"]["message"]


def test_ollamas_errors(served: LiveServer) -> None:
    status, answer = post(served, "/api/embed", model="writer", input="x")
    assert (status, list(answer)) == (400, ["error"])
    assert post(served, "/api/embed", model="nothing", input="x")[0] == 404


def test_what_was_embedded_is_counted(served: LiveServer) -> None:
    post(served, "/v1/embeddings", input="x")
    text = served.exchange(request("/metrics", method="GET"), unix=True)[2].decode()
    assert 'mlxinfer_prompt_tokens_total{model_name="tiny"}' in text
    assert 'mlxinfer_request_success_total{finished_reason="stop",model_name="tiny"}' in text
