"""Real coding agents with a scripted model: an answer, a tool call, an edited file, a picture, and twenty consecutive calls.

The agents are found on PATH; PyPI has them as `openai-codex-cli-bin`, `claude-agent-sdk`, `aider-chat` and `mistral-vibe`. The
figures of the twenty turns are printed, and written to the folder MLXINFER_TEST_TURNS if it is set. benchmarks/results has a copy.
"""

from __future__ import annotations

import io
import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from support.engines.scripted import scripted_directory
from support.http.live_server import LiveServer, live_server
from support.http.pictures import noise, saved

from mlxinfer.cli.agents import AGENTS, Served
from mlxinfer.engine.async_llm import AsyncLLM
from mlxinfer.server.model_manager.registry import ServedModel

pytestmark = pytest.mark.slow

HELLO = "Hello from the script."
ARGUMENTS = {
    "codex": ["exec", "--skip-git-repo-check", "-s", "read-only", "Say hello"],
    "claude": ["-p", "Say hello", "--allowedTools", "Bash"],
    "aider": ["--message", "Say hello", "--no-git", "--yes-always", "--no-check-update", "--analytics-disable", "--no-pretty"],
    "vibe": ["-p", "Say hello", "--output", "text"],
}
"""Command line of each agent for one prompt."""
CALLS: dict[str, tuple[str, dict[str, str]]] = {
    "codex": ("exec_command", {"cmd": "echo from-the-tool"}),
    "claude": ("Bash", {"command": "echo from-the-tool", "description": "Say it"}),
    "vibe": ("bash", {"command": "echo from-the-tool"}),
}
"""A tool of each agent and its arguments. Aider has no tools: it reads edits from the text of an answer."""
NOTES = "written by the model\n"
EDIT = f"notes.txt\n```\n{NOTES}```"
"""A whole file, the form in which aider asks unknown models for edits."""
LONG, TURNS = ("codex", "claude"), 20
CONTEXT = 1 << 17
"""Tokens of the context; a token is a character. Claude Code's first prompt has 49,000, and it shortens a conversation that fills most
of the context."""
MOST_NEW = 400
"""Tokens of a call and its result in each agent's form."""


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("models")
    texts = {"plain": HELLO, "edit": EDIT}
    paths = {name: scripted_directory(folder / name, text, context=CONTEXT) for name, text in texts.items()}
    for name, (tool, arguments) in CALLS.items():
        call = json.dumps({"name": tool, "arguments": arguments})
        said = f"<tool_call>\n{call}\n</tool_call>"
        paths[name] = scripted_directory(folder / name, said, context=CONTEXT)
        if name in LONG:
            paths[f"{name}-long"] = scripted_directory(folder / f"{name}-long", said, context=CONTEXT, calls=TURNS)
    with live_server({name: lambda path=path: AsyncLLM(path, memory_gb=1) for name, path in paths.items()}) as server:  # type: ignore[misc]
        yield server


