"""Vectors and relevance of adapters, alone and in the company of others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from shutil import copytree

import numpy as np
import pytest
from support.models.adapters import merge, random_changes, shapes_of, write_peft

from mlxinfer import LLM, SamplingParams
from mlxinfer.engine.request_keywords import RequestOptions
from mlxinfer.engine.text.embedding import Embedder
from mlxinfer.errors import SamplingError

GOLDEN = Path(__file__).parent.parent / "golden" / "embeddings"
TEXTS = ["a small cat", "and a rather long text about cats " * 4, "dogs"]


@pytest.fixture(scope="module", params=["last", "mean"])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LLM, LLM]]:
    """An embedding model with an adapter, and the same with the adapter in its weights."""
    folder, name = tmp_path_factory.mktemp("vectors"), str(request.param)
    changes = random_changes(shapes_of(GOLDEN / name), size=0.2)
    merged = merge(Path(copytree(GOLDEN / name, folder / name)), changes)
    adapters = {"a": write_peft(folder / "a", changes)}
    with LLM(GOLDEN / name, dtype="float32", adapters=adapters) as llm, LLM(merged, dtype="float32") as expected:
        yield llm, expected


def test_an_adapter_changes_vectors_as_if_it_were_merged(both: tuple[LLM, LLM]) -> None:
    llm, merged = both
    found = llm.embed(TEXTS, adapter="a")
    np.testing.assert_allclose(found, merged.embed(TEXTS), atol=2e-3)
    assert np.abs(found - llm.embed(TEXTS)).max() > 0.02
    pairs = [(TEXTS[0], text) for text in TEXTS[1:]]
    np.testing.assert_allclose(llm.relevance(pairs, adapter="a"), merged.relevance(pairs), atol=2e-3)


def test_an_unknown_adapter_is_refused(both: tuple[LLM, LLM]) -> None:
    with pytest.raises(SamplingError, match="there is none called 'b'; there are a"):
        both[0].embed(TEXTS, adapter="b")


def test_texts_with_and_without_one_in_a_step(both: tuple[LLM, LLM]) -> None:
    """Answers are written between them where the model can."""
    llm, _ = both
    opened, plain, changed = llm._client.opened, llm.embed(TEXTS), llm.embed(TEXTS, adapter="a")
    embedder, inputs = Embedder.of(opened), opened.inputs
    ids = embedder.token_ids(TEXTS, embedder.prompt(None, None))
    waiting = [s for name in (None, "a") for s in embedder.sequences(ids, RequestOptions(adapter=name))]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    answers = [llm.generate("hello", params, adapter=name)[0].token_ids for name in (None, "a")] if inputs.is_causal else []
    writing = [inputs.sequences(inputs.token_ids("hello"), params, RequestOptions(adapter=n))[0] for n in (None, "a")[: len(answers)]]
    for sequence in writing:
        llm.engine.add(sequence)
    vectors = embedder.finish([v for v in llm._client.pooled(waiting) if v is not None], None)
    np.testing.assert_allclose(vectors, np.concatenate([plain, changed]), atol=2e-3)
    assert [s.answer for s in writing] == answers
