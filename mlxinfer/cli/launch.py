"""Start a coding agent with a served model, without changing other programs' settings unless requested."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem

from ..errors import ServerError
from .agents import AGENTS, KEY_VARIABLE, NO_KEY, Agent, AgentSettings
from .common.console import did_you_mean, tell
from .common.options import complete_model

if TYPE_CHECKING:
    from .agents import Served

_HERE = ""
"""Value of `--write` without a file."""


def _complete_tool(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(name, help=agent.what) for name, agent in AGENTS.items() if name.startswith(incomplete)]


@click.command(short_help="Start a coding agent with a served model.", context_settings={"ignore_unknown_options": True})
@click.argument("tool", required=False, metavar="[TOOL]", shell_complete=_complete_tool)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- ARGUMENTS...]")
@click.option("--model", metavar="MODEL", shell_complete=complete_model, help="A served model, or the one to serve if no server listens.")
@click.option("--url", default="http://127.0.0.1:8080", show_default=True, help="The server.")
@click.option("--print", "only_print", is_flag=True, help="Print the settings, and start nothing.")
@click.option("--write", "write", is_flag=False, flag_value=_HERE, type=str, metavar="[FILE]",
              help="Write the tool's configuration into a new file, and start nothing.")  # fmt: skip
def launch(tool: str | None, arguments: tuple[str, ...], model: str | None, url: str, only_print: bool, write: str | None) -> None:
    """Start TOOL with a model on this machine; without TOOL, list the tools.

    TOOL is codex, claude, opencode, aider, vibe, gptme, qwen or goose. The tool gets its settings by variables and arguments, for this
    run only. If no server listens at --url, one is started for --model, and ends with the tool.
    """
    if tool is None:
        _list()
        return
    if tool not in AGENTS:
        raise click.UsageError(f"Unknown tool {tool!r}{did_you_mean(tool, list(AGENTS))}: {', '.join(AGENTS)}")
    agent = AGENTS[tool]
    with _server(url, model, may_start=bool(shutil.which(agent.program)) and not only_print and write is None) as served:
        settings = agent.settings(served)
        if write is not None:
            _write(agent, settings, tool, write)
        elif only_print:
            click.echo("\n".join(_spelled(agent, settings, arguments)))
        else:
            sys.exit(_start(agent, settings, arguments))


def _start(agent: Agent, settings: AgentSettings, arguments: tuple[str, ...]) -> int:
    """Print the agent's settings, run it, and return its exit code."""
    tell("\n".join(_spelled(agent, settings, arguments)))
    program = shutil.which(agent.program)
    if program is None:
        raise ServerError(f"{agent.program} is not installed: {agent.install}")
    return _run([program, *settings.arguments, *arguments], settings.environment)


def _list() -> None:
    width = max(map(len, AGENTS))
    for name, agent in AGENTS.items():
        state = "installed" if shutil.which(agent.program) else f"not installed: {agent.install}"
        click.echo(f"{name:<{width}}  {agent.what} ({state})")


@contextmanager
def _server(url: str, model: str | None, *, may_start: bool) -> Iterator[Served]:
    """Yield a model of the server at this address, or of one that runs for the block."""
    from .remote.background import find, serving

    url = url.rstrip("/").removesuffix("/v1")
    key = os.environ.get(KEY_VARIABLE) or NO_KEY
    found = find(url, key, model)
    if found is not None:
        yield found
    elif model is None or not may_start:
        start = f"mlxinfer serve {shlex.quote(model or 'MODEL')} --port {url.rpartition(':')[2]}"
        other = "" if model else ", or say --model MODEL"
        raise ServerError(f"no server listens at {url}: start one with '{start}'{other}")
    else:
        with serving(url, key, model) as found:
            yield found


def _spelled(agent: Agent, settings: AgentSettings, arguments: tuple[str, ...]) -> Iterator[str]:
    """Yield the settings in shell syntax, without keys."""
    key = os.environ.get(KEY_VARIABLE)
    for name, value in settings.environment.items():
        hidden = key is not None and value == key
        if not (hidden and name == KEY_VARIABLE):
            yield f'export {name}="${KEY_VARIABLE}"' if hidden else f"export {name}={shlex.quote(value)}"
    yield shlex.join([agent.program, *settings.arguments, *arguments])


def _write(agent: Agent, settings: AgentSettings, tool: str, name: str) -> None:
    if not settings.file or agent.file is None:
        raise click.UsageError(f"{tool} takes variables and arguments only: see --print")
    file = (Path(name) if name != _HERE else agent.file).expanduser()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("x", encoding="utf-8") as target:
            target.write(settings.file)
    except FileExistsError:
        raise ServerError(f"{file} exists and is not replaced: name another file with --write FILE") from None
    except OSError as error:
        raise ServerError(f"cannot write {file}: {error.strerror}") from None
    click.echo(f"wrote {file}" + (f"; use it with: {agent.hint}" if name == _HERE else ""))


def _run(command: list[str], environment: dict[str, str]) -> int:
    """Run a program in the foreground, with Ctrl-C passed to it, and return its exit code."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        code = subprocess.run(
            command,
            env={**os.environ, **environment},
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            check=False,
        ).returncode
    except OSError as error:
        raise ServerError(f"cannot start {command[0]}: {error.strerror}") from None
    finally:
        signal.signal(signal.SIGINT, before)
    return code if code >= 0 else 128 - code
