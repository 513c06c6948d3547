"""Read, answer, repeat."""

from __future__ import annotations

import os
import sys
from contextlib import closing
from pathlib import Path

import click

from ...errors import MLXInferError
from ..text import usage_line
from .commands import COMMANDS, Leave, obey
from .conversation import Conversation
from .reading import PipeReader, Reader, TerminalReader
from .writing import Writer, meter, writer


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
