"""Two servers behind the real SMG router: conversations stay on the server that has their prefix, and a stopping worker loses no answer."""

from __future__ import annotations

import json
import random
import runpy
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from threading import Lock

import pytest
from support.http.ports import free_port

pytest.importorskip("smg")
EXAMPLE = runpy.run_path(str(Path(__file__).parents[3] / "examples/router/two_workers.py"))
wait_for, worker, router = EXAMPLE["wait_for"], EXAMPLE["worker"], EXAMPLE["router"]
CONVERSATIONS, TURNS, FEW = 12, 9, 5
pytestmark = pytest.mark.long


def chat(port, messages, *, leave=False, max_tokens=8):
    """Status and answer. With `leave`, only the first piece of a stream is read."""
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        body = {"model": "tiny", "messages": messages, "max_tokens": max_tokens, "temperature": 0, "stream": leave}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if leave and answer.status == 200:
            answer.read(20)
            return answer.status, None
        text = answer.read()
        return answer.status, json.loads(text) if text.startswith(b"{") else text
    finally:
        connection.close()


def words(chance, length):
    return "".join(chance.choice("abcdefgh ") for _ in range(length))


def converse(port, *, leaving=0.0, between=lambda done: None, system=300, count=CONVERSATIONS, turns=TURNS):
    """Run many conversations at once, with their turns in random order. Each has its own system prompt of `system` tokens. Returns
    counts of statuses, prompt tokens and cached tokens."""
    chance, found, lock = random.Random(1), Counter(), Lock()
    talks = [[{"role": "system", "content": words(chance, system)}] for _ in range(count)]
    locks = [Lock() for _ in talks]
    order = [number for number in range(count) for _ in range(turns)]
    chance.shuffle(order)

    def turn(number):
        with locks[number]:
            talk = talks[number]
            with lock:
                question, leave = words(chance, 60), chance.random() < leaving
            talk.append({"role": "user", "content": question})
            try:
                status, answer = chat(port, talk, leave=leave, max_tokens=200 if leave else 8)
            except (OSError, HTTPException):
                status, answer = 0, None
            if status == 200 and answer is not None:
                talk.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"] or "-"})
            else:
                talk.pop()
        with lock:
            found["left" if leave else status] += 1
            if status == 200 and answer is not None:
                found["prompt"] += answer["usage"]["prompt_tokens"]
                found["cached"] += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            elif status != 200:
                assert answer, status  # an error is text
        between(sum(count for status, count in found.items() if not isinstance(status, str) or status == "left"))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(turn, order))
    return found


@contextmanager
def routed(path, policy, count=2, options=()):
    """The router's port, the workers' ports and their processes. `options` are the workers' options."""
    base = free_port(10)
    ports = list(range(base + 1, base + 1 + count))
    running = [worker(f"tiny={path}", port, *options) for port in ports]
    try:
        for process, port in zip(running, ports, strict=True):
            wait_for(process, port)
        running.append(router(base, ports, policy))
        deadline = time.monotonic() + 60
        while chat_status(base) != 200:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        yield base, ports, running
    finally:
        for process in running:
            process.kill()
        for process in running:
            process.wait()


def until_all_are_ready(port):
    """Wait until the router counts every worker as healthy."""
    deadline = time.monotonic() + 60
    while True:
        connection = HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request("GET", "/workers")
        found = json.loads(connection.getresponse().read())["workers"]
        connection.close()
        if all(each["is_healthy"] for each in found):
            return
        assert time.monotonic() < deadline
        time.sleep(0.1)


def chat_status(port):
    try:
        return chat(port, [{"role": "user", "content": "a"}], max_tokens=1)[0]
    except (OSError, HTTPException):
        return 0


def test_conversations_stay_where_they_are_cached(tiny_path, capfd):
    found = {}
    with routed(tiny_path, "cache_aware") as (port, ports, _):
        found["alone"] = converse(ports[0], turns=FEW)
        found["cache_aware"] = converse(port, turns=FEW)
    with routed(tiny_path, "round_robin") as (port, _, _):
        found["round_robin"] = converse(port, turns=FEW)
    capfd.readouterr()
    assert all(counts[200] == CONVERSATIONS * FEW for counts in found.values())
    assert found["cache_aware"]["cached"] >= 0.9 * found["alone"]["cached"]
    read = {name: counts["prompt"] - counts["cached"] for name, counts in found.items()}
    assert read["cache_aware"] < 0.7 * read["round_robin"]


HALF = ("--memory", "0.054", "--max-num-seqs", "4")
"""A worker can cache 20,800 tokens besides those of running requests. Twenty conversations have 37,200 tokens in the middle of a run and
50,400 at its end: a worker has memory for half of them."""


@pytest.mark.slow  # three minutes; tests/scenarios/test_two_caches.py shows the same without a router
def test_with_room_for_half_of_the_conversations_it_matters_most(tiny_path, capfd):
    """If each worker can cache all conversations, the first worker that reads a prompt has it for ever, and alternating loses little."""
    found, run = {}, {"system": 1200, "count": 20, "turns": 15}
    for policy in ("cache_aware", "round_robin"):
        with routed(tiny_path, policy, options=HALF) as (port, _, _):
            found[policy] = converse(port, **run)
    with routed(tiny_path, "cache_aware") as (_, ports, _):
        found["alone"] = converse(ports[0], **run)  # with memory for all conversations
    capfd.readouterr()
    assert all(counts[200] == 300 for counts in found.values())
    assert found["cache_aware"]["cached"] >= 0.9 * found["alone"]["cached"]  # 0.98, measured
    assert found["cache_aware"]["cached"] >= 1.5 * found["round_robin"]["cached"]  # 1.73, measured


def test_workers_that_go_cost_nobody_an_answer(tiny_path, capfd):
    """One worker is killed and started again, then the other is drained; some clients disconnect. Only requests on the killed worker get
    an error."""
    with routed(tiny_path, "cache_aware") as (port, ports, running):
        waiting, one_at_a_time = [20, 40, 70], Lock()

        def accident(done):
            with one_at_a_time:
                while waiting and done >= waiting[0]:
                    stage = waiting.pop(0)
                    if stage == 20:
                        running[0].kill()
                        running[0].wait()
                    elif stage == 40:
                        running.append(worker(f"tiny={tiny_path}", ports[0]))
                        wait_for(running[-1], ports[0])
                        until_all_are_ready(port)
                    else:
                        running[1].terminate()

        found = converse(port, leaving=0.1, between=accident)
    capfd.readouterr()
    capfd.readouterr()
    answered = found[200] + found["left"]
    assert answered >= CONVERSATIONS * TURNS - 10
    assert running[1].returncode is not None


def test_the_example_is_one_command(tiny_path, tmp_path):
    path, port = Path(__file__).parents[3] / "examples/router/two_workers.py", free_port(10)
    command = [sys.executable, str(path), f"tiny={tiny_path}", "--port", str(port)]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    assert process.stdout is not None
    try:
        assert any(line.startswith(f"ready: http://127.0.0.1:{port}/v1") for line in process.stdout)
        while chat_status(port) == 503:
            time.sleep(0.1)
        status, answer = chat(port, [{"role": "user", "content": "a"}])
        assert (status, answer["usage"]["completion_tokens"]) == (200, 8)
    finally:
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.wait(60) == 0
