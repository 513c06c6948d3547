"""`AsyncLLM`: many tasks at once, cancelled tasks, closed loops and ended interpreters."""

from __future__ import annotations

import asyncio
import gc
import signal
import subprocess
import sys
import threading
from contextlib import aclosing
from pathlib import Path

import pytest
from support.models.tiny_directory import tiny_directory

from mlxinfer import LLM, AsyncLLM, MLXInferError, SamplingParams
from mlxinfer.engine.core.engine import Engine
from mlxinfer.errors import EngineError, ModelNotFoundError, PromptError, SamplingError

GREEDY = SamplingParams(temperature=0, max_tokens=12)
LONG = SamplingParams(temperature=0, max_tokens=200)
PROMPT = "The quick brown fox"
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny_directory(tmp_path_factory.mktemp("model"), eos=False)


@pytest.fixture(scope="module")
def alone(folder):
    with LLM(folder) as llm:
        yield llm


def run(folder: Path, use, **settings):
    """The result of `use(llm)` in a loop of its own."""

    async def main():
        async with AsyncLLM(folder, **settings) as llm:
            return await use(llm)

    return asyncio.run(asyncio.wait_for(main(), 60))


async def text_of(chunks) -> str:
    return "".join([chunk.text async for chunk in chunks])


async def settled(llm: AsyncLLM):
    """Stats after everything that was sent to the engine before."""
    await llm.generate("z", SamplingParams(max_tokens=1))
    return llm.stats()


def test_answers_are_those_of_the_other_front_door(folder, alone):
    async def use(llm):
        chunks = [chunk async for chunk in llm.stream(PROMPT, GREEDY)]
        seeded = SamplingParams(temperature=1.0, max_tokens=8, n=3, seed=5)
        return chunks, await llm.generate([PROMPT, "abc"], seeded), await llm.chat(MESSAGES, GREEDY), llm.name, llm.max_context

    chunks, samples, turn, name, context = run(folder, use)
    assert "".join(chunk.text for chunk in chunks) == alone.generate(PROMPT, GREEDY)[0].text
    assert [chunk.finish_reason for chunk in chunks] == [None] * 11 + ["length"]
    assert chunks[-1].usage.completion_tokens == 12
    expected = alone.generate([PROMPT, "abc"], SamplingParams(temperature=1.0, max_tokens=8, n=3, seed=5))
    assert [(s.index, s.token_ids) for s in samples] == [(s.index, s.token_ids) for s in expected]
    assert turn.text == alone.chat(MESSAGES, GREEDY).text
    assert (name, context) == (alone.name, alone.max_context)


def test_many_streams_at_once_are_each_as_alone(folder, alone):
    prompts = [[5 + (7 * i + j) % 80 for j in range(1 + 13 * i % 70)] for i in range(40)]

    async def use(llm):
        return await asyncio.gather(*[text_of(llm.stream(prompt, GREEDY)) for prompt in prompts])

    assert run(folder, use) == [alone.generate(prompt, GREEDY)[0].text for prompt in prompts]


def test_one_call_may_have_more_prompts_than_can_wait(folder, alone):
    prompts = [[5 + i % 80] for i in range(300)]
    few = SamplingParams(temperature=0, max_tokens=2)
    answers = run(folder, lambda llm: llm.generate(prompts, few), max_sequences=2)
    assert [a.token_ids for a in answers] == [a.token_ids for a in alone.generate(prompts, few)]


def test_a_cancelled_task_cancels_its_request(folder):
    async def use(llm):
        task = asyncio.ensure_future(text_of(llm.stream(PROMPT, LONG)))
        whole = asyncio.ensure_future(llm.generate(PROMPT, LONG))
        await anext_of(llm.stream("abc", LONG))
        for cancelled in (task, whole):
            cancelled.cancel()
            cancelled.cancel()
            with pytest.raises(asyncio.CancelledError):
                await cancelled
        return await settled(llm)

    stats = run(folder, use)
    assert (stats.running, stats.waiting, stats.pages_used, stats.restarts) == (0, 0, 0, 0)
    assert stats.completion_tokens < 600


async def anext_of(stream):
    async with aclosing(stream) as chunks:
        return await chunks.__anext__()


def test_a_closed_stream_ends_and_others_go_on(folder, alone):
    async def use(llm):
        other = asyncio.ensure_future(text_of(llm.stream("abc", GREEDY)))
        stream = llm.stream(PROMPT, LONG)
        await stream.__anext__()
        await stream.aclose()
        await stream.aclose()
        with pytest.raises(StopAsyncIteration):
            await stream.__anext__()
        return await other, await settled(llm)

    text, stats = run(folder, use)
    assert text == alone.generate("abc", GREEDY)[0].text
    assert stats.running == stats.pages_used == 0


def test_a_slow_reader_holds_nobody_up(folder, alone):
    async def use(llm):
        slow = llm.stream(PROMPT, LONG)
        first = await slow.__anext__()
        await llm.generate([PROMPT, "abc"], LONG)
        return first.text + await text_of(slow)

    assert run(folder, use) == alone.generate(PROMPT, LONG)[0].text


