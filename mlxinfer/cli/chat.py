"""Talk with a model in the terminal."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from ..errors import PromptError
from .common.console import fitted
from .common.default_model import default_model
from .common.model_command import ModelCommand
from .common.options import (
    chat_sampling_options,
    chosen_sampling,
    complete_model,
    engine_options,
    one_sequence_options,
    own_adapter,
    server_options,
    split,
    system_option,
)
from .remote.choice import reached

if TYPE_CHECKING:
    from ..engine.llm import LLM
    from .remote.remote_model import RemoteModel
    from .repl.saved import Archive
    from .repl.tools import ToolRunner

_TOOLS_HELP = "Offer the functions in FILE.py to the model; each call is shown and runs only if you agree."


_EXAMPLES = """\b
Examples:
  mlxinfer chat smollm2
  mlxinfer chat -c
  mlxinfer chat smollm2 -s @persona.txt -t 0.9
  mlxinfer chat smollm2 --tools tools.py"""


@click.command(short_help="Talk with a model.", cls=ModelCommand, epilog=_EXAMPLES)
@click.argument("model", required=False, shell_complete=complete_model)
@system_option
@click.option("--continue", "-c", "resume", is_flag=True, help="Continue the last conversation; without MODEL, with its model.")
@click.option("--list", "listed", is_flag=True, help="List the kept conversations, and exit.")
@click.option("--search", metavar="TEXT", help="List the kept conversations that contain TEXT, and exit.")
@click.option("--keep/--no-keep", default=None, help="Keep this conversation for --continue.  [default: on a terminal]")
@click.option("--tools", "tools_file", metavar="FILE.py", type=click.Path(exists=True, dir_okay=False), help=_TOOLS_HELP)
@click.option("--quiet", "-q", is_flag=True, help="No notes, and no line about speed after each answer.")
@chat_sampling_options
@server_options
@one_sequence_options
@engine_options
def chat(model: str | None, listed: bool, search: str | None, **options: Any) -> None:
    """Talk with MODEL. Ctrl-C stops an answer, Ctrl-D leaves, /help lists the commands.

    Without MODEL, the largest one here that fits answers; if none is here, one is offered.

    Conversations on a terminal are kept in the state folder, the last 1,000 of them. Where standard input is a pipe, every line is a
    message, the answers alone go to standard output, and the exit code is 2 if a message failed.
    """
    from .repl.saved import Archive

    if listed or search:
        click.echo(fitted("\n".join(Archive().lines(1000, search or "")), sys.stdout))
    else:
        click.get_current_context().exit(_talk(model, Archive(), **options))


def _talk(
    model: str | None,
    archive: Archive,
    *,
    system: str | None,
    resume: bool,
    keep: bool | None,
    tools_file: str | None,
    quiet: bool,
    **options: Any,
) -> int:
    """Run a chat and return the exit code."""
    from .repl.commands import Session
    from .repl.conversation import Conversation
    from .repl.loop import converse
    from .repl.saved import source_of

    model_settings, given = split(options)
    own_adapter(model_settings)
    params = chosen_sampling(given)
    path, saved = archive.last() if resume else (None, None)
    model = model or (saved.source if saved else "") or default_model(quiet=quiet)
    source = source_of(model)
    if keep is None:
        keep = resume or (sys.stdin.isatty() and sys.stdout.isatty())
    runner = None if tools_file is None else _runner(tools_file)
    with ExitStack() as stack:
        llm = stack.enter_context(reached(model, model_settings, quiet=quiet))
        tools = None if runner is None else runner.tools
        conversation = Conversation(llm, params, system, source, tools)
        session = Session(
            conversation, archive if keep else None, not quiet, runner, switch=partial(_switch, stack, model_settings, source)
        )
        shown = None
        if saved:
            chosen = {name: value for name, value in given.items() if value is not None and value != ()}
            kept = replace(saved, params=replace(saved.params, **chosen) if saved.params else params)
            shown = session.restore(kept, archived=path)
            session.conversation.system = system if system is not None else saved.system
        return converse(session, shown)


def _switch(stack: ExitStack, settings: dict[str, Any], first: str, model: str) -> LLM | RemoteModel:
    """Close the present model and open another one, which must exist. The adapter belongs to the first model. Raises `MLXInferError`."""
    from ..loading.find.resolve import resolve

    resolve(model)
    stack.close()
    return stack.enter_context(reached(model, settings if model == first else {**settings, "adapters": None}))


def _runner(tools_file: str) -> ToolRunner:
    """Return a runner of the tools in a file. Raises `PromptError`."""
    from pathlib import Path

    from .repl.tools import ToolRunner, tools_of_file

    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise PromptError("--tools asks before each call, so it needs a terminal")
    return ToolRunner(tools_of_file(Path(tools_file)))
