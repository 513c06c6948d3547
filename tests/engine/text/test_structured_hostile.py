"""Hostile structures delay only their own senders."""

import asyncio
import threading
import time
from itertools import islice

import pytest
from support.hostile.grammars import hostile
from support.models.tiny_directory import JSON_CHARACTERS, tiny_directory

from mlxinfer import AsyncLLM, SamplingParams
from mlxinfer.engine.core.engine import Engine
from mlxinfer.errors import SamplingError
from mlxinfer.structured_output.grammar import GrammarCompiler


async def hostile_requests(llm, count):
    """Number of served requests."""

    async def one(make):
        try:
            await llm.generate("abc", SamplingParams(temperature=1.0, seed=1, max_tokens=4, structure=make()))
        except SamplingError:
            return 0
        return 1

    # Choices have letters that the tiny vocabulary cannot spell.
    makers = [make for name, make in hostile(2 * count, seed=3) if name != "choice"]
    return sum(await asyncio.gather(*[one(make) for make in islice(makers, count)]))


async def gaps(llm, tokens, company):
    """Seconds between the pieces of a stream, in the company of so many hostile requests."""
    found, last = [], None
    others = asyncio.ensure_future(hostile_requests(llm, company))
    async for _ in llm.stream("abc", SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)):
        now = time.perf_counter()
        found += [] if last is None else [now - last]
        last = now
    return sorted(found), await others


@pytest.fixture
def threads(monkeypatch):
    """Threads in which the engine has stepped, and those in which structures were compiled."""
    stepped, compiled = set(), set()

    def noted(owner, name, threads):
        real = getattr(owner, name)

        def call(*args, **settings):
            threads.add(threading.get_ident())
            return real(*args, **settings)

        monkeypatch.setattr(owner, name, call)

    noted(Engine, "step", stepped)
    noted(GrammarCompiler, "compile", compiled)
    return stepped, compiled


@pytest.mark.parametrize("longest", [pytest.param(None, marks=pytest.mark.long), pytest.param(0.5, marks=pytest.mark.slow)])
def test_a_stream_goes_on_beside_twenty_hostile_requests(tmp_path, threads, longest):
    """Neither the thread that computes nor the one that serves compiles them; how long a gap is depends on the machine as well."""

    async def main():
        path = tiny_directory(tmp_path / "tiny", characters=JSON_CHARACTERS, context=2048)
        async with AsyncLLM(path) as llm:
            await gaps(llm, 20, 1)
            return await gaps(llm, 400, 0), await gaps(llm, 400, 20)

    (alone, _), (beside, served) = asyncio.run(main())
    assert 0 < served < 20
    print(f"longest gap {1000 * alone[-1]:.1f} ms alone, {1000 * beside[-1]:.1f} ms in company; median {1000 * beside[200]:.2f} ms")  # noqa: T201
    stepped, compiled = threads
    assert stepped
    assert compiled
    assert not compiled & {*stepped, threading.get_ident()}
    assert longest is None or beside[-1] < longest