def test_loops_of_several_threads_may_ask(folder, alone):
    llm, found = AsyncLLM(folder), {}

    async def ask(prompt):
        await llm.ready()
        found[prompt] = await text_of(llm.stream(prompt, GREEDY))

    threads = [threading.Thread(target=lambda p=p: asyncio.run(ask(p))) for p in ("abc", "xyz", PROMPT)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    asyncio.run(llm.close())
    assert found == {p: alone.generate(p, GREEDY)[0].text for p in ("abc", "xyz", PROMPT)}


def test_a_loop_that_is_gone_takes_its_requests_along(folder):
    llm = AsyncLLM(folder)

    async def leave():
        await llm.ready()
        stream = llm.stream(PROMPT, LONG)
        await stream.__anext__()
        return stream  # asyncio.run closes the loop

    asyncio.run(leave())
    stats = asyncio.run(settled(llm))
    asyncio.run(llm.close())
    assert (stats.running, stats.pages_used, stats.restarts) == (0, 0, 0)


def test_a_stream_of_several_answers_has_those_of_generate(folder):
    params = SamplingParams(temperature=1.5, seed=3, n=3, max_tokens=9)

    async def main():
        async with AsyncLLM(folder) as llm:
            texts, ends = ["", "", ""], []
            async for chunk in llm.stream(PROMPT, params):
                texts[chunk.index] += chunk.text
                ends += [chunk.index] if chunk.finish_reason else []
            assert texts == [completion.text for completion in await llm.generate(PROMPT, params)]
            assert sorted(ends) == [0, 1, 2]

    asyncio.run(main())


def test_nothing_is_known_before_the_model_is_loaded(folder):
    llm = AsyncLLM(folder)
    if not llm._thread.opened.done():
        with pytest.raises(MLXInferError, match="ready"):
            _ = llm.tokenizer
    asyncio.run(llm.close())


def test_a_model_that_cannot_be_loaded_says_why_to_everybody(tmp_path):
    async def main():
        llm = AsyncLLM(tmp_path / "nothing")
        with pytest.raises(ModelNotFoundError):
            await llm.ready()
        with pytest.raises(MLXInferError, match="nothing"):
            await llm.generate("abc")
        await llm.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("ask", "error"),
    [
        (lambda llm: llm.generate("", GREEDY), PromptError),
        (lambda llm: llm.generate([PROMPT, [-1]], GREEDY), PromptError),
        (lambda llm: text_of(llm.stream("a" * 5000, GREEDY)), PromptError),
        (lambda llm: llm.generate(PROMPT, GREEDY, timeout_s=0), SamplingError),
        (lambda llm: llm.generate(PROMPT, GREEDY, priority=0.5), SamplingError),
        (lambda llm: llm.generate(PROMPT, GREEDY, client_id=7), SamplingError),
    ],
)
def test_bad_requests_are_refused_and_others_never_notice(folder, alone, ask, error):
    async def use(llm):
        other = asyncio.ensure_future(text_of(llm.stream(PROMPT, GREEDY)))
        with pytest.raises(error) as caught:
            await ask(llm)
        assert "\n" not in str(caught.value)
        return await other, llm.stats().restarts

    assert run(folder, use) == (alone.generate(PROMPT, GREEDY)[0].text, 0)


def test_a_failure_ends_what_runs_and_the_engine_starts_again_once(folder, alone, monkeypatch, caplog):
    failures, step = [], Engine.step

    def failing(engine):
        if failures:
            raise RuntimeError(failures.pop())
        return step(engine)

    monkeypatch.setattr(Engine, "step", failing)
    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)

    async def use(llm):
        for message in ("[malloc] no memory", "again"):
            asked = [asyncio.ensure_future(text_of(llm.stream(PROMPT, LONG))) for _ in range(20)]
            await anext_of(llm.stream("abc", LONG))
            failures.append(message)
            for result in await asyncio.gather(*asked, return_exceptions=True):
                assert isinstance(result, EngineError)
                assert "RuntimeError" in str(result)
            if message != "again":
                assert await text_of(llm.stream(PROMPT, GREEDY)) == alone.generate(PROMPT, GREEDY)[0].text
                assert llm.stats().restarts == 1
                assert llm.stats().requests >= 1
        for _ in range(2):
            with pytest.raises(EngineError, match="again after a restart: RuntimeError: again"):
                await llm.generate(PROMPT, GREEDY)
        assert llm.stats().running == llm.stats().waiting == 0

    run(folder, use)
    assert "no memory" in caplog.text


def test_closing_ends_what_runs_and_refuses_what_comes(folder):
    async def main():
        llm = AsyncLLM(folder)
        await llm.ready()
        stream = llm.stream(PROMPT, LONG)
        await stream.__anext__()
        await llm.close()
        await llm.close()
        with pytest.raises(EngineError, match="closed"):
            await text_of(stream)
        with pytest.raises(EngineError, match="closed"):
            await llm.generate(PROMPT)
        assert llm._thread.ended.done()

    asyncio.run(main())


def test_nobody_left_to_ask_ends_the_thread(folder):
    llm = AsyncLLM(folder)
    asyncio.run(llm.ready())
    ended = llm._thread.ended
    del llm
    gc.collect()
    ended.result(30)


_PROGRAM = """
import asyncio, sys
from mlxinfer import AsyncLLM, SamplingParams

async def main(how):
    llm = AsyncLLM(sys.argv[1])
    kept.append(llm)
    if how == "loading":
        return
    await llm.ready()
    if how == "idle":
        return
    async for chunk in llm.stream("The quick", SamplingParams(temperature=0, max_tokens=200)):
        if how == "fail":
            raise SystemExit(7)
        if how == "interrupt":
            print("running", flush=True)
            await asyncio.sleep(60)
        return

kept = []
asyncio.run(main(sys.argv[2]))
"""


@pytest.mark.long
@pytest.mark.parametrize(("how", "code"), [("loading", 0), ("idle", 0), ("busy", 0), ("fail", 7), ("interrupt", -signal.SIGINT)])
def test_the_interpreter_ends_without_being_asked_to_close(folder, how, code):
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, str(folder), how], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    if how == "interrupt":
        assert process.stdout.readline()
        process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code, errors
    assert "Fatal" not in errors
    assert "terminate" not in errors
