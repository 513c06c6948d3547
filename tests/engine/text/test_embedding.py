"""Vectors and relevance against sentence-transformers and transformers, on tiny checkpoints of each kind (golden/make_embeddings.py)."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlxinfer import LLM, SamplingParams
from mlxinfer.cache.base import BidirectionalSpec
from mlxinfer.engine.async_llm import AsyncLLM
from mlxinfer.engine.core.schedule import Schedule
from mlxinfer.errors import ContextLengthError, DeadlineError, PromptError, SamplingError, UnsupportedModelError
from mlxinfer.types import Completion

GOLDEN = Path(__file__).parents[2] / "golden" / "embeddings"
KINDS = ("last", "mean")


def reference(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((GOLDEN / name / "reference.json").read_text())
    return found


def cosines(a: Any, b: Any) -> np.ndarray:
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return np.asarray((a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1))


@pytest.fixture(scope="module")
def models() -> Iterator[dict[str, LLM]]:
    opened = {name: LLM(GOLDEN / name, dtype="float32") for name in KINDS}
    yield opened
    for llm in opened.values():
        llm.close()


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("kind", ["none", "query", "document"])
def test_vectors_are_those_of_sentence_transformers(models: dict[str, LLM], name: str, kind: str) -> None:
    """The texts are shorter and longer than the window of 24, and than a page; prompts come from the checkpoint."""
    told = reference(name)
    found = models[name].embed(told["texts"], input_type=None if kind == "none" else kind)
    assert found.dtype == np.float32
    assert cosines(found, told["vectors"][kind]).min() > 0.999999
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-5)
    if kind != "none":
        np.testing.assert_allclose(found[:1], models[name].embed(told["texts"][0], prompt_name=kind), atol=2e-6)


@pytest.mark.parametrize("name", KINDS)
def test_the_closing_token_is_there_once_and_ids_are_taken_as_they_are(models: dict[str, LLM], name: str) -> None:
    told = reference(name)
    assert [models[name].tokenizer.encode(text) for text in told["texts"]] == told["ids"]
    np.testing.assert_allclose(models[name].embed(told["ids"]), models[name].embed(told["texts"]), atol=1e-6)


@pytest.mark.parametrize("name", KINDS)
def test_a_batch_gives_what_each_text_alone_gives(models: dict[str, LLM], name: str) -> None:
    texts = reference(name)["texts"] * 5
    together = models[name].embed(texts)
    alone = np.concatenate([models[name].embed(text) for text in texts[:6]])
    np.testing.assert_allclose(together, np.tile(alone, (5, 1)), atol=2e-6)


@pytest.mark.parametrize("name", KINDS)
def test_deterministic_engines_give_the_same_bits(name: str) -> None:
    texts = reference(name)["texts"]
    with LLM(GOLDEN / name, deterministic=True) as llm:
        np.testing.assert_array_equal(llm.embed(texts), np.concatenate([llm.embed(text) for text in texts]))


@pytest.mark.parametrize("name", KINDS)
def test_fewer_dimensions(models: dict[str, LLM], name: str) -> None:
    told = reference(name)
    found = models[name].embed(told["texts"], 8)
    assert found.shape == (6, 8)
    assert cosines(found, told["first_8"]).min() > 0.999999
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-5)
    for wrong in (0, -1, True, 1.5, 33):
        with pytest.raises(SamplingError, match=r"^dimensions must be"):
            models[name].embed("x", wrong)  # type: ignore[arg-type]


def test_texts_that_are_too_long(models: dict[str, LLM]) -> None:
    """Cut before the closing token, as tokenizers do it."""
    for name in KINDS:
        llm, long = models[name], "abc " * 100
        with pytest.raises(ContextLengthError, match="takes 256: shorten it, or ask for truncate"):
            llm.embed(long)
        whole = llm.tokenizer.encode(long)
        np.testing.assert_allclose(llm.embed(long, truncate=True), llm.embed([*whole[:255], whole[-1]]), atol=1e-6)
        with pytest.raises(ContextLengthError):
            llm.embed([5] * 257)


def test_what_is_refused(models: dict[str, LLM]) -> None:
    llm = models["last"]
    for nothing in ([], [[]]):
        with pytest.raises(PromptError):
            llm.embed(nothing)
    with pytest.raises(PromptError, match="token id 5000"):
        llm.embed([[5, 5000]])
    with pytest.raises(SamplingError, match=r"unknown prompt 'passage' \(known: document, query\)"):
        llm.embed("x", prompt_name="passage")
    with pytest.raises(SamplingError, match="input_type must be query or document"):
        llm.embed("x", input_type="classification")
    with pytest.raises(SamplingError, match="give one of them"):
        llm.embed("x", input_type="query", prompt_name="query")


def test_texts_that_are_read_both_ways_cannot_be_gone_on_with(models: dict[str, LLM]) -> None:
    llm = models["mean"]
    assert all(isinstance(spec, BidirectionalSpec) for spec in llm.loaded.model.layers)
    for ask in (lambda: llm.generate("x"), lambda: llm.score("xy"), lambda: llm.logits("xy")):
        with pytest.raises(UnsupportedModelError, match="use embed"):
            ask()


def changed(tmp_path: Path, name: str, file: str, change: Any) -> Path:
    target = tmp_path / name
    shutil.copytree(GOLDEN / name, target)
    if change is None:
        (target / file).unlink()
    else:
        (target / file).write_text(json.dumps(json.loads((target / file).read_text()) | change))
    return target


@pytest.mark.parametrize(
    ("file", "change", "says"),
    [
        ("1_Pooling/config.json", {"pooling_mode": "max"}, "pooling max is not supported"),
        ("1_Pooling/config.json", {"pooling_mode": ["mean", "max"]}, "pooling mean and max is not supported"),
        ("1_Pooling/config.json", {"include_prompt": False}, "include_prompt"),
        ("modules.json", None, "copy modules.json and the folders"),
        ("2_Dense/config.json", {"activation_function": "torch.nn.modules.activation.GELU"}, "activation GELU"),
        ("2_Dense/model.safetensors", None, "no model.safetensors"),
    ],
)
def test_a_recipe_that_is_not_understood_is_refused_by_name(tmp_path: Path, file: str, change: Any, says: str) -> None:
    with LLM(changed(tmp_path, "mean", file, change)) as llm, pytest.raises(UnsupportedModelError, match=says):
        llm.embed("x")


def test_flags_of_older_sentence_transformers(tmp_path: Path, models: dict[str, LLM]) -> None:
    flags = {"pooling_mode": None, "pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True, "word_embedding_dimension": 32}
    with LLM(changed(tmp_path, "last", "1_Pooling/config.json", flags), dtype="float32") as llm:
        np.testing.assert_array_equal(llm.embed("cat"), models["last"].embed("cat"))


def test_the_first_state(tmp_path: Path) -> None:
    """Of a model that looks both ways, so that it depends on all tokens."""
    with LLM(changed(tmp_path, "mean", "1_Pooling/config.json", {"pooling_mode": "cls"})) as llm:
        a, b = llm.embed(["cat", "car"])
        assert 0.1 < cosines([a], [b])[0] < 0.999


@pytest.mark.parametrize("name", KINDS)
def test_many_tasks_and_answers_in_the_same_engine(models: dict[str, LLM], name: str) -> None:
    told, prompts = reference(name), [[7, 8, 9], [9, 8, 7]] if name == "last" else []
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)

    async def ask() -> tuple[list[np.ndarray], list[list[Completion]]]:
        async with AsyncLLM(GOLDEN / name, dtype="float32", max_num_seqs=4) as llm:
            vectors = asyncio.gather(*(llm.embed(told["texts"]) for _ in range(4)))
            answers = asyncio.gather(*(llm.generate([prompt], params) for prompt in prompts))
            return await vectors, await answers

    found, answers = asyncio.run(ask())
    for vectors in found:
        assert cosines(vectors, told["vectors"]["none"]).min() > 0.999999
    alone = [models["last"].generate([prompt], params)[0].token_ids for prompt in prompts]
    assert [answer[0].token_ids for answer in answers] == alone


def test_a_task_that_is_given_up_leaves_nothing_behind() -> None:
    async def ask() -> int:
        async with AsyncLLM(GOLDEN / "last", max_num_seqs=2) as llm:
            task = asyncio.ensure_future(llm.embed(["x" * 200] * 50))
            await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            with pytest.raises(DeadlineError, match="not read within"):
                await llm.embed(["x" * 200] * 200, timeout_s=0.001)
            await llm.embed("x")
            return llm.stats().running + llm.stats().waiting

    assert asyncio.run(ask()) == 0


def test_texts_that_run_out_of_time(models: dict[str, LLM]) -> None:
    with pytest.raises(DeadlineError, match=r"not read within 0\.001 s"):
        models["last"].embed(["x" * 200] * 200, timeout_s=0.001)


def test_a_sequence_that_gives_its_pages_back_is_summed_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mean pooling of a causal model, in chunks of 64."""
    text = "The capital of China is Beijing. " * 7
    with LLM(changed(tmp_path, "last", "1_Pooling/config.json", {"pooling_mode": "mean"})) as llm:
        alone = llm.embed(text)
        scheduler, schedule, steps = llm.engine.scheduler, llm.engine.scheduler.schedule, iter(range(100))

        def preempting() -> Schedule:
            return Schedule(preempt=list(scheduler.running)) if next(steps) == 2 else schedule()

        monkeypatch.setattr(scheduler, "schedule", preempting)
        np.testing.assert_allclose(llm.embed(text), alone, atol=1e-6)
        assert next(steps) > 6
        assert llm.stats().preemptions == 1


