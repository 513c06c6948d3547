"""`model: "base:adapter"` in every dialect: answered by the adapter, listed, and refused if the adapter does not exist."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.http.live_server import LiveServer, live_server
from support.models.adapters import random_changes, shapes_of, write_mlx_lm, write_peft
from support.models.tiny_directory import tiny_directory

from mlxinfer import LLM, AsyncLLM, SamplingParams

TEXT = "It was a dark and stormy night"
CHAT = [{"role": "user", "content": TEXT}]
NAMES = {"tiny": None, "tiny:a": "a", "tiny:latest": None, "tiny:b": "b", "tiny:a:latest": "a", "tiny:latest:b": "b"}


@pytest.fixture(scope="module")
def paths(tmp_path_factory) -> tuple[Path, dict[str, Path]]:
    folder = tmp_path_factory.mktemp("models")
    base = tiny_directory(folder / "tiny", eos=False, context=1024)
    changes = [random_changes(shapes_of(base), seed, size=0.2) for seed in (1, 2)]
    return base, {"a": write_peft(folder / "a", changes[0]), "b": write_mlx_lm(folder / "b", changes[1])}


@pytest.fixture(scope="module")
def live(paths) -> Iterator[LiveServer]:
    base, adapters = paths
    with live_server({"tiny": lambda: AsyncLLM(base, dtype="float32", memory_gb=2, adapters=adapters)}) as server:
        yield server


@pytest.fixture(scope="module")
def expected(paths) -> dict[str | None, tuple[str, str]]:
    """Expected continuation of the text and of the chat, by adapter."""
    base, adapters = paths
    with LLM(base, dtype="float32", memory_gb=2, adapters=adapters) as llm:
        found = {}
        for name in (None, "a", "b"):
            params = SamplingParams(temperature=0, max_tokens=12, adapter=name)
            found[name] = llm.generate(TEXT, params)[0].text, llm.chat(CHAT, params).text
    assert len(set(found.values())) == 3
    return found


def send(live: LiveServer, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(live.url + path, data, {"Content-Type": "application/json", "anthropic-version": "2023-06-01"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def asked(live: LiveServer, dialect: str, name: str) -> tuple[str, str, int]:
    """A dialect's answer, the model it names, and the kind of prompt: text (0) or chat (1)."""
    body: dict[str, Any] = {"model": name, "temperature": 0, "max_tokens": 12}
    if dialect == "completions":
        _, answer = send(live, "/v1/completions", body | {"prompt": TEXT})
        return answer["choices"][0]["text"], answer["model"], 0
    if dialect == "chat":
        _, answer = send(live, "/v1/chat/completions", body | {"messages": CHAT})
        return answer["choices"][0]["message"]["content"], answer["model"], 1
    if dialect == "responses":
        sizes = {"max_output_tokens": body.pop("max_tokens")}
        _, answer = send(live, "/v1/responses", body | sizes | {"input": TEXT})
        return answer["output"][0]["content"][0]["text"], answer["model"], 1
    if dialect == "messages":
        _, answer = send(live, "/v1/messages", body | {"messages": CHAT})
        return answer["content"][0]["text"], answer["model"], 1
    options = {"model": name, "stream": False, "options": {"temperature": 0, "num_predict": 12}}
    if dialect == "ollama generate":
        _, answer = send(live, "/api/generate", options | {"prompt": TEXT, "raw": True})
        return answer["response"], answer["model"], 0
    _, answer = send(live, "/api/chat", options | {"messages": CHAT})
    return answer["message"]["content"], answer["model"], 1


DIALECTS = ["completions", "chat", "responses", "messages", "ollama generate", "ollama chat"]


@pytest.mark.long
@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_adapter_answers(live, expected, dialect):
    for name, adapter in NAMES.items():
        text, model, which = asked(live, dialect, name)
        assert text == expected[adapter][which], name
        assert model == ("tiny" if adapter is None else f"tiny:{adapter}") or dialect.startswith("ollama"), name


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": TEXT}),
        ("/v1/chat/completions", {"messages": CHAT}),
        ("/v1/responses", {"input": TEXT}),
        ("/v1/messages", {"messages": CHAT, "max_tokens": 3}),
        ("/api/generate", {"prompt": TEXT}),
        ("/api/chat", {"messages": CHAT}),
    ],
)
@pytest.mark.parametrize("name", ["tiny:c", "tiny:", "tiny:A", "other:a", ":a", "tiny:a:b"])
def test_an_adapter_that_there_is_not(live, path, body, name):
    status, answer = send(live, path, {"model": name, **body})
    assert status == 404
    assert "tiny" in json.dumps(answer)


def test_they_are_listed(live):
    _, listed = send(live, "/v1/models")
    assert [(model["id"], model.get("parent")) for model in listed["data"]] == [("tiny", None), ("tiny:a", "tiny"), ("tiny:b", "tiny")]
    status, one = send(live, "/v1/models/tiny:a")
    assert (status, one["id"], one["parent"]) == (200, "tiny:a", "tiny")
    assert send(live, "/v1/models/tiny:c")[0] == 404


def test_log_probabilities_of_a_prompt(live):
    body = {"prompt": TEXT, "max_tokens": 0, "echo": True, "logprobs": 0}
    found = {name: send(live, "/v1/completions", body | {"model": name})[1]["choices"][0]["logprobs"]["token_logprobs"] for name in NAMES}
    assert found["tiny"] == found["tiny:latest"] != found["tiny:a"] == found["tiny:a:latest"] != found["tiny:b"]


def test_metrics_count_them_as_their_model(live):
    asked(live, "chat", "tiny:a")
    with urllib.request.urlopen(f"{live.url}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    assert 'model_name="tiny"' in text
    assert "tiny:a" not in text
