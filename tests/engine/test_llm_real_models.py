"""Real models from their PyPI packages, against transformers and llama.cpp."""

import json
from pathlib import Path

import numpy as np
import pytest

from mlxinfer import LLM, SamplingParams

GOLDEN = Path(__file__).parent.parent / "golden"
pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def smollm2():
    with LLM("smollm2", dtype="float32") as llm:
        yield llm


@pytest.mark.parametrize("case", json.loads((GOLDEN / "smollm2_greedy_float32.json").read_text())["cases"], ids=lambda c: c["prompt"])
def test_smollm2_answers_token_for_token_as_transformers(smollm2, case):
    messages = [{"role": "user", "content": case["prompt"]}]
    assert smollm2.tokenizer.encode_chat(messages) == case["ids"]
    answer = smollm2.chat(messages, SamplingParams(temperature=0, max_tokens=24))
    assert answer.token_ids == case["new"]
    assert answer.text == case["text"]


def test_smollm2_ends_its_turn(smollm2):
    answer = smollm2.chat([{"role": "user", "content": "What is the capital of France?"}], SamplingParams(temperature=0))
    assert (answer.text, answer.finish_reason) == ("The capital of France is Paris.", "stop")


def test_peak_memory_counts_the_weights(smollm2):
    usage = smollm2.chat([{"role": "user", "content": "Hi"}], SamplingParams(temperature=0, max_tokens=2)).usage
    assert usage.peak_memory_bytes > 80e6


@pytest.fixture(scope="module")
def gemma():
    with LLM("gemma3-270m", dtype="float32") as llm:
        yield llm


def test_gemma_agrees_with_llama_cpp_on_a_page_of_text(gemma):
    """llama.cpp rounds activations to 8 bits, so that two right implementations differ where two tokens are almost as likely:
    transformers in float32 has the same agreement with it on this page, 222 of 230 positions."""
    page = json.loads((GOLDEN / "gemma3_270m_llamacpp.json").read_text())
    assert gemma.tokenizer.encode(page["text"]) == page["ids"]
    logits = np.array(gemma.logits(page["ids"]))
    assert np.mean(logits.argmax(-1) == np.array(page["top1"])) >= 0.95
    shifted = logits - logits.max(-1, keepdims=True)
    logprobs = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    nll = -logprobs[np.arange(len(page["ids"]) - 1), page["ids"][1:]].mean()
    assert nll == pytest.approx(page["nll"], abs=0.03)


def test_gemma_continues_text_sensibly(gemma):
    prompts = ["The opposite of hot is", "Once upon a time, there was a", "1, 2, 3, 4,"]
    answers = gemma.generate(prompts, SamplingParams(temperature=0, max_tokens=6))
    for answer, start in zip(answers, [" cold.", " little girl", " 5, 6"], strict=True):
        assert answer.text.startswith(start)


@pytest.mark.parametrize("kv", [pytest.param("16", marks=pytest.mark.slow), "4"])
def test_smollm2_answers_each_stream_as_if_it_were_alone(kv):
    """Streams that come and go, share a beginning, draft and are sampled: token for token what each is answered alone."""
    prompts = [
        "Say hello.",
        "def add(a, b):\n    return a + b\n\nRename a to x, repeat the code.",
        "List three primes.",
        "Why is the sky blue?",
    ]
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    ways = [
        SamplingParams(temperature=0, max_tokens=16),
        SamplingParams(temperature=0.8, top_p=0.9, repetition_penalty=1.1, seed=7, max_tokens=16),
    ]
    with LLM("smollm2", kv=kv, prefix_cache=False, speculate=False) as llm:
        alone = [llm.chat(chat, ways[i % 2]).token_ids for i, chat in enumerate(chats)]
    with LLM("smollm2", kv=kv) as llm:
        rng = np.random.default_rng(1)
        for _ in range(2):
            streams = {i: llm.stream_chat(chat, ways[i % 2]) for i, chat in enumerate(chats)}
            got: dict[int, list[int]] = {i: [] for i in streams}
            while streams:
                i = int(rng.choice(list(streams)))
                chunk = next(streams[i], None)
                if chunk is None:
                    del streams[i]
                else:
                    got[i] += chunk.token_ids
            assert list(got.values()) == alone
        assert llm.stats().reused_tokens > 0