def test_interventions_hold_for_vectors_too(models: dict[str, LLM]) -> None:
    llm = models["last"]
    before = llm.embed("cat")
    with llm.ablate("mlp", 1):
        changed_vector = llm.embed("cat")
    assert cosines(changed_vector, before)[0] < 0.99
    np.testing.assert_array_equal(llm.embed("cat"), before)
    with models["mean"].ablate("mlp", 1), pytest.raises(UnsupportedModelError, match="interventions"):
        models["mean"].embed("cat")


def test_nothing_is_planned_for_what_is_never_kept(models: dict[str, LLM]) -> None:
    plan = models["mean"].plan
    assert (plan.pool, plan.reuse, plan.snapshots, plan.prefix_cache_tokens) == (0, 0, 0, 0)
    assert plan.rows >= plan.context == 256


def test_the_reranker_agrees_with_its_reference() -> None:
    told = reference("reranker")
    with LLM(GOLDEN / "reranker", dtype="float32") as llm:
        found = llm.rerank(told["query"], told["documents"])
        best = np.argsort(told["scores"])[::-1]
        assert [each.index for each in found] == list(best)
        np.testing.assert_allclose([each.relevance_score for each in found], np.array(told["scores"])[best], atol=2e-5)
        assert found[0].document == told["documents"][best[0]]
        reused = llm.stats().reused_tokens
        assert reused > 250 * (len(told["documents"]) - 1)  # the scaffold and the query
        assert [each.index for each in llm.rerank(told["query"], told["documents"], 2)] == list(best[:2])
        other = llm.rerank(told["query"], told["documents"], instruction="Find lies")
        assert abs(other[0].relevance_score - found[0].relevance_score) > 1e-5
        with pytest.raises(PromptError, match="at least one"):
            llm.rerank("x", [])
        with pytest.raises(ContextLengthError, match="shorten the document"):
            llm.rerank("x", ["y" * 1000])


