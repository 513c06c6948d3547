"""Answers with a structure: their content, and unchanged other answers."""

import json
import re

import pytest
from support.engines.drafting import eager_engine, noisy_model
from support.engines.tiny_engine import run, tiny_engine
from support.models.tiny_directory import JSON_CHARACTERS, tiny_directory

from mlxinfer import LLM, AsyncLLM, Choice, Regex, SamplingParams, Schema
from mlxinfer.cache.kv_format import KVFormat
from mlxinfer.engine.core.schedule import Schedule
from mlxinfer.engine.core.sequence import Sequence
from mlxinfer.errors import EngineError, SamplingError
from mlxinfer.sampling import sample_seed
from mlxinfer.structured_output.constraint import GrammarConstraint
from mlxinfer.structured_output.grammar import GrammarCompiler
from mlxinfer.tokenizer.tokenizer import from_directory

jsonschema = pytest.importorskip("jsonschema")
PERSON = {
    "type": "object",
    "properties": {
        "full_name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "likes": {"type": "array", "items": {"enum": ["tea", "coffee"]}, "maxItems": 2},
    },
    "required": ["full_name", "age", "likes"],
    "additionalProperties": False,
}
ID = {"type": "object", "properties": {"id": {"const": 12345}}, "required": ["id"], "additionalProperties": False}
ITEM = {"anyOf": [{"type": "null"}, ID]}
PROMPTS = ["Who is it? ", "The quick brown fox jumps over the lazy dog, again and again. " * 3, "x"]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny_directory(tmp_path_factory.mktemp("models") / "tiny", characters=JSON_CHARACTERS, context=1024)


@pytest.fixture(scope="module")
def llm(path):
    with LLM(path) as llm:
        yield llm


@pytest.fixture(scope="module")
def grammars(path):
    return GrammarCompiler(from_directory(path), 96)


def held(schema, **params):
    return SamplingParams(**{"temperature": 1.0, "max_tokens": 160, "structure": Schema(schema)} | params)


def check(answers, schema):
    for answer in answers:
        assert answer.finish_reason == "stop"
        jsonschema.validate(json.loads(answer.text), schema)


def test_answers_fit_their_schemas(llm):
    params = [held(schema, seed=seed) for seed in range(6) for schema in (PERSON, ITEM)]
    answers = llm.generate(PROMPTS * 4, params)
    check(answers[::2], PERSON)
    check(answers[1::2], ITEM)


def test_each_is_what_it_is_alone_and_without_drafts(llm, path):
    params = [held(PERSON, seed=1, n=2), SamplingParams(temperature=0.8, seed=2, max_tokens=40), held(ITEM, seed=3, logprobs=2)]
    together = llm.generate(PROMPTS, params)
    alone = [answer for prompt, each in zip(PROMPTS, params, strict=True) for answer in llm.generate(prompt, each)]
    with LLM(path, speculate=False, prefix_cache=False) as plain:
        undrafted = plain.generate(PROMPTS, params)
    assert [a.token_ids for a in together] == [a.token_ids for a in alone] == [a.token_ids for a in undrafted]
    assert all(a.usage.stats.drafted_tokens == 0 for a in undrafted)


def test_free_rows_are_untouched_by_held_ones(llm):
    free = SamplingParams(temperature=0.9, seed=5, max_tokens=60)
    alone = llm.generate("abc", free)[0]
    beside = llm.generate(["abc", *PROMPTS], [free, *[held(PERSON, seed=i) for i in range(3)]])[0]
    assert beside.token_ids == alone.token_ids


@pytest.mark.long
@pytest.mark.parametrize("source", ["said before", "draft model", "hybrid"])
def test_drafts_change_nothing(grammars, source):
    """Forced tokens, what was said before and a draft model: whatever is drafted fits the structure, and the answers are the same."""
    name = "qwen3_next" if source == "hybrid" else "llama"
    pattern = Regex("begin-([0-9]{8}-|word ){8}-and-so-it-goes-on-to-the-very-end")

    def answers(engine):
        (end,) = grammars.tokenizer.eos_token_ids
        sequences = []
        for i in range(3):
            params = SamplingParams(temperature=1.0, seed=i)
            stops, constraint = frozenset([end]), grammars.compile(pattern)
            sequences.append(Sequence([5 + i] * 20, params, sample_seed(i, 0), 200, stops, constraint=constraint))
        return run(engine, sequences), sequences

    plain, _ = answers(tiny_engine(name, max_draft=0))
    drafted, sequences = answers(eager_engine(name, draft=noisy_model(0.3) if source == "draft model" else None))
    assert drafted == plain
    assert all(re.fullmatch(pattern.pattern, grammars.tokenizer.decode(answer[:-1])) for answer in plain)
    assert sum(s.accepted_tokens for s in sequences) > 60


