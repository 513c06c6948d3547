"""`run` and `chat` with the model of a running server: the same answers as from an own copy, in another process's memory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from support.http.live_server import LiveServer, live_server
from support.models.tiny_directory import tiny_directory

from mlxinfer import LLM
from mlxinfer.engine.async_llm import AsyncLLM

GREEDY = ("--temperature", "0", "--max-tokens", "12")


@pytest.fixture(scope="module")
def live(chat_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    ending = tiny_directory(tmp_path_factory.mktemp("models") / "ending", rounded=True)
    with live_server({"tiny": lambda: AsyncLLM(chat_model), "ending": lambda: AsyncLLM(ending)}) as server:
        yield server


@pytest.fixture
def asked(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The number of requests that the server has answered."""
    monkeypatch.setenv("MLXINFER_SOCKET", str(live.path))
    before = live.stats().requests
    return lambda: live.stats().requests - before


@pytest.fixture
def loads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a model was loaded in this process")

    monkeypatch.setattr(LLM, "__init__", refuse)


@pytest.mark.parametrize(
    "more",
    [
        [],
        ["--raw"],
        ["--system", "be brief"],
        ["--seed", "3", "--temperature", "1"],
        ["--logit-bias", "40:3", "--stop", "q"],
        ["--repetition-penalty", "1.2", "--top-k", "5", "--temperature", "0.8", "--seed", "1"],
    ],
    ids=" ".join,
)
def test_answers_are_those_of_an_own_copy(call, asked, chat_model, more):
    own = call("run", chat_model, "hello", *GREEDY, *more, "--local")
    assert asked() == 0
    assert call("run", "tiny", "hello", *GREEDY, *more) == own
    assert asked() == 1
    assert own.code == 0


def test_a_path_is_found_by_its_files(call, asked, chat_model, loads_nothing, tmp_path):
    assert call("run", chat_model, "hello", *GREEDY).code == 0
    assert asked() == 1
    with pytest.raises(AssertionError, match="loaded in this process"):  # the same name, other files
        call("run", str(shutil.copytree(chat_model, tmp_path / "tiny")), "hello", *GREEDY)


@pytest.mark.parametrize("more", [["--kv", "8"], ["--no-speculate"], ["--local"]], ids=" ".join)
def test_settings_of_a_loaded_model_mean_an_own_copy(call, asked, chat_model, more):
    assert call("run", chat_model, "hello", *GREEDY, *more).code == 0
    assert asked() == 0


def test_json_several_answers_and_log_probabilities(call, asked, chat_model):
    several = ("--n", "3", "--temperature", "1", "--seed", "5", "--max-tokens", "6")
    own, served = (call("run", model, "hello", *several, *local) for model, local in ((chat_model, ["--local"]), ("tiny", [])))
    assert served.out == own.out
    own, served = (
        json.loads(call("run", model, "hello", *GREEDY, "--json", "--logprobs", "2", *local).out)
        for model, local in ((chat_model, ["--local"]), ("tiny", []))
    )
    assert (served["text"], served["finish_reason"], served["completion_tokens"]) == (own["text"], own["finish_reason"], 12)
    assert [(each["text"], each["logprob"]) for each in served["logprobs"]] == [(each["text"], each["logprob"]) for each in own["logprobs"]]
    assert asked() == 4


def test_a_schema_and_a_loop(call, asked, chat_model, tmp_path):
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "integer"}')
    assert call("run", "ending", "hello", "--schema", str(schema), *GREEDY).out.strip().lstrip("-").isdigit()
    loop = call("run", "tiny", "hello", "--logit-bias", "40:100", "--temperature", "0", "--max-tokens", "150")
    assert loop.err.startswith("stopped: the answer repeated the same text five times")
    assert asked() == 1


def test_chats_have_the_same_answers_and_counts(call, asked, chat_model):
    said = "hello\n/continue\nmore\n/retry\n/stats\n/tokens\n"
    own = call("chat", chat_model, *GREEDY, "--local", stdin=said)
    served = call("chat", "tiny", *GREEDY, stdin=said)
    assert (served.code, served.out) == (own.code, own.out)
    assert asked() == 4


