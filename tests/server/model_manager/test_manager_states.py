"""Loading and unloading by clients: Ollama's, OpenAI's and Anthropic's libraries, llama.cpp's paths, LM Studio's field."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import pytest
from support.http.kept_models import ROOM_FOR_ONE, Kept, kept_models, read_all, tiny_models
from support.http.live_server import openai_client
from support.processes.optional import needs

from mlxinfer.errors import CheckpointError
from mlxinfer.server.settings import Limits

if TYPE_CHECKING:
    from ollama import Client
    from openai import OpenAI

httpx, ollama, openai = needs("httpx"), needs("ollama"), needs("openai")

MESSAGES: Any = [{"role": "user", "content": "Hello"}]
SHORT = {"num_predict": 3}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kept]:
    paths = tiny_models(tmp_path_factory.mktemp("several"), "abc")
    with kept_models(paths, most_waiting=3, aliases={"other": "b", "gpt-*": "a"}, limits=Limits(request_s=3)) as kept:
        yield kept


@pytest.fixture
def kept(server: Kept) -> Kept:
    server.reset()
    return server


@pytest.fixture
def llama(kept: Kept) -> Iterator[Client]:
    with ollama.Client(kept.live.url, transport=httpx.HTTPTransport(uds=str(kept.live.path), verify=False), timeout=60) as client:
        yield client


@pytest.fixture
def client(kept: Kept) -> Iterator[OpenAI]:
    with openai_client(kept.live, unix=True) as client:
        yield client


def left(llama: Client) -> float:
    """Seconds until the only loaded model is unloaded."""
    (model,) = llama.ps().models
    assert model.expires_at is not None
    return (model.expires_at - datetime.now(timezone.utc)).total_seconds()


def test_an_empty_prompt_loads_and_keep_alive_0_unloads(kept: Kept, llama: Client) -> None:
    assert llama.ps().models == []
    assert llama.generate(model="a").done_reason == "load"
    assert [model.model for model in llama.ps().models] == ["a:latest"]
    used, limit = llama.ps().models[0].size, kept.slots["a"].planned
    weights = kept.slots["a"].llm.plan.weights
    assert weights <= used < limit <= ROOM_FOR_ONE, "what is in use, not what may be"
    assert kept.slots["a"].in_use == used
    assert llama.chat(model="a", keep_alive=0).done_reason == "unload"
    kept.until(lambda: kept.slots["a"].state == "listed")
    assert llama.ps().models == []


@pytest.mark.parametrize(("keep_alive", "seconds"), [("10m", 600), (300, 300), ("1h30m", 5400), ("90s", 90)])
def test_keep_alive(llama: Client, keep_alive: Any, seconds: float) -> None:
    answer = llama.chat(model="a", messages=MESSAGES, options=SHORT, keep_alive=keep_alive)
    assert answer.done
    assert answer.load_duration
    assert seconds - 30 < left(llama) <= seconds


def test_a_request_starts_the_time_anew_and_leaves_it_as_it_was(kept: Kept, llama: Client) -> None:
    assert llama.chat(model="a", messages=MESSAGES, options=SHORT, keep_alive="10m").done
    kept.until(lambda: kept.slots["a"].idle)  # an answer is complete a moment before the server releases the model
    first = kept.slots["a"].idle_until
    assert llama.chat(model="a", messages=MESSAGES, options=SHORT).done
    kept.until(lambda: kept.slots["a"].idle)
    assert kept.slots["a"].idle_until > first
    assert 570 < left(llama) <= 600
    assert llama.generate(model="a", keep_alive=-1).done_reason == "load"
    assert left(llama) > 1e9


def test_an_idle_model_is_unloaded_when_its_time_is_over(kept: Kept, llama: Client) -> None:
    assert llama.generate(model="a", keep_alive=0.05).done_reason == "load"
    kept.until(lambda: kept.slots["a"].state == "listed")
    assert llama.generate(model="a", prompt="Hello", options=SHORT, keep_alive=0).done_reason == "length"
    kept.until(lambda: kept.slots["a"].state == "listed")
    assert kept.slots["a"].keep_alive_s > 1e9


def test_an_unload_waits_for_the_answer(kept: Kept) -> None:
    streaming = kept.begin("a")
    kept.until_busy("a")
    assert kept.ask("a", "/models/unload")[2] == {"success": True}
    assert kept.slots["a"].state == "ready"
    assert read_all(streaming).strip().endswith("[DONE]")
    kept.until(lambda: kept.slots["a"].state == "listed")


def test_what_is_listed_is_not_loaded(kept: Kept, llama: Client, client: OpenAI) -> None:
    names = ["a:latest", "b:latest", "c:latest", "other:latest"]
    assert [model.model for model in llama.list().models] == names
    shown = llama.show("b")
    assert (shown.details and shown.details.family, shown.capabilities) == ("qwen2", ["completion", "tools"])
    assert shown.template
    assert [model.id for model in client.models.list()] == ["a", "b", "c", "other"]
    assert client.models.retrieve("other").id == "b"
    assert kept.watch.events == []
    alone = llama.show("b").model_dump()
    assert llama.generate(model="b").done_reason == "load"
    assert llama.show("b").model_dump() == alone


def test_states(kept: Kept, client: OpenAI) -> None:
    def value(name: str) -> str:
        return next(model["status"]["value"] for model in kept.get("/models")["data"] if model["id"] == name)

    gate = kept.watch.gates["a"] = threading.Event()
    assert value("a") == "unloaded"
    assert kept.ask("a", "/models/load")[2] == {"success": True}
    kept.until(lambda: kept.slots["a"].state == "loading")
    assert (value("a"), kept.get("/health")["states"]) == ("loading", {"a": "loading", "b": "listed", "c": "listed"})
    gate.set()
    kept.until(lambda: kept.slots["a"].state == "ready")
    assert value("a") == "loaded"
    answer = client.chat.completions.create(model="a", messages=MESSAGES, max_tokens=3, extra_body={"ttl": 600})
    assert answer.usage
    assert 599 < kept.slots["a"].keep_alive_s <= 600
    metrics = kept.live.exchange(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n", unix=True)[2].decode()
    assert 'mlxinfer_model_loaded{model_name="a"} 1.0' in metrics
    assert f"mlxinfer_models_limit_bytes {float(ROOM_FOR_ONE)}" in metrics.replace("3e+07", "30000000.0")


@pytest.mark.long
def test_every_dialect_loads(kept: Kept, llama: Client, client: OpenAI) -> None:
    anthropic, httpx2 = needs("anthropic"), needs("httpx2")
    transport = httpx2.HTTPTransport(uds=str(kept.live.path), verify=False)
    with anthropic.Anthropic(base_url=kept.live.url, api_key="none", http_client=httpx2.Client(transport=transport)) as claude:
        assert claude.messages.create(model="a", max_tokens=3, messages=MESSAGES).usage.output_tokens == 3
        assert claude.messages.count_tokens(model="b", messages=MESSAGES).input_tokens > 0
    assert client.responses.create(model="c", input="Hello", max_output_tokens=3).usage
    assert client.completions.create(model="other", prompt="Hello", max_tokens=3).model == "b"
    assert [chunk.done for chunk in llama.chat(model="gpt-4", messages=MESSAGES, options=SHORT, stream=True)][-1]
    assert [name for what, name in kept.watch.events if what == "open"] == ["a", "b", "c", "b", "a"]


def test_a_model_that_cannot_be_loaded(kept: Kept, client: OpenAI) -> None:
    kept.watch.faults["a"] = CheckpointError("/secret/place/model.safetensors: the header is cut off")
    with pytest.raises(openai.InternalServerError) as found:
        client.completions.create(model="a", prompt="Hello")
    said = "The model 'a' could not be loaded: model.safetensors: the header is cut off"
    assert (found.value.status_code, found.value.body["message"], found.value.body["code"]) == (503, said, "model_not_loaded")
    assert 1 <= int(found.value.response.headers["retry-after"]) <= 5
    kept.watch.faults.clear()
    assert kept.ask("a")[0] == 503  # still in its back-off
    assert kept.watch.events == [("open", "a")]
    status = kept.get("/v1/models/a")["status"]
    assert status == {"value": "unloaded", "failed": True, "reason": "model.safetensors: the header is cut off"}
    assert kept.ask("a", "/models/load")[0] == 503
    assert kept.ask("b")[0] == 200
    kept.ask("a", "/models/unload")
    assert kept.ask("a")[0] == 200


def test_the_back_off_grows(kept: Kept) -> None:
    slot = kept.slots["a"]
    kept.watch.faults["a"] = CheckpointError("cut off")
    waits = []
    for _ in range(3):
        if slot.failure is not None:
            slot.failure.retry_at = 0.0
        waits.append(int(kept.ask("a")[1]["retry-after"]))
    kept.watch.faults.clear()
    assert slot.failure is not None
    slot.failure.retry_at = 0.0
    assert kept.ask("a")[0] == 200
    assert (waits, kept.watch.opened["a"]) == ([5, 10, 20], 4)


def test_only_so_many_may_wait(kept: Kept) -> None:
    gate = kept.watch.gates["a"] = threading.Event()
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(kept.ask, "a") for _ in range(3)]
        kept.until(lambda: len(kept.slots["a"].waiting) == 3)
        status, headers, answer = kept.ask("a")
        assert (status, answer["error"]["code"], headers["retry-after"]) == (503, "too_many_waiting", "5")
        gate.set()
        assert [each.result()[0] for each in waiting] == [200] * 3


@pytest.mark.long
def test_waiting_for_a_model_counts_as_time_of_the_request(kept: Kept) -> None:
    gate = kept.watch.gates["a"] = threading.Event()
    began = time.monotonic()
    status, _, answer = kept.ask("a")
    assert (status, answer["error"]["code"]) == (408, "timeout")
    assert 2.9 < time.monotonic() - began < 25  # the gate would open after 30
    gate.set()


@pytest.mark.parametrize("name", ["../a", "/etc/passwd", "a/../b", "A", "http://a", "", "a\x00"])
@pytest.mark.parametrize("path", ["/models/load", "/models/unload", "/v1/completions"])
def test_over_http_there_are_only_names(kept: Kept, name: str, path: str) -> None:
    status, _, answer = kept.ask(name, path)
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
    assert kept.watch.events == []


def test_an_answer_says_how_long_loading_took(kept: Kept) -> None:
    answer = kept.ask("a", "/api/generate", prompt="Hello", stream=False, options=SHORT)[2]
    again = kept.ask("a", "/api/generate", prompt="Hello", stream=False, options=SHORT)[2]
    assert answer["load_duration"] > again["load_duration"] == 0
    assert answer["total_duration"] >= answer["eval_duration"]
    assert json.dumps(answer["context"]) == json.dumps(again["context"])