@pytest.mark.parametrize(
    ("architecture", "kv"),
    [
        pytest.param(name, kv, marks=pytest.mark.long if (name == "llama") == (kv == "4") else pytest.mark.slow)
        for name in ("llama", "gemma3_text", "qwen3_next")
        for kv in ("16", "4")
    ],
)
def test_preempted_answers_fit_as_well(grammars, architecture, kv):
    (end,) = grammars.tokenizer.eos_token_ids
    engine = tiny_engine(architecture, KVFormat.parse(kv), max_draft=0)
    schedule, calls = engine.scheduler.schedule, []

    def with_preemptions():
        calls.append(1)
        return Schedule(preempt=[engine.scheduler.running[-1]]) if len(calls) in (15, 60) else schedule()

    engine.scheduler.schedule = with_preemptions
    sequences = []
    for i in range(3):
        constraint, params = grammars.compile(Regex("(word-|verb-){30,34}end")), SamplingParams(temperature=1.0, seed=i)
        sequences.append(Sequence([5 + i] * 10, params, sample_seed(i, 0), 200, frozenset([end]), constraint=constraint))
    run(engine, sequences)
    assert sum(s.preemptions for s in sequences) == 2
    for sequence in sequences:
        assert sequence.finish_reason == "stop"
        assert re.fullmatch("(word-|verb-){30,34}end", grammars.tokenizer.decode(sequence.answer))


def test_length_delivers_what_there_is(llm):
    (answer,) = llm.generate("abc", held(PERSON, max_tokens=5))
    assert (answer.finish_reason, len(answer.token_ids)) == ("length", 5)
    assert answer.text.lstrip().startswith("{")


def test_stop_strings_end_it_earlier(llm):
    (answer,) = llm.generate("abc", held(PERSON, stop=["full"]))
    assert (answer.finish_reason, answer.stop_string) == ("stop", "full")


def test_a_stream_is_the_same(llm):
    params = held(PERSON, seed=9)
    assert "".join(chunk.text for chunk in llm.stream("abc", params)) == llm.generate("abc", params)[0].text


async def _async_answers(path, params):
    async with AsyncLLM(path) as llm:
        whole = await llm.generate("abc", params)
        pieces = [chunk.text async for chunk in llm.stream("abc", params)]
        with pytest.raises(SamplingError, match="cannot be held"):
            await llm.generate("abc", held({"not": {}}))
        return whole[0].text, "".join(pieces)


def test_async_llm_answers_the_same(llm, path):
    import asyncio

    params = held(PERSON, seed=9)
    expected = llm.generate("abc", params)[0].text
    assert asyncio.run(_async_answers(path, params)) == (expected, expected)


def test_what_cannot_be_held_is_refused_before_anything_runs(llm):
    with pytest.raises(SamplingError, match=r"properties\.a: .*uniqueItems"):
        llm.generate("abc", held({"properties": {"a": {"uniqueItems": True}}}))
    with pytest.raises(SamplingError, match="ignore_eos"):
        held(PERSON, ignore_eos=True)
    with pytest.raises(SamplingError, match="structure must be a Schema"):
        SamplingParams(structure={"type": "object"})


def test_a_model_without_an_end_token_is_refused(tmp_path):
    with LLM(tiny_directory(tmp_path / "endless", eos=False)) as llm, pytest.raises(SamplingError, match="no end token"):
        llm.generate("abc", held(PERSON))


def test_a_token_that_the_grammar_refuses_ends_the_request_with_an_error(llm, monkeypatch):
    """The answer ends instead of continuing as free text, and other requests are unaffected."""
    rows = GrammarConstraint.rows
    monkeypatch.setattr(GrammarConstraint, "rows", lambda self, drafts: rows(self, drafts) * 0 - 1)
    with pytest.raises(EngineError, match="does not fit the grammar"):
        llm.generate("abc", held({}, temperature=0, structure=Choice(["yes"])))
    chunks = []
    with pytest.raises(EngineError, match="does not fit the grammar"):
        chunks += llm.stream("abc", held({}, temperature=0, structure=Choice(["yes"])))
    monkeypatch.undo()
    check(llm.generate("abc", held(PERSON, seed=1)), PERSON)


def test_nothing_waits_where_no_row_is_held(path):
    """The step is submitted whole, as without this feature."""
    with LLM(path) as llm:
        calls = []
        runner = llm.engine.runner
        sample = runner.sample
        runner.sample = lambda pending: (calls.append(pending), sample(pending))
        llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=20))
        assert not calls
        del runner.sample


@pytest.mark.model
def test_smollm2_answers_questions_as_json():
    with LLM("smollm2") as llm:
        message = {"role": "user", "content": "What is the capital of France? Answer as JSON."}
        properties = {"capital": {"type": "string", "maxLength": 20}}
        schema = {"type": "object", "properties": properties, "required": ["capital"], "additionalProperties": False}
        answer = llm.chat([message], SamplingParams(temperature=0, structure=Schema(schema)))
        assert json.loads(answer.text) == {"capital": "Paris"}
        params = [held(PERSON, seed=i, n=2) for i in range(3)]
        check(llm.generate(["Describe somebody as JSON: "] * 3, params), PERSON)
