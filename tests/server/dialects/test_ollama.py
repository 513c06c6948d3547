"""Ollama's own client against a live server: chat, generate, and lists of models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import TypeAdapter
from support.http.live_server import LiveServer
from support.processes.optional import needs

from mlxinfer.server.ollama.generate import ChatReply, GenerateReply
from mlxinfer.server.ollama.models import OllamaVersion, RunningModels, ShowReply, Tags

if TYPE_CHECKING:
    from ollama import Client

httpx = needs("httpx")
ollama = needs("ollama")

MESSAGES: Any = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hello"}]
GREEDY = {"temperature": 0, "num_predict": 12}


def connected(live: LiveServer, *, unix: bool, timeout: float = 60) -> Client:
    transport = httpx.HTTPTransport(uds=str(live.path), verify=False) if unix else httpx.HTTPTransport(verify=False)
    return ollama.Client(live.url, transport=transport, timeout=timeout)


@pytest.fixture(params=["unix", "tcp"])
def llama(request: pytest.FixtureRequest, live: LiveServer) -> Iterator[Client]:
    with connected(live, unix=request.param == "unix") as client:
        yield client


@pytest.fixture
def unix_llama(live: LiveServer) -> Iterator[Client]:
    with connected(live, unix=True) as client:
        yield client


def chat(client: Client, options: dict[str, Any] | None = None, **more: Any) -> Any:
    return client.chat(**{"model": "tiny", "messages": MESSAGES, "options": {**GREEDY, **(options or {})}, **more})


def generate(client: Client, options: dict[str, Any] | None = None, **more: Any) -> Any:
    return client.generate(**{"model": "tiny", "prompt": "Hello", "options": {**GREEDY, **(options or {})}, **more})


def test_chat(llama: Client) -> None:
    answer = chat(llama)
    assert (answer.model, answer.done, answer.done_reason) == ("tiny", True, "length")
    assert (answer.message.role, len(answer.message.content)) == ("assistant", 12)
    assert answer.eval_count == 12
    assert answer.prompt_eval_count > 0
    assert answer.total_duration >= answer.prompt_eval_duration + answer.eval_duration > 0
    assert answer.created_at.endswith("Z")


def test_a_stream_has_the_same_text(llama: Client) -> None:
    *parts, last = chat(llama, stream=True)
    assert "".join(part.message.content for part in parts) == chat(llama).message.content
    assert {(part.done, part.done_reason, part.eval_count, part.message.role) for part in parts} == {(False, None, None, "assistant")}
    assert (last.done, last.done_reason, last.eval_count, last.message.content) == (True, "length", 12, "")


def test_generate(llama: Client) -> None:
    answer = generate(llama)
    assert (len(answer.response), answer.done_reason) == (12, "length")
    assert answer.response == chat(llama, messages=MESSAGES[1:]).message.content
    assert generate(llama, system="Be short.").response == chat(llama).message.content
    *parts, last = generate(llama, stream=True)
    assert "".join(part.response for part in parts) == answer.response
    assert last.context == answer.context
    assert len(last.context) == answer.prompt_eval_count + 12


def test_generate_goes_on_from_a_context(unix_llama: Client) -> None:
    first = generate(unix_llama)
    again = generate(unix_llama, context=first.context, prompt="More")
    assert again.prompt_eval_count == len(first.context) + generate(unix_llama, prompt="More").prompt_eval_count
    assert again.context[: len(first.context)] == first.context


def test_raw(unix_llama: Client) -> None:
    answer = generate(unix_llama, raw=True)
    assert answer.prompt_eval_count == len("Hello")
    assert answer.context is None


def test_logprobs(llama: Client) -> None:
    logprobs = chat(llama, logprobs=True, top_logprobs=2).logprobs
    assert len(logprobs) == 12
    assert all(one.top_logprobs[0].token == one.token and one.top_logprobs[0].logprob == one.logprob for one in logprobs)
    streamed = [one for part in generate(llama, logprobs=True, stream=True) for one in part.logprobs or ()]
    assert "".join(one.token for one in streamed) == generate(llama).response


def test_options(unix_llama: Client) -> None:
    greedy = chat(unix_llama).message.content
    assert chat(unix_llama, {"temperature": 2, "top_k": 1}).message.content == greedy
    texts = [chat(unix_llama, {"temperature": 1.5, "seed": seed}).message.content for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    stopped = chat(unix_llama, {"stop": [greedy[4:7]]})
    assert (stopped.message.content, stopped.done_reason) == (greedy[: greedy.index(greedy[4:7])], "stop")
    assert chat(unix_llama, {"repeat_penalty": 1.9, "presence_penalty": 2.0, "frequency_penalty": 2.0}).message.content != greedy
    assert chat(unix_llama, {"min_p": 1.0, "temperature": 2.0, "top_p": 0.9}).message.content == greedy


def test_the_context_may_be_made_smaller(unix_llama: Client) -> None:
    prompt = chat(unix_llama).prompt_eval_count
    answer = chat(unix_llama, {"num_ctx": prompt + 5})
    assert (answer.eval_count, answer.done_reason) == (5, "length")
    assert chat(unix_llama, {"num_ctx": prompt + 50, "num_predict": -1}).eval_count == 50
    with pytest.raises(ollama.ResponseError, match=rf"maximum context length is {prompt} tokens. However, your prompt has {prompt} "):
        chat(unix_llama, {"num_ctx": prompt})


HINTS = {
    "num_gpu": 99,
    "num_thread": 8,
    "num_batch": 512,
    "main_gpu": 0,
    "use_mmap": True,
    "use_mlock": False,
    "numa": False,
    "num_keep": 4,
}


def test_how_ollama_would_run_a_model_changes_nothing(unix_llama: Client) -> None:
    off = {"mirostat": 0, "tfs_z": 1.0, "typical_p": 1.0, "repeat_last_n": 64, "penalize_newline": True}
    assert chat(unix_llama, HINTS | off).message.content == chat(unix_llama).message.content


@pytest.mark.parametrize("keep_alive", ["5m", "1h30m", "-1m", -1, 300, 0.5, "24h0m0s", 0, 0.0, "0", "0s"])
def test_models_stay_at_least_as_long_as_asked_for(unix_llama: Client, keep_alive: Any) -> None:
    assert chat(unix_llama, keep_alive=keep_alive).done


@pytest.mark.parametrize("keep_alive", ["soon", "5", ""])
def test_a_time_that_is_none(unix_llama: Client, keep_alive: Any) -> None:
    with pytest.raises(ollama.ResponseError, match="keep_alive"):
        chat(unix_llama, keep_alive=keep_alive)


def test_a_request_without_a_prompt_loads_the_model(llama: Client) -> None:
    assert llama.generate(model="tiny", keep_alive=-1).done_reason == "load"
    assert llama.chat(model="tiny").done_reason == "load"
    (only,) = llama.chat(model="tiny", stream=True)
    assert (only.done, only.done_reason, only.message.content) == (True, "load", "")


def test_names_have_a_tag_or_none(llama: Client) -> None:
    for name in ("tiny", "tiny:latest"):
        assert chat(llama, model=name).model == name
        assert llama.show(name).details.family == "llama"


def test_what_is_served(llama: Client, tiny_path: Path) -> None:
    (listed,) = llama.list().models
    (running,) = llama.ps().models
    shown = llama.show("tiny")
    assert listed.model == running.model == "tiny:latest"
    assert listed.digest == running.digest
    assert len(listed.digest) == 64
    details = listed.details
    assert details == running.details == shown.details
    assert (details.format, details.family, details.families, details.quantization_level) == ("safetensors", "llama", ["llama"], "BF16")
    assert listed.size < (tiny_path / "model.safetensors").stat().st_size
    assert listed.size <= running.size  # more once the cache has pages
    assert (running.size_vram, running.context_length) == (0, 4096)
    parameters = listed.size // 2
    assert details.parameter_size == f"{parameters / 1e3:.2f}K"
    config = json.loads((tiny_path / "config.json").read_text())
    info = shown.modelinfo
    assert info["general.architecture"] == "llama"
    assert info["general.parameter_count"] == parameters
    assert info["llama.context_length"] == 4096
    assert info["llama.block_count"] == config["num_hidden_layers"]
    assert shown.capabilities == ["completion", "tools"]
    assert "add_generation_prompt" in shown.template


def test_closing_a_stream_stops_the_engine(llama: Client, live: LiveServer) -> None:
    before = live.stats().completion_tokens
    stream = chat(llama, {"num_predict": 3000}, stream=True)
    for _ in range(3):
        next(stream)
    stream.close()
    stats = live.until(lambda s: s.running == s.waiting == 0)
    assert stats.pages_used == 0
    assert stats.completion_tokens - before < 3000


def test_a_request_that_is_given_up_stops_the_engine(live: LiveServer) -> None:
    with connected(live, unix=True, timeout=0.2) as client, pytest.raises(httpx.ReadTimeout):
        generate(client, {"num_predict": 3000})
    assert live.until(lambda s: s.running == s.waiting == 0).pages_used == 0


def refused(client: Client, path: str, fields: dict[str, Any]) -> tuple[int, str]:
    """Status and message of the error; the same for a stream. Sent without Ollama's client, which refuses or drops some fields itself."""
    raised = []
    body = {"model": "tiny", **({"messages": MESSAGES} if path == "/api/chat" else {"prompt": "Hello"})}
    for stream in (False, True):
        response = client._client.post(path, json={**body, "stream": stream, **fields})
        assert set(response.json()) == {"error"}
        raised.append((response.status_code, response.json()["error"]))
    assert raised[0] == raised[1]
    return raised[0]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/api/chat", {"messages": [*MESSAGES, {"role": "assistant", "content": "I"}]}, "messages[2]"),
        ("/api/generate", {"suffix": "x"}, "suffix"),
        ("/api/generate", {"template": "{{ .Prompt }}"}, "template"),
        ("/api/chat", {"options": {"mirostat": 1}}, "options.mirostat"),
        ("/api/chat", {"options": {"typical_p": 0.7}}, "options.typical_p"),
    ],
)
def test_what_is_known_but_not_supported_is_refused_by_name(unix_llama: Client, path: str, fields: dict[str, Any], param: str) -> None:
    status, message = refused(unix_llama, path, fields)
    assert status == 400
    assert message.startswith(f"{param}: ")
    assert "not supported yet" in message


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/api/chat", {"nonsense": 1}, "nonsense"),
        ("/api/chat", {"options": {"nonsense": 1}}, "options.nonsense"),
        ("/api/chat", {"options": {"temperature": -1}}, "options.temperature"),
        ("/api/chat", {"options": {"num_predict": 0}}, "options.num_predict"),
        ("/api/chat", {"options": {"top_p": 2}}, "options.top_p"),
        ("/api/chat", {"options": {"repeat_penalty": 0}}, "options.repeat_penalty"),
        ("/api/chat", {"options": {"presence_penalty": 1000}}, "options.presence_penalty"),
        ("/api/chat", {"options": {"seed": 2**70}}, "options.seed"),
        ("/api/chat", {"options": {"top_k": 1.5}}, "options.top_k"),
        ("/api/chat", {"options": {"stop": [""]}}, "options.stop"),
        ("/api/chat", {"options": {"num_ctx": 0}}, "options.num_ctx"),
        ("/api/chat", {"top_logprobs": 2}, "top_logprobs"),
        ("/api/chat", {"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ("/api/chat", {"messages": "x"}, "messages"),
        ("/api/generate", {"prompt": 3}, "prompt"),
        ("/api/generate", {"raw": True, "system": "x"}, "system"),
        ("/api/generate", {"context": ["x"]}, "context[0]"),
        ("/api/chat", {"model": 3}, "model"),
    ],
)
def test_what_is_wrong_is_named(unix_llama: Client, path: str, fields: dict[str, Any], param: str) -> None:
    status, message = refused(unix_llama, path, fields)
    assert status == 400
    assert param in message.replace(":", " ").split()


