"""`LLM` with a tiny model directory."""

import mlx.core as mx
import numpy as np
import pytest
from support.engines.tiny_engine import GOLDEN, greedy
from support.models.tiny_directory import tiny_directory

from mlxinfer import LLM, MLXInferError, SamplingParams
from mlxinfer.errors import PromptError, TemplateError, UnsupportedModelError

GREEDY = SamplingParams(temperature=0, max_tokens=12)
PROMPT = "The quick brown fox"


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    return LLM(tiny_directory(tmp_path_factory.mktemp("model"), eos=False), dtype="float32")


def test_text_and_ids_are_the_same_prompt(llm):
    ids = llm.tokenizer.encode(PROMPT)
    by_text, by_ids = llm.generate([PROMPT, ids], GREEDY)

    assert by_text.token_ids == by_ids.token_ids == greedy(ids, 12)
    assert by_text.text == llm.tokenizer.decode(by_text.token_ids)
    assert by_text.finish_reason == "length"
    assert (by_text.usage.prompt_tokens, by_text.usage.completion_tokens) == (len(ids), 12)
    assert by_text.usage.ttft_s > 0 < by_text.usage.decode_tps


def test_one_list_of_ids_is_one_prompt(llm):
    ids = llm.tokenizer.encode(PROMPT)
    assert [c.token_ids for c in llm.generate(ids, GREEDY)] == [greedy(ids, 12)]
    assert llm.generate(np.array(ids).tolist(), GREEDY)[0].token_ids == greedy(ids, 12)
    assert llm.generate([np.array(ids)], GREEDY)[0].token_ids == greedy(ids, 12)


@pytest.mark.smoke
def test_a_stream_is_the_answer_in_pieces(llm):
    whole = llm.generate(PROMPT, GREEDY)[0]
    chunks = list(llm.stream(PROMPT, GREEDY))
    assert "".join(c.text for c in chunks) == whole.text
    assert [t for c in chunks for t in c.token_ids] == whole.token_ids
    assert [c.finish_reason for c in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert chunks[-1].usage.completion_tokens == 12


def test_two_streams_may_take_turns(llm):
    first, second = llm.stream("abc", GREEDY), llm.stream("xyz", GREEDY)
    texts = ["", ""]
    for _ in range(12):
        texts[0] += next(first).text
        texts[1] += next(second).text
    assert texts == [c.text for c in llm.generate(["abc", "xyz"], GREEDY)]


def test_closing_a_stream_frees_its_place(llm):
    stream = llm.stream(PROMPT, SamplingParams(temperature=0, max_tokens=100))
    next(stream)
    stream.close()
    while not llm.engine.idle:
        llm.engine.step()
    assert not llm._client.outputs.answers
    groups = llm.engine.cache.pool.groups
    assert all(g.allocator.free == g.allocator.capacity for g in groups)


def test_stop_strings_may_span_tokens_and_are_not_shown(llm):
    whole = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=40))[0]
    stop = whole.text[7:10]
    first = whole.text.index(stop)
    stopped = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=40, stop=["never ever", stop]))[0]
    assert stopped.text == whole.text[:first]
    assert stopped.finish_reason == "stop"
    assert len(stopped.token_ids) == first + 3
    assert (stopped.stop_string, whole.stop_string) == (stop, None)
    streamed = list(llm.stream(PROMPT, SamplingParams(temperature=0, max_tokens=40, stop=stop)))
    assert "".join(c.text for c in streamed) == whole.text[:first]
    assert [c.stop_string for c in streamed if c.finish_reason] == [stop]


def test_text_held_back_for_a_stop_string_comes_out_at_the_end(llm):
    whole = llm.generate(PROMPT, GREEDY)[0]
    held = SamplingParams(temperature=0, max_tokens=12, stop=whole.text[-3:] + "Z")
    assert llm.generate(PROMPT, held)[0].text == whole.text


def test_end_tokens_end_unless_ignored(tmp_path):
    llm = LLM(tiny_directory(tmp_path))
    ids = llm.tokenizer.encode(PROMPT)
    bias = {2: 100.0}
    ended = llm.generate(ids, SamplingParams(temperature=0, max_tokens=9, logit_bias=bias))[0]
    assert (ended.token_ids, ended.text, ended.finish_reason) == ([2], "", "stop")
    ignored = llm.generate(ids, SamplingParams(temperature=0, max_tokens=9, logit_bias=bias, ignore_eos=True))[0]
    assert (ignored.token_ids, ignored.text, ignored.finish_reason) == ([2] * 9, "", "length")


def test_samples_differ_by_index_and_repeat_by_seed(llm):
    params = SamplingParams(temperature=1.0, max_tokens=8, n=3, seed=5)
    first, again = llm.generate([PROMPT, "abc"], params), llm.generate([PROMPT, "abc"], params)
    assert [c.token_ids for c in first] == [c.token_ids for c in again]
    assert [c.index for c in first] == [0, 1, 2, 0, 1, 2]
    assert len({tuple(c.token_ids) for c in first[:3]}) == 3
    unseeded = SamplingParams(temperature=1.0, max_tokens=8)
    assert len({tuple(llm.generate(PROMPT, unseeded)[0].token_ids) for _ in range(4)}) > 1