def run(live: LiveServer, agent: str, model: str, home: Path) -> str:
    """Run the agent and return its output."""
    program = shutil.which(AGENTS[agent].program)
    if program is None:
        pytest.skip(f"{agent} is not installed: {AGENTS[agent].install}")
    settings = AGENTS[agent].settings(Served(live.url, model, CONTEXT))
    mine = ARGUMENTS[agent]
    arguments = [*mine[:1], *settings.arguments, *mine[1:]] if agent == "codex" else [*settings.arguments, *mine]
    (home / "work").mkdir(parents=True, exist_ok=True)
    kept: Any = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    environment = {**kept, "HOME": str(home), "TERM": "dumb", "NO_PROXY": "*", "IS_SANDBOX": "1", **settings.environment}
    command = [program, *arguments]
    ended = subprocess.run(
        command, cwd=home / "work", env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout + ended.stderr


@pytest.mark.parametrize("agent", ARGUMENTS)
def test_an_answer(live: LiveServer, agent: str, tmp_path: Path) -> None:
    assert HELLO in run(live, agent, "plain", tmp_path)


@pytest.mark.parametrize("agent", CALLS)
def test_a_call_of_a_tool(live: LiveServer, agent: str, tmp_path: Path) -> None:
    before = live.stats(agent)
    assert "All done." in run(live, agent, agent, tmp_path)
    after = live.stats(agent)
    requests, prompts = after.requests - before.requests, after.prompt_tokens - before.prompt_tokens
    new = prompts - (after.reused_tokens - before.reused_tokens)
    assert requests >= 2
    assert new < prompts / requests + MOST_NEW  # the first prompt, and the later ones


def test_an_edit(live: LiveServer, tmp_path: Path) -> None:
    run(live, "aider", "edit", tmp_path)
    assert (tmp_path / "work" / "notes.txt").read_text(encoding="utf-8") == NOTES


class Access(logging.Handler):
    """Fields of the access log, one dict per request."""

    def __init__(self) -> None:
        super().__init__()
        self.fields: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.fields.append(getattr(record, "fields", {}))


@pytest.mark.parametrize("agent", LONG)
def test_twenty_turns_read_only_what_is_new(live: LiveServer, agent: str, tmp_path: Path) -> None:
    log, access = logging.getLogger("mlxinfer.access"), Access()
    log.setLevel(logging.INFO)
    log.addHandler(access)
    try:
        assert "All done." in run(live, agent, f"{agent}-long", tmp_path)
    finally:
        log.removeHandler(access)
    prompts = [(int(f["prompt_tokens"]), int(f["cached_tokens"])) for f in access.fields if "prompt_tokens" in f]
    longest = max(prompt for prompt, _ in prompts)
    turns = [(prompt, prompt - cached) for prompt, cached in prompts if prompt > longest / 2]  # without requests for titles
    lines = [f"| {turn} | {prompt} | {prompt - read} | {read} |" for turn, (prompt, read) in enumerate(turns)]
    table = "\n".join([f"{agent}, tokens\n", "| turn | prompt | from the cache | read |", "| ---: | ---: | ---: | ---: |", *lines]) + "\n"
    sys.stdout.write(table)
    if folder := os.environ.get("MLXINFER_TEST_TURNS"):
        (Path(folder) / f"agents_{agent}.md").write_text(table, encoding="utf-8")
    assert len(turns) > TURNS
    assert all(read < MOST_NEW for _, read in turns[1:])


PICTURE = noise(1, (320, 240))
LOOKING = {"codex": ("view_image", "path"), "claude": ("Read", "file_path")}
"""The tool of each agent, and its argument."""


def _picture(folder: Path) -> Path:
    """The picture in the agent's working directory: some agents ask before they read elsewhere."""
    return folder / "home" / "work" / "picture.png"


class Seen:
    """The images that the engine got, each with the role of its message. No scripted model sees, so the test records them."""

    def __init__(self) -> None:
        self.images: list[tuple[str, Image.Image]] = []

    def without(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Record the images, and return the messages with a text in place of each."""
        return [{**message, "content": self._text(message["role"], message.get("content"))} for message in messages]

    def _text(self, role: str, content: Any) -> Any:
        if not isinstance(content, list):
            return content
        self.images += [(role, Image.open(io.BytesIO(part["image"]))) for part in content if part["type"] == "image"]
        return "".join("(a picture)" if part["type"] == "image" else part["text"] for part in content)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    found, original = Seen(), AsyncLLM.chat_prompt

    async def chat_prompt(self: AsyncLLM, messages: Any, **chat: Any) -> Any:
        return await original(self, found.without(messages), **chat)

    monkeypatch.setattr(AsyncLLM, "chat_prompt", chat_prompt)
    monkeypatch.setattr(ServedModel, "blind_reason", None)
    return found


@pytest.fixture(params=LOOKING)
def agent(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def looking(agent: str, tmp_path: Path) -> Iterator[LiveServer]:
    tool, argument = LOOKING[agent]
    call = json.dumps({"name": tool, "arguments": {argument: str(_picture(tmp_path))}})
    path = scripted_directory(tmp_path / "model", f"<tool_call>\n{call}\n</tool_call>", context=CONTEXT)
    with live_server({agent: lambda: AsyncLLM(path, memory_gb=1)}) as server:
        yield server


def test_a_picture_in_the_result_of_a_tool(looking: LiveServer, agent: str, seen: Seen, tmp_path: Path) -> None:
    _picture(tmp_path).parent.mkdir(parents=True)
    _picture(tmp_path).write_bytes(saved(PICTURE))
    assert "All done." in run(looking, agent, agent, tmp_path / "home")
    role, image = seen.images[-1]
    assert role == "tool"
    assert (image.size, image.convert("RGB").tobytes()) == (PICTURE.size, PICTURE.tobytes())
