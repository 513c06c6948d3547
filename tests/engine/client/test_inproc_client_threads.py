"""`LLM` in several threads at once, after Ctrl-C, and in a forked child."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mlx.core as mx
import pytest
from support.engines.tiny_engine import UNMEASURED
from support.models.tiny_directory import tiny_directory

from mlxinfer import LLM, MLXInferError, SamplingParams
from mlxinfer.engine.client.inproc_client import FairLock
from mlxinfer.errors import EngineError

GREEDY = SamplingParams(temperature=0, max_tokens=12)
LONG = SamplingParams(temperature=0, max_tokens=200)
AT_ONCE = {**UNMEASURED, "speculate": False}
"""Settings with which prompts are read at once, and answers take a step for each token, however busy the machine is."""
SEEDED = SamplingParams(temperature=1.0, seed=3, max_tokens=12, repetition_penalty=1.2, top_k=20)
PROMPT = "The quick brown fox"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_directory(tmp_path_factory.mktemp("model"), eos=False)


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, str]:
    with LLM(folder) as llm:
        return {prompt: llm.generate(prompt, GREEDY)[0].text for prompt in ("abc", "xyz", PROMPT, "hello")}


def in_a_thread(work):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def test_loaded_in_a_pool_and_used_in_main(folder, expected):
    with in_a_thread(lambda: LLM(folder)) as llm:
        assert llm.generate(PROMPT, GREEDY)[0].text == expected[PROMPT]


@pytest.mark.parametrize("kv", ["16", "4"])
def test_first_used_in_a_thread_that_ends(folder, kv):
    with LLM(folder, kv=kv) as llm:
        first = in_a_thread(lambda: llm.generate([PROMPT, "abc"], SEEDED))
        again = llm.generate([PROMPT, "abc"], SEEDED)
        third = in_a_thread(lambda: llm.generate([PROMPT, "abc"], SEEDED))
    assert [c.text for c in first] == [c.text for c in again] == [c.text for c in third]


def test_to_thread_and_then_main(folder, expected):
    with LLM(folder) as llm:
        assert asyncio.run(asyncio.to_thread(llm.generate, PROMPT, GREEDY))[0].text == expected[PROMPT]
        assert llm.generate(PROMPT, GREEDY)[0].text == expected[PROMPT]


def test_a_stream_may_change_threads(folder, expected):
    with LLM(folder) as llm:
        stream = llm.stream(PROMPT, GREEDY)
        text = next(stream).text + in_a_thread(lambda: next(stream).text + next(stream).text)
        assert text + "".join(chunk.text for chunk in stream) == expected[PROMPT]


def test_four_threads_at_once(folder, expected):
    with LLM(folder) as llm, ThreadPoolExecutor(4) as pool:
        prompts = list(expected) * 3
        assert [c[0].text for c in pool.map(lambda p: llm.generate(p, GREEDY), prompts)] == [expected[p] for p in prompts]
        texts = pool.map(lambda p: "".join(chunk.text for chunk in llm.stream(p, GREEDY)), prompts)
        assert list(texts) == [expected[p] for p in prompts]
        stats = llm.stats()
        assert (stats.running, stats.waiting, stats.pages_used) == (0, 0, 0)


def test_threads_run_together_and_none_waits_for_the_end_of_another(folder):
    with LLM(folder, **AT_ONCE) as llm:
        long = llm.stream(PROMPT, LONG)
        next(long)
        done = threading.Event()
        other = threading.Thread(target=lambda: (llm.generate("abc", GREEDY), done.set()))
        other.start()
        while not done.is_set():
            next(long)  # fails if the other one is served only after this answer
        other.join()
        long.close()


def test_logits_and_scores_belong_to_whoever_asked(folder):
    with LLM(folder) as llm:
        ids = llm.tokenizer.encode(PROMPT)
        main = llm.logits(ids)
        other = in_a_thread(lambda: llm.logits(ids))
        assert mx.allclose(main + 0, other + 0).item()
        assert in_a_thread(lambda: llm.score(PROMPT)) == llm.score(PROMPT)


def test_a_fault_in_one_thread_ends_the_others_requests_and_no_more(folder, expected, monkeypatch):
    with LLM(folder, **AT_ONCE) as llm:
        broken, other = llm.stream(PROMPT, LONG), llm.stream("abc", LONG)
        next(broken)
        next(other)
        with monkeypatch.context() as patch:
            patch.setattr(llm.engine, "_collect", lambda *_: 1 // 0)
            with pytest.raises(ZeroDivisionError):
                list(broken)
        with pytest.raises(EngineError, match="ZeroDivisionError"):
            list(other)
        assert llm.generate(PROMPT, GREEDY)[0].text == expected[PROMPT]


def test_closing_while_others_ask(folder):
    llm = LLM(folder)
    started, found = threading.Event(), []

    def ask() -> None:
        try:
            for _ in range(1000):
                llm.generate(PROMPT, GREEDY)
                started.set()
        except MLXInferError as error:
            found.append(error)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    started.wait(30)
    llm.close()
    for thread in threads:
        thread.join(30)
    assert [str(error) for error in found] == ["this LLM is closed: create a new one"] * 3
    assert llm.ended
    assert llm.name


_INTERRUPTED = """
import os, signal, sys, threading
from mlxinfer import LLM, SamplingParams