def test_logprobs_agree_with_logits(llm):
    answer = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=6, logprobs=2))[0]
    ids = llm.tokenizer.encode(PROMPT) + answer.token_ids
    logits = np.array(llm.logits(ids), dtype=np.float64)[-7:-1]
    exact = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    for row, entry in zip(exact, answer.logprobs, strict=True):
        assert entry.logprob == pytest.approx(row[entry.token_id], abs=1e-4)
        assert [t for t, _, _ in entry.top] == np.argsort(-row)[:2].tolist()
        assert entry.text == llm.tokenizer.decode([entry.token_id])


def test_logits_are_float32_for_every_token(llm):
    reference = np.load(GOLDEN / "llama" / "reference.npz")
    logits = llm.logits(reference["ids"].tolist())
    assert (logits.dtype, logits.shape) == (mx.float32, reference["logits"].shape)
    assert np.abs(np.array(logits) - reference["logits"]).max() < 2e-3


@pytest.mark.smoke
def test_chat_is_the_rendered_template(llm):
    messages = [{"role": "user", "content": "hi"}]
    prompt = llm.tokenizer.encode("[user]hi\n[assistant]", add_special_tokens=False)
    assert llm.chat(messages, GREEDY).token_ids == greedy(prompt, 12)
    assert "".join(c.text for c in llm.stream_chat(messages, GREEDY)) == llm.chat(messages, GREEDY).text


def test_a_model_without_a_template_says_so(tmp_path):
    with pytest.raises(TemplateError, match="template"):
        LLM(tiny_directory(tmp_path, chat=False)).chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "empty"),
        ([[]], "empty"),
        ([[3, 96]], "96"),
        ([[-1]], "-1"),
        ([[1.5]], "1.5"),
        ([[True]], "True"),
        ([[3] * 256], "256"),
        ("a" * 999, "999"),
    ],
)
def test_bad_prompts_are_refused_in_one_line(llm, prompt, message):
    with pytest.raises(PromptError, match=message) as caught:
        llm.generate(prompt, GREEDY)
    assert "\n" not in str(caught.value)
    assert llm.engine.idle


def test_one_bad_prompt_of_many_leaves_nothing_running(llm):
    with pytest.raises(PromptError):
        llm.generate([PROMPT, ""], GREEDY)
    assert llm.engine.idle or not llm.engine.scheduler.waiting
    assert llm.generate(PROMPT, GREEDY)[0].finish_reason == "length"


def test_the_context_ends_an_answer(tmp_path):
    llm = LLM(tiny_directory(tmp_path, eos=False), max_context=30)
    answer = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=None))[0]
    assert answer.usage.total_tokens == 30
    assert answer.finish_reason == "length"


@pytest.mark.parametrize("size", [0, 100_000])
def test_a_context_the_model_does_not_have_is_refused(tmp_path, size):
    with pytest.raises(MLXInferError, match="context"):
        LLM(tiny_directory(tmp_path), max_context=size)


@pytest.mark.parametrize("kv", ["7", "k8", "", "q4_0"])
def test_a_cache_format_that_does_not_exist_is_refused(tmp_path, kv):
    with pytest.raises(UnsupportedModelError, match="16, 8, 6, 5, 4, 3 or 2"):
        LLM(tmp_path, kv=kv)


def test_a_quantized_cache_says_so_and_a_batch_is_what_each_is_alone(tmp_path):
    folder = tiny_directory(tmp_path)
    prompts = [[5 + (7 * i + j) % 80 for j in range(length)] for i, length in enumerate((150, 70, 3))]
    with LLM(folder, kv="k8v4", kv_first16=True) as llm:
        assert any("kv k8v4" in note for note in llm.notes)
        alone = [llm.generate(prompt, GREEDY)[0].token_ids for prompt in prompts]
        assert [answer.token_ids for answer in llm.generate(prompts, GREEDY)] == alone
    with LLM(folder) as llm:
        assert not any("kv" in note for note in llm.notes)


def test_closed_means_closed(tmp_path):
    with LLM(tiny_directory(tmp_path)) as llm:
        stream = llm.stream(PROMPT, GREEDY)
        next(stream)
    with pytest.raises(MLXInferError, match="closed"):
        llm.generate(PROMPT)
    llm.close()


def test_an_interrupted_stream_leaves_the_model_usable(llm, monkeypatch):
    expected = llm.generate(PROMPT, GREEDY)[0].token_ids
    stream = llm.stream(PROMPT, GREEDY)
    next(stream)
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "_collect", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            next(stream)
    assert llm.generate(PROMPT, GREEDY)[0].token_ids == expected
