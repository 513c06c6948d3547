"""Read, answer, repeat."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, fields
from pathlib import Path

import click

from ...errors import MLXInferError
from ..console import usage_line
from .conversation import FIXED, Conversation
from .terminal import PipeReader, Reader, TerminalReader, Writer, meter, writer


class Leave(Exception):
    """The user wants to go."""


@dataclass(frozen=True, slots=True)
class Command:
    run: Callable[[Conversation, str], str]
    argument: str
    help: str


def _help(conversation: Conversation, argument: str) -> str:
    lines = [f"{name + ' ' + command.argument:<22} {command.help}" for name, command in COMMANDS.items()]
    keys = ["Enter sends; Alt-Enter, or a \\ at the end of a line, begins a new line; so do lines between two triple quotes.", ""]
    return "\n".join([*lines, "", *keys]).rstrip() + "\nCtrl-C stops an answer, Ctrl-D leaves."


def _reset(conversation: Conversation, argument: str) -> str:
    conversation.reset()
    return "a new conversation"


def _system(conversation: Conversation, argument: str) -> str:
    if argument:
        conversation.system = None if argument == "none" else argument
    return f"system: {conversation.system or 'none'}"


def _save(conversation: Conversation, argument: str) -> str:
    path = _path(argument, "/save")
    conversation.save(path)
    return f"saved to {path}"


def _load(conversation: Conversation, argument: str) -> str:
    path = _path(argument, "/load")
    conversation.load(path)
    return f"{len(conversation.turns)} messages from {path}"


def _path(argument: str, command: str) -> Path:
    if not argument:
        raise MLXInferError(f"{command} needs the name of a file")
    return Path(argument).expanduser()


def _set(conversation: Conversation, argument: str) -> str:
    name, _, text = argument.replace("=", " ", 1).partition(" ")
    if name and not text.strip():
        raise MLXInferError(f"/set needs a name and a value, such as /set {name} 0.7")
    if name:
        conversation.set(name, _value(text.strip()))
    shown = [field.name for field in fields(conversation.params) if field.name not in FIXED]
    return "\n".join(f"{name:<20} {_text(getattr(conversation.params, name))}" for name in ([name] if name else shown))


def _value(text: str) -> object:
    """A number, true, false, a list or an object as in JSON; none; anything else is text."""
    if text == "none":
        return None
    try:
        return json.loads(text)
    except ValueError:
        return text


def _text(value: object) -> str:
    return "none" if value is None or value == () else str(value)


def _stats(conversation: Conversation, argument: str) -> str:
    lines = [conversation.name, f"context {conversation.context_used} of {conversation.context_size} tokens"]
    if conversation.usage:
        lines.append(usage_line(conversation.usage))
    return "\n".join(lines)


def _exit(conversation: Conversation, argument: str) -> str:
    raise Leave


COMMANDS = {
    "/help": Command(_help, "", "this list"),
    "/reset": Command(_reset, "", "forget the conversation; the system message stays"),
    "/system": Command(_system, "[TEXT]", "show or change the system message; none removes it"),
    "/save": Command(_save, "FILE", "write the conversation"),
    "/load": Command(_load, "FILE", "go on with a saved conversation"),
    "/set": Command(_set, "[NAME VALUE]", "show or change how tokens are chosen, such as temperature"),
    "/stats": Command(_stats, "", "context and speed"),
    "/exit": Command(_exit, "", "leave"),
}


def obey(conversation: Conversation, line: str) -> str:
    """Run the command in a line. Raises `MLXInferError` for an unknown or wrong one, `Leave` to end."""
    name, _, argument = line.strip().partition(" ")
    command = COMMANDS.get(name)
    if command is None:
        raise MLXInferError(f"there is no {name}: /help lists the commands")
    return command.run(conversation, argument.strip())


def converse(conversation: Conversation) -> None:
    """Until the input ends or the user leaves. Only errors that end the program come out of here."""
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    reader, out = _reader(conversation, interactive), writer()
    if interactive:
        _say(f"{conversation.name} · context of {conversation.context_size} tokens · /help lists the commands")
    hint_given = False
    while True:
        try:
            line = reader.read()
        except KeyboardInterrupt:
            if hint_given or not interactive:
                raise
            hint_given = True
            _say("Ctrl-C again, or Ctrl-D, leaves")
            continue
        except EOFError:
            return
        hint_given = False
        try:
            _handle(conversation, line, out, interactive)
        except Leave:
            return
        except KeyboardInterrupt:
            if not interactive:
                raise


def _reader(conversation: Conversation, interactive: bool) -> Reader:
    if not interactive:
        return PipeReader()
    return TerminalReader(COMMANDS, lambda: f" {conversation.name}  {meter(conversation)}", _state_folder() / "history")


def _state_folder() -> Path:
    """Where this user's programs keep what is not worth a backup."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "mlxinfer"
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "mlxinfer"


def _handle(conversation: Conversation, line: str, out: Writer, interactive: bool) -> None:
    """A command or a question. Errors are told, and the chat goes on."""
    try:
        if line.lstrip().startswith("/"):
            _say(obey(conversation, line))
        elif line.strip():
            _answer(conversation, line, out, interactive)
    except MLXInferError as error:
        click.secho(str(error), err=True, fg="red")


def _answer(conversation: Conversation, text: str, out: Writer, interactive: bool) -> None:
    with closing(conversation.ask(text)) as chunks:
        try:
            out.begin("reading…")
            for chunk in chunks:
                out.text(chunk.text)
        except KeyboardInterrupt:
            if not interactive:
                raise
        finally:
            out.end()
    if interactive:
        _say(_summary(conversation))


def _summary(conversation: Conversation) -> str:
    if conversation.finish_reason == "cancelled":
        return "stopped"
    shown = usage_line(conversation.usage) if conversation.usage else ""
    return shown + (" · stopped for length" if conversation.finish_reason == "length" else "")


def _say(text: str) -> None:
    click.secho(text, err=True, dim=True)
