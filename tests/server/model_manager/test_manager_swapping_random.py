"""Random requests for several models under one memory, with disconnecting clients; and many loads and unloads under traffic."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.http.kept_models import ROOM_FOR_ONE, Kept, kept_models, tiny_models
from support.processes.active_memory import active_memory
from support.processes.peak_rss import rss

from mlxinfer.engine.async_llm import AsyncLLM
from mlxinfer.types import SamplingParams

NAMES = "abcde"
TOKENS = 6
ROOM_FOR_TWO = 52_000_000
THREADS = 2
"""Threads that the reused pools may start after the first round."""


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return tiny_models(tmp_path_factory.mktemp("several"), NAMES)


@pytest.fixture(scope="module")
def answers(paths: dict[str, Path]) -> dict[tuple[str, str], str]:
    """Each model's answers alone."""

    async def found() -> dict[tuple[str, str], str]:
        said = {}
        for name, path in paths.items():
            async with AsyncLLM(path, max_context=512, max_num_seqs=4, memory_gb=0.05) as llm:
                for prompt in PROMPTS:
                    (answer,) = await llm.generate([prompt], SamplingParams(max_tokens=TOKENS, temperature=0))
                    said[name, prompt] = answer.text
        return said

    return asyncio.run(found())


PROMPTS = ("Hello", "One two three", "x" * 70)


@pytest.mark.long
@pytest.mark.parametrize(("memory", "seed"), [(ROOM_FOR_ONE, 1), pytest.param(ROOM_FOR_TWO, 2, marks=pytest.mark.slow)])
def test_requests_at_random(paths: dict[str, Path], answers: dict[tuple[str, str], str], memory: int, seed: int) -> None:
    """100 requests, every fifth abandoned: all others are answered by their own model, or get a Retry-After."""
    dice = random.Random(seed)
    jobs = [(dice.choice(NAMES), dice.choice(PROMPTS), number % 5 == 0, dice.uniform(0, 0.05)) for number in range(100)]
    dice.shuffle(jobs)
    with kept_models(paths, memory, dwell_s=0.02) as kept:

        def run(job: tuple[str, str, bool, float]) -> int:
            name, prompt, leaves, patience = job
            if leaves:
                with kept.begin(name, prompt=prompt):
                    time.sleep(patience)
                return 0
            status, headers, answer = kept.ask(name, prompt=prompt, max_tokens=TOKENS)
            assert (status, answer["choices"][0]["text"]) == (200, answers[name, prompt]) if status != 503 else "retry-after" in headers
            return status

        with ThreadPoolExecutor(16) as pool:
            statuses = list(pool.map(run, jobs))
        assert statuses.count(200) >= 75
        kept.until(lambda: all(slot.users == 0 and not slot.waiting for slot in kept.slots.values()))
        check_loads(kept)
        kept.reset()
    assert kept.watch.most_planned <= memory
    weights = 250_000
    assert max(map(abs, kept.watch.left_over)) <= weights // 100


def check_loads(kept: Kept) -> None:
    """Check that each model is unloaded before it is loaded again, and that each load has an answer, unless all its clients
    disconnected."""
    loaded: set[str] = set()
    for what, name in kept.watch.events:
        assert (name in loaded) == (what == "back"), kept.watch.events
        (loaded.add if what == "open" else loaded.discard)(name)
    for name, slot in kept.slots.items():
        assert slot.loads == kept.watch.opened[name]
        assert slot.loads - slot.unloads == (name in loaded)


@dataclass
class Trace:
    """Resources of the process while only the busy model is loaded."""

    memory: int
    files: int
    threads: int

    @classmethod
    def now(cls) -> Trace:
        gc.collect()
        folder = Path("/proc/self/fd")
        return cls(rss(), len(list(folder.iterdir())) if folder.exists() else 0, threading.active_count())


def cycles(paths: dict[str, Path], rounds: int, count: int) -> tuple[list[Trace], Kept]:
    """Load and unload two models alternating while a third is busy. Returns the resources after each round of `count` times."""
    found: list[Trace] = []
    with kept_models({name: paths[name] for name in "abc"}, ROOM_FOR_TWO, pinned="c") as kept:
        for _ in range(rounds):
            with ThreadPoolExecutor(1) as pool:
                over = threading.Event()
                busy = pool.submit(traffic, kept, over)
                try:
                    kept.until(lambda: kept.slots["c"].state == "ready")
                    for number in range(count):
                        assert kept.ask("ab"[number % 2], "/api/generate", **LAST_ANSWER)[0] == 200
                finally:
                    over.set()
                assert busy.result()
            kept.until(lambda: all(kept.slots[name].state == "listed" for name in "ab"))
            kept.until(lambda: not kept.live.server.server_state.connections)
            found.append(Trace.now())
        assert kept.slots["a"].unloads + kept.slots["b"].unloads == rounds * count
        assert kept.slots["c"].loads == 1
    return found, kept


LAST_ANSWER: dict[str, Any] = {"prompt": "Hello", "stream": False, "keep_alive": 0, "options": {"num_predict": 2}}


def traffic(kept: Kept, over: threading.Event) -> int:
    """Send requests to the third model repeatedly; returns their number."""
    count = 0
    while not over.is_set():
        assert kept.ask("c", max_tokens=20)[0] == 200
        count += 1
    return count


@pytest.mark.long
def test_models_come_and_go_without_a_trace(paths: dict[str, Path]) -> None:
    gc.collect()
    before = active_memory()
    found, kept = cycles(paths, 3, 4)
    assert len({each.files for each in found[1:]}) == 1, found
    assert max(each.threads for each in found) - found[0].threads <= THREADS, found
    assert abs(active_memory() - before) < 2500
    assert kept.watch.most_planned <= ROOM_FOR_TWO


@pytest.mark.slow
def test_five_hundred_times(paths: dict[str, Path]) -> None:
    found, _ = cycles(paths, 10, 50)
    assert {each.files for each in found[1:]} == {found[1].files}, found
    assert max(each.threads for each in found) - found[0].threads <= THREADS, found
    assert found[-1].memory - found[1].memory < 0.02 * found[1].memory, found