def test_a_reranker_without_the_prefix_cache() -> None:
    told = reference("reranker")
    with LLM(GOLDEN / "reranker", dtype="float32", prefix_cache=False) as llm:
        scores = llm.relevance([(told["query"], document) for document in told["documents"]])
    np.testing.assert_allclose(scores, told["scores"], atol=2e-5)


def test_an_embedding_model_ranks_by_cosine(models: dict[str, LLM]) -> None:
    told, llm = reference("last"), models["last"]
    query, documents = told["texts"][0], told["texts"][1:]
    rows = np.array(told["vectors"]["document"])[1:] @ np.array(told["vectors"]["query"])[0]
    found = llm.rerank(query, [*documents, documents[0]])
    assert [each.index for each in found if each.index < len(documents)] == list(np.argsort(rows)[::-1])
    scores = {each.index: each.relevance_score for each in found}
    np.testing.assert_allclose([scores[i] for i in range(len(documents))], rows, atol=1e-5)
    assert scores[len(documents)] == scores[0]
    with pytest.raises(UnsupportedModelError, match="an instruction is for rerankers"):
        llm.rerank("x", ["y"], instruction="z")


def test_a_model_that_only_writes_is_told_what_to_use(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "reranker", tmp_path / "writer")
    with LLM(tmp_path / "writer") as llm:
        with pytest.raises(UnsupportedModelError, match="neither a reranker that is known here"):
            llm.rerank("x", ["y"])
        with pytest.raises(UnsupportedModelError, match="is not an embedding model"):
            llm.embed("x")
