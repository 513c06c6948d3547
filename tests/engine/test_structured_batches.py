"""Many different schemas at once, with everything on that could get in their way: samples, drafts, reuse, a quantized cache, preemption."""

import json
import re
from itertools import islice

import pytest
from support.tiny_directory import JSON_CHARACTERS, tiny_directory

from mlxinfer import LLM, SamplingParams, Schema
from mlxinfer.engine.scheduler import Schedule
from mlxinfer.errors import SamplingError
from mlxinfer.structured_output.grammar import GrammarCompiler

jsonschema = pytest.importorskip("jsonschema")
corpus = pytest.importorskip("support.schema_corpus").corpus
BATCH = 16
EVERY = 25
"""Steps after which a sequence is preempted."""


def compiler_of(llm):
    return GrammarCompiler(llm.tokenizer, llm.engine.model.vocab_size)


def preempting(engine, every=EVERY):
    """Have the last of several running sequences preempted every few steps; counts how often."""
    schedule, calls = engine.scheduler.schedule, []

    def with_preemptions():
        calls.append(1)
        running = engine.scheduler.running
        return Schedule(preempt=[running[-1]]) if len(calls) % every == 0 and len(running) > 1 else schedule()

    engine.scheduler.schedule = with_preemptions
    return calls


def requests(compiler, cases, max_tokens):
    """Prompts with a common beginning, and what their answers are held to; those that cannot be held are left out."""
    prompts, params, schemas = [], [], []
    for number, case in enumerate(cases):
        try:
            compiler.compile(Schema(case.schema))
        except SamplingError:
            continue
        prompts.append("Write one JSON object that fits the schema, and nothing else. " + json.dumps(case.schema)[:300] + "\n")
        params.append(SamplingParams(temperature=1.0, seed=number, n=2, logprobs=2, max_tokens=max_tokens, structure=Schema(case.schema)))
        schemas.append(case.schema)
    return prompts, params, schemas


def check(answers, schemas):
    """How many answers ended by themselves. Each of those fits its schema."""
    ended = 0
    for answer, schema in zip(answers, [schema for schema in schemas for _ in range(2)], strict=True):
        assert answer.finish_reason in ("stop", "length")
        assert not re.search(r"\s{65,}", answer.text)
        assert len(answer.logprobs) == len(answer.token_ids)
        if answer.finish_reason == "stop":
            ended += 1
            jsonschema.validate(json.loads(answer.text), schema)
    return ended


def test_a_batch_of_them(tmp_path):
    path = tiny_directory(tmp_path / "tiny", characters=JSON_CHARACTERS, context=2048)
    with LLM(path, kv="4") as llm:
        calls = preempting(llm.engine)
        prompts, params, schemas = requests(compiler_of(llm), corpus(10, seed=3), max_tokens=120)
        answers = llm.generate(prompts, params)
        assert check(answers, schemas) > 2
        assert len(calls) > EVERY
        assert sum(answer.usage.stats.preemptions for answer in answers) > 0


def test_each_is_what_it_is_alone_where_that_is_promised(tmp_path):
    path = tiny_directory(tmp_path / "tiny", characters=JSON_CHARACTERS, context=1024)
    with LLM(path, kv="4", deterministic=True) as llm:
        prompts, params, _ = requests(compiler_of(llm), corpus(4, seed=4), max_tokens=40)
        alone = [answer.token_ids for prompt, each in zip(prompts, params, strict=True) for answer in llm.generate(prompt, each)]
        preempting(llm.engine, 10)
        assert [answer.token_ids for answer in llm.generate(prompts, params)] == alone


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("batch", range(13))
def test_smollm2_answers_two_hundred_of_them(batch):
    with LLM("smollm2", kv="4") as llm:
        calls = preempting(llm.engine)
        cases = islice(corpus(230, seed=7), batch * BATCH, (batch + 1) * BATCH)
        prompts, params, schemas = requests(compiler_of(llm), cases, max_tokens=96)
        answers = llm.generate(prompts, params)
        ended = check(answers, schemas)
        drafted = sum(answer.usage.stats.accepted_tokens for answer in answers)
        tokens = sum(len(answer.token_ids) for answer in answers)
        print(f"schemas {len(schemas)} answers {len(answers)} ended {ended} tokens {tokens} accepted drafts {drafted} steps {len(calls)}")  # noqa: T201
        assert ended > 0
        assert drafted > 0


@pytest.mark.slow
@pytest.mark.model
def test_smollm2_says_the_same_alone():
    with LLM("smollm2", kv="4", deterministic=True) as llm:
        prompts, params, _ = requests(compiler_of(llm), corpus(9, seed=8), max_tokens=48)
        alone = [answer.token_ids for prompt, each in zip(prompts, params, strict=True) for answer in llm.generate(prompt, each)]
        preempting(llm.engine)
        assert [answer.token_ids for answer in llm.generate(prompts, params)] == alone