def test_a_url_is_used_or_named_in_an_error(call, asked, live):
    assert call("run", "tiny", "hello", "--url", live.url, *GREEDY).code == 0
    assert asked() == 1
    for more, told in (
        (["tiny", "--url", "http://127.0.0.1:9"], "no server answers at http://127.0.0.1:9"),
        (["nosuch", "--url", live.url], "does not have nosuch; available: tiny, ending"),
        (["tiny", "--url", live.url, "--kv", "8"], "--kv is chosen where the server starts"),
        (["tiny", "--url", live.url, "--local"], "exclude each other"),
        (["tiny", "--url", "ftp://x"], "--url takes an address such as"),
        (["tiny", "--url", live.url, "--temperature", "3"], "temperature: "),
    ):
        result = call("run", more[0], "hello", *more[1:])
        assert (result.code, result.out) == (2, "")
        assert told in result.err


def test_a_prompt_that_is_too_long_is_one_line(call, asked):
    result = call("run", "tiny", "word " * 500)
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert "maximum context length" in result.err


def test_a_server_that_ends_within_an_answer_is_told(call, chat_model, monkeypatch):
    with live_server({"tiny": lambda: AsyncLLM(chat_model)}) as server:
        monkeypatch.setenv("MLXINFER_SOCKET", str(server.path))
        assert call("run", "tiny", "hello", *GREEDY).code == 0
    result = call("run", "tiny", "hello", *GREEDY)  # no server, and no such model here
    assert (result.code, result.out) == (2, "")


def test_ps_lists_memory_and_the_plan(call, asked, live):
    lines = call("ps").out.splitlines()
    assert lines[0].split() == ["NAME", "MEMORY", "AT", "MOST", "CONTEXT", "UNLOADED"]
    assert lines[1].split()[0] == "tiny"
    assert lines[1].endswith("never")
    model = json.loads(call("ps", "--json").out)[0]
    assert 0 < model["size"] < model["size_limit"]
    assert call("ps", "--url", live.url).out.splitlines()[0] == lines[0]


@pytest.mark.parametrize("words", [["ps"], ["stop"], ["stop", "tiny"]], ids=" ".join)
def test_without_a_server(call, monkeypatch, tmp_path, words):
    monkeypatch.setenv("MLXINFER_SOCKET", str(tmp_path / "none.sock"))
    result = call(*words)
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert result.err.startswith("mlxinfer: no server is running at ")


def test_tokenize(live: LiveServer) -> None:
    def ask(body: dict[str, Any]) -> tuple[int, Any]:
        raw = json.dumps(body).encode()
        head = f"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
        status, _, answer = live.exchange(head.encode() + raw, unix=True)
        return status, json.loads(answer)

    tokenizer = live.models["tiny"].tokenizer
    status, found = ask({"model": "tiny", "prompt": "hello you", "return_token_strs": True})
    assert (status, found["tokens"]) == (200, tokenizer.encode("hello you"))
    assert "".join(found["token_strs"]).strip() == "hello you"
    assert found["count"] == len(found["tokens"])
    messages = [{"role": "user", "content": "hello"}]
    assert ask({"model": "tiny", "messages": messages})[1]["tokens"] == tokenizer.encode_chat(messages)
    for body in ({"model": "tiny"}, {"model": "tiny", "prompt": "a", "messages": messages}, {"model": "no", "prompt": "a"}):
        assert ask(body)[0] in (400, 404)


def test_help_of_run_names_the_options(call):
    assert {"--local", "--url"} <= set(call("run", "--help").out.split())


def _texts(out: str) -> list[Any]:
    return [(each["custom_id"], each.get("text"), "error" in each) for each in map(json.loads, out.splitlines())]


def test_a_batch_and_a_continued_prompt_use_the_server(call, asked, chat_model, tmp_path):
    lines = ["hello", {"custom_id": "b", "prompt": "bye", "max_tokens": 3}, "x" * 900, "more"]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, lines)))
    batch = ("--batch", str(tmp_path / "p.jsonl"), *GREEDY, "-q")
    own = call("run", chat_model, *batch, "--local")
    assert [failed for _, _, failed in _texts(own.out)] == [False, False, True, False]
    assert asked() == 0
    assert _texts(call("run", "tiny", *batch).out) == _texts(own.out)
    assert asked() >= 3
    call("run", "tiny", "hello", "--keep", *GREEDY)
    continued = call("run", "-c", "more", "--no-keep", *GREEDY)
    assert continued == call("run", "-c", "-m", chat_model, "more", "--no-keep", *GREEDY, "--local")
    assert continued.code == 0