llm = LLM(sys.argv[1])
steps = 0
step = llm.engine.step

def counted():
    global steps
    steps += 1
    if steps == 5:
        os.kill(os.getpid(), signal.SIGINT)
    return step()

llm.engine.step = counted
try:
    llm.generate("The quick", SamplingParams(temperature=0, max_tokens=200))
except KeyboardInterrupt:
    print("interrupted after", steps)
print(llm.stats().running, len(llm.generate("The quick", SamplingParams(temperature=0, max_tokens=20))[0].token_ids))
thread = threading.Thread(target=lambda: print(len(llm.generate("The", SamplingParams(temperature=0, max_tokens=20))[0].token_ids)))
thread.start()
thread.join()
"""


def test_ctrl_c_in_main_cancels_within_a_step(folder):
    done = subprocess.run([sys.executable, "-c", _INTERRUPTED, str(folder)], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.splitlines() == ["interrupted after 5", "0 20", "20"], done.stderr


_WAITING = """
import os, signal, sys, threading
from mlxinfer import LLM, SamplingParams

llm = LLM(sys.argv[1])
lock = llm._client._lock
inside, leave = threading.Event(), threading.Event()

def hold():
    with lock:
        inside.set()
        leave.wait()

thread = threading.Thread(target=hold)
thread.start()
inside.wait()
threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGINT]).start()
try:
    llm.generate("The quick", SamplingParams(temperature=0, max_tokens=200))
except KeyboardInterrupt:
    print("interrupted")
leave.set()
thread.join()
print(len(llm.generate("The quick", SamplingParams(temperature=0, max_tokens=20))[0].token_ids))
"""


def test_ctrl_c_ends_the_wait_for_a_turn(folder):
    done = subprocess.run([sys.executable, "-c", _WAITING, str(folder)], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.splitlines() == ["interrupted", "20"], done.stderr


def test_turns_are_given_in_the_order_of_arrival():
    lock, order = FairLock(), []

    def take(name: int) -> None:
        with lock:
            order.append(name)

    with lock:
        threads = []
        for name in range(5):
            threads.append(threading.Thread(target=take, args=(name,)))
            threads[-1].start()
            while len(lock._waiting) <= name:
                pass
        assert not lock.try_acquire()
    for thread in threads:
        thread.join()
    assert order == [0, 1, 2, 3, 4]
    assert lock.try_acquire()
    lock.release_if_mine()


_FORKED = """
import asyncio, os, sys
from mlxinfer import LLM, AsyncLLM, SamplingParams
from mlxinfer.errors import EngineError

few = SamplingParams(temperature=0, max_tokens=3)
path = sys.argv[1]
llm, other = LLM(path), AsyncLLM(path)
llm.generate("The quick", few)
asyncio.run(other.generate("The quick", few))
child = os.fork()
if not child:
    for ask in (
        lambda: llm.generate("The", few),
        lambda: list(llm.stream("The", few)),
        lambda: llm.stats(),
        lambda: asyncio.run(other.generate("The", few)),
        lambda: asyncio.run(other.ready()),
        lambda: LLM(path),
        lambda: AsyncLLM(path),
    ):
        try:
            ask()
        except EngineError as error:
            assert "fork" in str(error) and "spawn" in str(error)
        else:
            os._exit(3)
    llm.close()
    asyncio.run(other.close())
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), len(llm.generate("The", few)[0].token_ids))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_is_told_so(folder):
    done = subprocess.run([sys.executable, "-c", _FORKED, str(folder)], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == ["0", "3"], done.stderr
