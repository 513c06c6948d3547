"""Log-probabilities of a prompt are those of its logits, for any chunks and any other requests."""

from __future__ import annotations

import asyncio
from pathlib import Path

import mlx.core as mx
import pytest
from support.models.tiny_directory import tiny_directory

from mlxinfer.engine.async_llm import AsyncLLM
from mlxinfer.engine.llm import LLM
from mlxinfer.engine.text import output_processor
from mlxinfer.errors import PromptError
from mlxinfer.sampling.logprobs import logprobs_of
from mlxinfer.types import SamplingParams, TokenLogprob


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_directory(tmp_path_factory.mktemp("models") / "tiny", eos=False)


PROMPT = [(i * 7 + i // 5) % 90 + 3 for i in range(150)]


def _expected(path: Path, top: int) -> list[TokenLogprob]:
    with LLM(path, dtype="float32") as llm:
        logits = llm.logits(PROMPT)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        order = mx.argsort(-logprobs, axis=-1)[:, :top]
        text = llm.tokenizer.token_text
        return [
            TokenLogprob(i, text(i), row[i].item(), tuple((j, text(j), row[j].item()) for j in ranks.tolist()))
            for i, row, ranks in zip(PROMPT[1:], logprobs, order, strict=False)
        ]


def test_logits_alone_compute_no_logprobs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(output_processor, "logprobs_of", lambda *given: asked.append(given) or logprobs_of(*given))
    with LLM(path, dtype="float32") as llm:
        assert llm.logits(PROMPT).shape[0] == len(PROMPT)
        llm.trace(PROMPT, what="logits")
        assert not asked
        llm.score(PROMPT)
        assert asked


async def _scores(path: Path, top: int, beside: int) -> list[list[TokenLogprob]]:
    async with AsyncLLM(path, dtype="float32", max_num_seqs=4) as llm:
        others = [asyncio.ensure_future(llm.generate([PROMPT[i:]], SamplingParams(max_tokens=30))) for i in range(beside)]
        found = await asyncio.gather(*(llm.score(PROMPT, top) for _ in range(3)))
        await asyncio.gather(*others)
        assert llm.stats().pages_used == 0
        return list(found)


@pytest.mark.parametrize(("top", "beside"), [(0, 0), (3, 5)])
def test_scores_are_those_of_the_logits(path: Path, top: int, beside: int) -> None:
    expected = _expected(path, top)
    for found in asyncio.run(_scores(path, top, beside)):
        assert [one.token_id for one in found] == PROMPT[1:]
        assert [one.logprob for one in found] == pytest.approx([one.logprob for one in expected], abs=1e-5)
        assert [[i for i, *_ in one.top] for one in found] == [[i for i, *_ in one.top] for one in expected]


async def _odd(path: Path) -> None:
    async with AsyncLLM(path, max_context=64) as llm:
        assert await llm.score([5]) == []
        assert len(await llm.score(PROMPT[:64])) == 63
        with pytest.raises(PromptError):
            await llm.score(PROMPT[:65])
        with pytest.raises(PromptError):
            await llm.score([])
        task = asyncio.ensure_future(llm.score(PROMPT[:64]))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(await llm.score(PROMPT[:64])) == 63


def test_single_tokens_whole_contexts_and_cancelled_ones(path: Path) -> None:
    asyncio.run(_odd(path))
