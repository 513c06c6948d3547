"""Keywords, properties and errors that `LLM` and `AsyncLLM` share."""

from __future__ import annotations

import asyncio
import inspect
import subprocess
import sys
from dataclasses import MISSING, replace
from pathlib import Path

import numpy as np
import pytest
from support.models.tiny_directory import tiny_directory

from mlxinfer import LLM, AsyncLLM, MLXInferError, SamplingParams
from mlxinfer.config import CHAT_TEMPERATURE, OLDER_NAMES, EngineArgs, chat_params, default_params, settings, settings_table
from mlxinfer.engine.request_keywords import ChatKeywords, ChatRequestKeywords, GenerateKeywords, RequestKeywords, RequestOptions
from mlxinfer.engine.text.input_processor import InputProcessor
from mlxinfer.errors import PromptError, SamplingError, SettingError, UnknownKeywordError
from mlxinfer.util.environment import environment_table

GREEDY = SamplingParams(temperature=0, max_tokens=6)
HELLO = [{"role": "user", "content": "hi"}]
DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_directory(tmp_path_factory.mktemp("model"), eos=False)


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(folder) as llm:
        yield llm


@pytest.mark.parametrize("door", [LLM, AsyncLLM])
def test_the_keywords_are_the_settings(door):
    keywords = inspect.signature(door).parameters
    expected = {one.name: inspect.Parameter.empty if one.default is MISSING else one.default for one, _ in settings()}
    assert {name: each.default for name, each in keywords.items() if name != "progress"} == expected
    assert {name: each.annotation for name, each in keywords.items() if name != "progress"} == {one.name: one.type for one, _ in settings()}
    for one, how in settings():
        assert f"{one.name}: {how.meaning}" in door.__init__.__doc__


def _public(door: type) -> dict[str, object]:
    return {name: getattr(door, name) for name in dir(door) if not name.startswith("_")}


def test_both_doors_have_the_same_members():
    sync, other = _public(LLM), _public(AsyncLLM)
    assert set(sync) - set(other) == {"engine"}
    of_servers = {"prepare_structures", "ready", "end", "hand_out", "embedding_ids", "counted_relevance"}
    assert set(other) - set(sync) == of_servers | {"spare_expert_bytes", "shrink_experts"}
    for name in set(sync) & set(other):
        assert isinstance(sync[name], property) == isinstance(other[name], property), name
        if not isinstance(sync[name], property):
            assert list(inspect.signature(sync[name]).parameters) == list(inspect.signature(other[name]).parameters), name
        assert inspect.getdoc(sync[name]), name
        assert inspect.getdoc(other[name]), name


def test_the_keywords_of_requests_are_the_options():
    options = inspect.signature(RequestOptions).parameters
    assert list(RequestKeywords.__annotations__) == list(options)
    for name, kind in RequestKeywords.__annotations__.items():
        assert options[name].annotation == getattr(kind, "__forward_arg__", kind)


def test_the_tables_in_the_documentation_are_the_lists():
    page = (DOCS / "settings.md").read_text(encoding="utf-8")
    assert settings_table() in page
    assert environment_table() in page


@pytest.mark.parametrize("door", [LLM, AsyncLLM])
@pytest.mark.parametrize(("wrong", "near"), [("bit", "bits"), ("max_seqs", "max_num_seqs"), ("memory", "memory_gb")])
def test_an_unknown_keyword_is_told_with_the_nearest(folder, door, wrong, near):
    with pytest.raises(UnknownKeywordError, match=rf"{door.__name__} has no keyword '{wrong}': did you mean {near}\?") as caught:
        door(folder, **{wrong: 4})
    assert isinstance(caught.value, TypeError)
    assert isinstance(caught.value, MLXInferError)


def test_older_names_are_accepted(folder):
    with LLM(folder, max_sequences=3) as llm:
        assert llm.engine.config.max_num_seqs == 3
    with pytest.raises(UnknownKeywordError):
        LLM(folder, max_sequences=3, max_num_seqs=3)
    assert set(OLDER_NAMES.values()) <= {one.name for one, _ in settings()}


def test_every_setting_reaches_the_engine(folder):
    given = {"max_num_seqs": 3, "max_waiting": 5, "decode_share": 0.5, "max_step_s": 0.25, "prefix_cache": False, "deterministic": True}
    with LLM(folder, **given, speculate=False, max_context=64) as llm:
        config = llm.engine.config
        assert {name: getattr(config, name) for name in given} == given
        assert (config.ngrams, config.max_draft, config.max_context) == (False, 0, 64)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs must be a whole number of at least 1 sequences, not 0"),
        ({"decode_share": 2}, "decode_share must be a number above 0 and at most 1, not 2"),
        ({"memory_gb": True}, "memory_gb must be a number above 0"),
        ({"speculate": "no"}, "speculate must be true or false, not 'no'"),
        ({"max_step_s": None}, "max_step_s must be a number"),
        ({"bits": 2.5}, "bits must be a whole number"),
    ],
)
def test_a_value_without_a_meaning_is_told(wrong, message):
    with pytest.raises(SettingError, match=message):
        EngineArgs("model", **wrong)


