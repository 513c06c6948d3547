"""`mlxinfer launch`, with programs on PATH that only write down how they were started."""

from __future__ import annotations

import json
import os
import shlex
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.http.live_server import LiveServer, live_server

from mlxinfer.cli.agents import AGENTS
from mlxinfer.engine.async_llm import AsyncLLM

Call = Callable[..., Any]
KEY = "a key of the test"
RECORD = """#!{python}
import json, os, sys, urllib.request
url = {url!r}
listens = bool(url) and urllib.request.urlopen(url + "/v1/models").status == 200
json.dump({{"arguments": sys.argv[1:], "environment": dict(os.environ), "listens": listens}}, open({target!r}, "w"))
sys.exit(7)
"""


@pytest.fixture(scope="module")
def server(chat_model: str) -> Iterator[LiveServer]:
    with live_server({"tiny": lambda: AsyncLLM(chat_model), "other": lambda: AsyncLLM(chat_model)}) as live:
        yield live


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Puts a program with this name on PATH, and says where it writes down how it was started."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("MLXINFER_API_KEY", raising=False)

    def make(name: str, url: str = "") -> Path:
        target = tmp_path / f"{name}.json"
        (folder / name).write_text(RECORD.format(python=sys.executable, target=str(target), url=url))
        (folder / name).chmod(0o755)
        return target

    return make


def started(target: Path) -> tuple[dict[str, str], list[str]]:
    found: dict[str, Any] = json.loads(target.read_text())
    return found["environment"], found["arguments"]


def test_the_list(call: Call, install: Callable[..., Path]) -> None:
    install("aider")
    found = {line.split()[0]: line for line in call("launch").out.splitlines()}
    assert list(found) == list(AGENTS)
    assert found["aider"].endswith("(installed)")
    assert "not installed: pip install mistral-vibe" in found["vibe"]


def test_a_tool_that_nobody_knows(call: Call) -> None:
    result = call("launch", "aidr")
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert "did you mean aider?" in result.err


@pytest.mark.long
@pytest.mark.parametrize("tool", AGENTS)
def test_every_tool_is_told_the_address_and_the_model(call: Call, install: Callable[..., Path], server: LiveServer, tool: str) -> None:
    target = install(AGENTS[tool].program)
    result = call("launch", tool, "--url", server.url, "--model", "other", "--", "-x", "do it")
    assert result.code == 7  # the tool's own
    environment, arguments = started(target)
    assert arguments[-2:] == ["-x", "do it"]
    told = json.dumps([{name: value for name, value in environment.items() if os.environ.get(name) != value}, arguments])
    assert server.url in told
    assert "other" in told
    assert shlex.join(arguments[-2:]) in result.err


def test_codex_in_full(call: Call, install: Callable[..., Path], server: LiveServer) -> None:
    target = install("codex")
    call("launch", "codex", "--url", f"{server.url}/v1/")
    _, arguments = started(target)
    pairs = dict(part.split("=", 1) for part in arguments[1::2])
    assert set(arguments[::2]) == {"-c"}
    assert json.loads(pairs["model"]) == "tiny"
    assert json.loads(pairs["model_providers.mlxinfer.base_url"]) == f"{server.url}/v1"
    assert json.loads(pairs["model_providers.mlxinfer.wire_api"]) == "responses"
    assert int(pairs["model_context_window"]) > 0


def test_claude_in_full(call: Call, install: Callable[..., Path], server: LiveServer) -> None:
    target = install("claude")
    call("launch", "claude", "--url", server.url, "--model", "tiny:latest")
    environment, _ = started(target)
    assert environment["ANTHROPIC_BASE_URL"] == server.url
    assert environment["ANTHROPIC_MODEL"] == environment["ANTHROPIC_DEFAULT_HAIKU_MODEL"] == "tiny"
    assert environment["ANTHROPIC_AUTH_TOKEN"] == "local"


def test_the_key_is_given_and_never_shown(
    call: Call, install: Callable[..., Path], chat_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = install("aider")
    with live_server({"tiny": lambda: AsyncLLM(chat_model)}, api_key=KEY) as strict:
        assert "the key in $MLXINFER_API_KEY" in call("launch", "aider", "--url", strict.url).err
        monkeypatch.setenv("MLXINFER_API_KEY", KEY)
        results = [call("launch", tool, "--url", strict.url, "--print") for tool in AGENTS]
        results.append(call("launch", "aider", "--url", strict.url))
        results += [call("launch", tool, "--url", strict.url, "--write", f"{target}.{tool}") for tool in AGENTS if AGENTS[tool].file]
    assert started(target)[0]["OPENAI_API_KEY"] == KEY
    written = [file.read_text() for file in target.parent.glob("aider.json.*")]
    assert len(written) == sum(agent.file is not None for agent in AGENTS.values())
    assert not [text for text in (*(each.out + each.err for each in results), *written) if KEY in text]


def test_what_is_printed_can_be_pasted(call: Call, install: Callable[..., Path], server: LiveServer) -> None:
    install("codex")
    result = call("launch", "gptme", "--url", server.url, "--print", "--", "two words")
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    assert f"export OPENAI_BASE_URL={server.url}/v1" in lines
    assert lines[-1] == "gptme --model local/tiny 'two words'"


def test_a_file_is_written_only_where_there_is_none(call: Call, server: LiveServer, own_home: Path, tmp_path: Path) -> None:
    result = call("launch", "codex", "--url", server.url, "--write")
    file = own_home / ".codex/mlxinfer.config.toml"
    assert (result.code, "codex -p mlxinfer" in result.out) == (0, True)
    assert 'model = "tiny"\n' in file.read_text()
    file.write_text("mine")
    again = call("launch", "codex", "--url", server.url, "--write")
    assert (again.code, file.read_text()) == (2, "mine")
    assert "is not replaced" in again.err
    named = tmp_path / "deep" / "opencode.json"
    assert call("launch", "opencode", "--url", server.url, "--write", str(named)).code == 0
    assert json.loads(named.read_text())["model"] == "mlxinfer/tiny"


def test_a_tool_that_is_not_installed(call: Call, install: Callable[..., Path], server: LiveServer) -> None:
    result = call("launch", "qwen", "--url", server.url)
    assert result.code == 2
    assert "export OPENAI_MODEL=tiny" in result.err
    assert "qwen is not installed: npm install" in result.err


def test_where_no_server_listens(call: Call, install: Callable[..., Path], server: LiveServer) -> None:
    install("aider")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    result = call("launch", "aider", "--url", f"http://127.0.0.1:{port}")
    assert (result.code, f"mlxinfer serve MODEL --port {port}" in result.err) == (2, True)
    result = call("launch", "aider", "--url", server.url, "--model", "third")
    assert (result.code, "available: tiny, other" in result.err) == (2, True)


@pytest.mark.long
def test_a_server_is_started_and_ends_with_the_tool(call: Call, install: Callable[..., Path], chat_model: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    target = install("aider", url)
    result = call("launch", "aider", "--url", url, "--model", chat_model)
    assert result.code == 7, result.err
    assert json.loads(target.read_text())["listens"] is True
    assert f"openai/{Path(chat_model).name}" in started(target)[1]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])))


@pytest.mark.long
def test_a_server_that_cannot_start(call: Call, install: Callable[..., Path], tmp_path: Path) -> None:
    install("aider")
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    result = call("launch", "aider", "--url", url, "--model", str(tmp_path / "none"))
    assert (result.code, "the server ended: " in result.err) == (2, True)