@pytest.mark.parametrize("name", ["other", "other:latest", "tiny:1b", "/etc/passwd", "../tiny"])
def test_a_model_that_is_not_there(unix_llama: Client, name: str) -> None:
    for ask in (chat, generate):
        with pytest.raises(ollama.ResponseError, match="not found") as found:
            ask(unix_llama, model=name)
        assert found.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="not found"):
        list(chat(unix_llama, model=name, stream=True))
    with pytest.raises(ollama.ResponseError, match="not found"):
        unix_llama.show(name)


def test_a_prompt_beyond_the_context(unix_llama: Client) -> None:
    assert refused(unix_llama, "/api/generate", {"prompt": "x" * 5000})[0] == 400
    assert refused(unix_llama, "/api/generate", {"context": [96], "prompt": "x"})[0] == 400


def test_is_it_there(live: LiveServer) -> None:
    with httpx.Client(base_url=live.url, verify=False) as client:
        assert client.get("/").text == "Ollama is running"
        assert (client.head("/").status_code, client.head("/").content) == (200, b"")
        version = client.get("/api/version").json()
        assert set(version) == {"version", "mlxinfer"}
        assert tuple(map(int, version["version"].split("."))) >= (0, 13, 4)  # Codex needs 0.13.4


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 200),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded", "Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
    ],
)
def test_as_curl_and_litellm_send_it(live: LiveServer, headers: dict[str, str], status: int) -> None:
    with httpx.Client(base_url=live.url, verify=False) as client:
        for path in ("/api/chat", "/api/generate", "/api/show"):
            assert client.post(path, content=b'{"model": "tiny"}', headers=headers).status_code == status