def test_sampling_fields_are_keywords_of_requests():
    kinds, fields = GenerateKeywords.__annotations__, inspect.signature(SamplingParams).parameters
    assert set(kinds) == set(fields) | set(RequestKeywords.__annotations__)
    for name in set(fields) - {"adapter"}:
        assert fields[name].annotation == getattr(kinds[name], "__forward_arg__", kinds[name]), name


def test_the_keywords_of_chats_are_those_of_a_chat_prompt():
    taken = inspect.signature(InputProcessor.chat).parameters
    assert ["self", "messages", *ChatKeywords.__annotations__] == list(taken)
    assert set(ChatRequestKeywords.__annotations__) == set(ChatKeywords.__annotations__) | set(GenerateKeywords.__annotations__)
    for name, kind in ChatKeywords.__annotations__.items():
        assert taken[name].annotation == getattr(kind, "__forward_arg__", kind), name
        assert f"{name}: " in (LLM.chat.__doc__ or "")


def test_a_sampling_keyword_wins_over_params(llm):
    params = SamplingParams(temperature=0, max_tokens=7)
    expected = llm.generate("hi", replace(params, max_tokens=3))[0].token_ids
    for given in (llm.generate("hi", max_tokens=3), llm.generate("hi", params, max_tokens=3), llm.generate(["hi"], [params], max_tokens=3)):
        assert given[0].token_ids == expected
    assert len(llm.generate("hi", params, timeout_s=60)[0].token_ids) == 7
    assert sum(len(chunk.token_ids) for chunk in llm.stream("hi", params, max_tokens=3, ignore_eos=True)) == 3
    assert llm.chat(HELLO, max_tokens=3).usage.completion_tokens <= 3
    with pytest.raises(SamplingError, match="max_tokens must be from 1"):
        llm.generate("hi", max_tokens=0)
    with pytest.raises(SamplingError, match="params must be SamplingParams"):
        llm.generate("hi", {"temperature": 0}, max_tokens=3)


def test_a_text_alone_is_the_users_message(llm):
    expected = llm.chat([{"role": "user", "content": "hi"}], max_tokens=5)
    assert llm.chat("hi", max_tokens=5).token_ids == expected.token_ids
    assert "".join(map(str, llm.stream_chat("hi", max_tokens=5))) == expected.text == str(expected)
    assert llm.chat_prompt("hi").token_ids == llm.chat_prompt([{"role": "user", "content": "hi"}]).token_ids


def test_the_other_door_takes_the_same(folder):
    async def ask() -> tuple[int, int, str]:
        async with AsyncLLM(folder) as llm:
            answers = await llm.generate("hi", SamplingParams(max_tokens=9, ignore_eos=True), max_tokens=3)
            pieces = [chunk async for chunk in llm.stream_chat("hi", max_tokens=4, ignore_eos=True)]
            return len(answers[0].token_ids), sum(len(piece.token_ids) for piece in pieces), str(await llm.chat("hi", max_tokens=4))

    assert asyncio.run(ask())[:2] == (3, 4)


def test_keywords_that_mean_nothing_are_told(llm):
    for ask in (llm.score, llm.logits):
        with pytest.raises(UnknownKeywordError, match="no token is sampled here"):
            ask("hi", max_tokens=3)
    with pytest.raises(UnknownKeywordError, match=r"template_vars=\{'enable_thinking': False\}"):
        llm.chat(HELLO, enable_thinking=False)
    with pytest.raises(UnknownKeywordError, match="did you mean timeout_s"):
        llm.generate("hi", timeout=3)


def test_template_variables_reach_the_template(llm):
    seen = {}
    encode = llm.tokenizer.encode_chat

    def spy(messages, **variables):
        seen.update(variables)
        return encode(messages, tools=variables.pop("tools"), **variables)

    llm.tokenizer.encode_chat = spy
    try:
        llm.chat(HELLO, GREEDY, template_vars={"enable_thinking": False})
    finally:
        del llm.tokenizer.encode_chat
    assert seen["enable_thinking"] is False


def test_params_of_another_kind_are_told_the_right_call(llm):
    with pytest.raises(SamplingError, match=r"params must be SamplingParams\(temperature=0\), not a dict"):
        llm.generate("hi", {"temperature": 0})
    with pytest.raises(SamplingError, match="2 params for 1 prompts"):
        llm.generate("hi", [GREEDY, GREEDY])
    with pytest.raises(SamplingError, match="not a list"):
        llm.stream("hi", [GREEDY])


