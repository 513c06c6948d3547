"""`model: "base:adapter"` in requests for embeddings and reranking."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from support.hostile.cases import request
from support.http.live_server import live_server
from support.models.adapters import random_changes, shapes_of, write_peft

from mlxinfer import LLM, AsyncLLM

MODEL = Path(__file__).parents[2] / "golden" / "embeddings" / "last"
TEXTS = ["a small cat", "dogs", "a rather long text about cats"]


def test_vectors_and_relevance_are_the_adapters(tmp_path: Path) -> None:
    adapters = {"a": write_peft(tmp_path / "a", random_changes(shapes_of(MODEL), size=0.2))}
    with LLM(MODEL, adapters=adapters) as llm:
        vectors = [llm.embed(TEXTS, adapter=name) for name in (None, "a")]
        (_, relevance) = (llm.relevance([(TEXTS[0], text) for text in TEXTS], adapter=name) for name in (None, "a"))
    assert np.abs(vectors[0] - vectors[1]).max() > 0.02
    with live_server({"tiny": lambda: AsyncLLM(MODEL, adapters=adapters)}) as server:

        def post(path: str, **body: Any) -> Any:
            status, _, answer = server.exchange(request(path, json.dumps(body).encode(), "Content-Type: application/json"), unix=True)
            assert status == 200
            return json.loads(answer)

        for name, expected in zip(("tiny", "tiny:a"), vectors, strict=True):
            found = post("/v1/embeddings", model=name, input=TEXTS)["data"]
            np.testing.assert_allclose([each["embedding"] for each in found], expected, atol=1e-5)
        ranked = post("/v1/rerank", model="tiny:a", query=TEXTS[0], documents=TEXTS)["results"]
        scores = {each["index"]: each["relevance_score"] for each in ranked}
        np.testing.assert_allclose([scores[i] for i in range(3)], relevance, atol=1e-5)