def test_answers_are_as_the_document_says(live: LiveServer) -> None:
    asked: list[tuple[str, dict[str, Any] | None, Any]] = [
        ("/api/chat", {"messages": MESSAGES, "logprobs": True, "top_logprobs": 1}, ChatReply),
        ("/api/chat", {}, ChatReply),
        ("/api/generate", {"prompt": "x"}, GenerateReply),
        ("/api/show", {}, ShowReply),
        ("/api/tags", None, Tags),
        ("/api/ps", None, RunningModels),
        ("/api/version", None, OllamaVersion),
    ]
    with httpx.Client(base_url=live.url, verify=False) as client:
        for path, fields, kind in asked:
            settings = {} if path == "/api/show" else {"stream": False, "options": {"num_predict": 2}}
            response = client.get(path) if fields is None else client.post(path, json={"model": "tiny", **settings, **fields})
            answer = response.json()
            assert TypeAdapter(kind).validate_python(answer) == answer


@pytest.mark.long
def test_litellm(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    litellm = needs("litellm")
    litellm.telemetry = False

    for model in ("ollama_chat/tiny", "ollama/tiny"):
        asked: dict[str, Any] = {"model": model, "messages": MESSAGES, "temperature": 0, "max_tokens": 4, "api_base": live.url}
        whole = litellm.completion(**asked).choices[0].message.content
        streamed = [chunk.choices[0].delta.content for chunk in litellm.completion(**asked, stream=True)]
        assert "".join(filter(None, streamed)) == whole
        assert len(whole) == 4


def test_what_is_not_there_is_told_in_the_same_shape(live: LiveServer) -> None:
    with httpx.Client(base_url=live.url, verify=False) as client:
        missing = client.post("/api/pull", json={"model": "x"})
        assert (missing.status_code, set(missing.json())) == (404, {"error"})
        assert client.get("/api/chat").status_code == 405
        nameless = client.post("/api/show", json={})
        assert (nameless.status_code, nameless.json()) == (400, {"error": "model is required"})