def test_each_prompt_may_have_its_params(llm):
    long = SamplingParams(temperature=0, max_tokens=9)
    assert [len(c.token_ids) for c in llm.generate(["abc", "xyz"], [GREEDY, long])] == [6, 9]

    async def use(door):
        async with AsyncLLM(door) as other:
            return [len(c.token_ids) for c in await other.generate(["abc", "xyz"], [GREEDY, long])]

    assert asyncio.run(use(llm.loaded.path)) == [6, 9]


def test_arrays_are_prompts(llm):
    ids = llm.tokenizer.encode("hello there")
    expected = llm.generate(ids, GREEDY)[0].token_ids
    for prompt in (np.array(ids), np.array([ids]), [np.array(ids)], list(np.array(ids)), tuple(ids)):
        assert llm.generate(prompt, GREEDY)[0].token_ids == expected
    assert llm.chat(HELLO, GREEDY).text == "".join(chunk.text for chunk in llm.stream_chat(tuple(HELLO), GREEDY))


@pytest.mark.parametrize("prompt", [None, 5, [None], {"a": 1}, np.array([1.5])])
def test_what_is_no_prompt_is_told(llm, prompt):
    with pytest.raises(PromptError):
        llm.generate(prompt, GREEDY)


def test_text_parts_are_joined_and_others_refused(llm):
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    assert llm.chat([{"role": "user", "content": parts}], GREEDY).token_ids == llm.chat(HELLO, GREEDY).token_ids
    with pytest.raises(PromptError, match=r"messages\[0\].content\[1\]: the model cannot see images: it is a text model"):
        llm.chat([{"role": "user", "content": [parts[0], {"type": "image_url", "image_url": {"url": "data:,"}}]}])
    for wrong in (HELLO[0], ["hi"]):
        with pytest.raises(PromptError, match="role"):
            llm.chat(wrong)


def test_a_stream_may_have_several_answers(llm):
    params = SamplingParams(temperature=1.5, seed=3, n=3, max_tokens=9)
    texts = ["", "", ""]
    for chunk in llm.stream("abc", params):
        texts[chunk.index] += chunk.text
    assert texts == [completion.text for completion in llm.generate("abc", params)]


def test_scores_and_logits_are_the_same_at_both_doors(llm):
    ids = [(i * 7) % 90 + 3 for i in range(150)]

    async def use():
        async with AsyncLLM(llm.loaded.path) as other:
            return await asyncio.gather(other.score(ids, 2), other.logits(ids), other.score(ids, 2))

    scores, logits, _ = asyncio.run(use())
    assert scores == llm.score(ids, 2)
    assert np.array_equal(np.array(logits), np.array(llm.logits(ids)))
    assert len(scores) == 149


def test_unset_fields_are_what_the_authors_recommend(llm):
    assert llm.default_params == SamplingParams(temperature=0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0, stop_on_loop=False)
    inputs = llm._client.opened.inputs
    assert inputs.params(SamplingParams(max_tokens=30)).temperature == 0
    assert inputs.params(None) is llm.default_params
    recommended = default_params({"do_sample": True, "temperature": 0.6, "top_p": 0.95})
    resolved = SamplingParams(top_p=0.5, max_tokens=3).resolved(recommended)
    assert (resolved.temperature, resolved.top_p, resolved.top_k, resolved.max_tokens) == (0.6, 0.5, 0, 3)
    assert resolved.resolved() is resolved
    assert SamplingParams().resolved().temperature == 1
    assert llm.generate("abc", SamplingParams(max_tokens=6))[0].token_ids == llm.generate("abc", GREEDY)[0].token_ids


def test_a_conversation_samples_where_the_authors_recommend_nothing() -> None:
    silent, advised = default_params({}), default_params({"do_sample": True, "temperature": 0.6, "top_k": 20})
    assert silent.greedy, "Python and the API keep their documented default"
    assert chat_params(silent).temperature == CHAT_TEMPERATURE > 0
    assert chat_params(silent).top_p == silent.top_p
    assert chat_params(advised) == replace(advised, stop_on_loop=True)


def test_what_only_some_need_is_not_imported_at_the_start():
    """Every process waits for its imports; these take long, and a plain answer on a CPU needs none of them."""
    late = {
        "importlib.metadata",
        "llguidance",
        "jinja2",
        "transformers",
        "asyncio",
        "mlxinfer.cache.attention.metal",
        "mlxinfer.engine.text.reranking",
    }
    script = f"import sys; from mlxinfer import LLM; print(*{late} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.split() == []
