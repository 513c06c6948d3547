"""Many schemas at once, combined with samples, drafts, reuse, a quantized cache and preemption."""

import json
import re
from itertools import islice, zip_longest
from time import process_time

import pytest
from support.models.tiny_directory import JSON_CHARACTERS, tiny_directory

from mlxinfer import LLM, SamplingParams, Schema
from mlxinfer.engine.core.schedule import Schedule
from mlxinfer.errors import SamplingError
from mlxinfer.structured_output.grammar import GrammarCompiler

jsonschema = pytest.importorskip("jsonschema")
corpus = pytest.importorskip("support.schemas.corpus").corpus
BATCH = 16
"""Answers at once: two each of half as many schemas."""
PARTS = 28
"""Batches of 8 schemas each, of which about one in nine cannot be held: together they answer 200."""
MOST_TOKENS = 96
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
    """Number of answers that ended normally; each fits its schema."""
    ended = 0
    for answer, schema in zip(answers, [schema for schema in schemas for _ in range(2)], strict=True):
        assert answer.finish_reason in ("stop", "length")
        assert not re.search(r"\s{65,}", answer.text)
        assert len(answer.logprobs) == len(answer.token_ids)
        if answer.finish_reason == "stop":
            ended += 1
            jsonschema.validate(json.loads(answer.text), schema)
    return ended


@pytest.mark.long
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


@pytest.fixture(scope="module")
def smollm2():
    """Two engines with 4-bit pages, of which the second answers requests alone and without drafts; and the steps of the first."""
    with LLM("smollm2", max_context=2048, memory_gb=1, kv="4") as llm:
        calls = preempting(llm.engine)
        with LLM("smollm2", max_context=2048, memory_gb=1, kv="4", speculate=False) as alone:
            yield llm, calls, alone


def differences(found, alone):
    """Differences from the same request alone: (answer, position, both tokens)."""
    return [
        (number, *next((at, *pair) for at, pair in enumerate(zip_longest(one, other)) if pair[0] != pair[1]))
        for number, (one, other) in enumerate(zip(found, alone, strict=True))
        if one != other
    ]


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("part", range(PARTS))
def test_smollm2_answers_two_hundred_of_them(part, smollm2, capsys):
    """Whatever ends by itself fits; and each answer is, token for token, what it is alone and without drafts."""
    llm, calls, single = smollm2
    cases = list(islice(corpus(PARTS * BATCH // 2, seed=7), part * BATCH // 2, (part + 1) * BATCH // 2))
    before, begin = len(calls), process_time()
    prompts, params, schemas = requests(compiler_of(llm), cases, max_tokens=MOST_TOKENS)
    answers = llm.generate(prompts, params)
    middle = process_time()
    ended = check(answers, schemas)
    alone = [answer.token_ids for prompt, each in zip(prompts, params, strict=True) for answer in single.generate(prompt, each)]
    different = differences([answer.token_ids for answer in answers], alone)
    stats, spent = [answer.usage.stats for answer in answers], process_time() - middle
    tokens, accepted = sum(len(answer.token_ids) for answer in answers), sum(each.accepted_tokens for each in stats)
    preempted, reused = sum(each.preemptions for each in stats), sum(each.reused_tokens for each in stats)
    with capsys.disabled():
        print(  # noqa: T201
            f"part {part}: {len(schemas)} schemas, ended {ended} of {len(answers)}, tokens {tokens}, drafted {accepted}, preempted "
            f"{preempted}, reused {reused}, differ from alone {different}; processor {middle - begin:.1f} s and {spent:.1f} s alone"
        )
    assert len(calls) - before > EVERY
    assert preempted > 0
    assert not different
