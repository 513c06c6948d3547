"""Slash commands of the chat."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Union

import click

from ...errors import MLXInferError
from ...types import Chunk
from ..common.console import human_bytes, nearest, tell, text_of_file, usage_line
from .attachments import copy_to_clipboard
from .conversation import SETTABLE, Conversation
from .pastes import folded
from .pictures import first_path
from .saved import Archive, Saved, export, line_of, messages, read, save, shortened
from .shown import Shown, last_exchange
from .tools import ToolRunner

if TYPE_CHECKING:
    from ...engine.llm import LLM
    from ..remote.remote_model import RemoteModel

Result = Union[str, Shown, Generator[Chunk, None, None]]
"""Result of a command: a text, turns of the conversation, or an answer of the model."""


ATTACHED = "It goes with your next message."


class Leave(Exception):
    """The user leaves the chat."""


@dataclass(slots=True)
class Session:
    """State of a chat: the conversation and its surroundings."""

    conversation: Conversation
    archive: Archive | None = None
    """Saves the conversation after each turn; None to save nothing."""
    stats: bool = True
    """True if a line about speed follows each answer."""
    runner: ToolRunner | None = None
    """Runs the model's tool calls; None without tools."""
    file: Path | None = None
    """File that the user saved to or loaded from."""
    switch: Callable[[str], LLM | RemoteModel] | None = None
    """Replaces the model by another one, given by name; None if the model is fixed."""
    folded: bool = True
    """True if reasoning is shown as one line instead of in full."""
    title: str = ""
    """Title of the conversation that the user chose."""

    def snapshot(self) -> Saved:
        """Return the saved form of the conversation."""
        return replace(self.conversation.snapshot(), title=self.title)

    def keep(self) -> None:
        """Save the conversation in the state folder. A disk error is reported once and does not end the chat."""
        if self.archive is None:
            return
        try:
            self.archive.keep(self.snapshot())
        except MLXInferError as error:
            self.archive = None
            tell(f"this conversation is no longer kept: {error}", problem=True)

    def restore(self, saved: Saved, *, archived: Path | None = None) -> Shown:
        """Continue a saved conversation, whose file in the state folder is `archived`. Returns its last exchange."""
        lost = self.conversation.restore(saved)
        if self.archive:
            self.archive.renew()
            if archived:
                self.archive.follow(archived)
        self.file, self.title = None, saved.title
        told = [messages(saved.turns)]
        if saved.model not in ("", self.conversation.name):
            told.append(f"the answers so far are from {saved.model}")
        if self.runner is None and any(turn.get("tool_calls") for turn in saved.turns):
            told.append("tools are off: start with --tools FILE.py to offer them again")
        return Shown(last_exchange(saved.turns), "\n".join(["; ".join(told), *lost]))


@dataclass(frozen=True, slots=True)
class Command:
    """A slash command."""

    run: Callable[[Session, str], Result]
    """Function of the session and the argument."""
    argument: str
    """Argument in the help; "" for none."""
    help: str


def _help(session: Session, argument: str) -> str:
    lines = [f"{name + ' ' + command.argument:<24} {command.help}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            *lines,
            "",
            "Enter sends. Alt-Enter, or \\ at the end of a line, starts a new line; so do lines between two triple quotes.",
            "Two slashes start a message with a slash. @FILE in a message adds the file's text, or the picture.",
            "A picture file that is dragged into the terminal goes with the message.",
            "Ctrl-C stops an answer, Ctrl-D leaves, Ctrl-R searches your history, Ctrl-X Ctrl-E opens $EDITOR.",
        ]
    )


def _reset(session: Session, argument: str) -> str:
    session.conversation.reset()
    session.file, session.title = None, ""
    if session.archive is None:
        return "New conversation."
    session.archive.renew()
    return "New conversation (/history lists the others)."


def _undo(session: Session, argument: str) -> str:
    return f"Removed: {shortened(session.conversation.undo(), 60)}"


def _trim(session: Session, argument: str) -> str:
    if argument and not (argument.isascii() and argument.isdigit() and int(argument[:9])):
        raise MLXInferError("/trim takes the number of messages to drop, or nothing for as many as leave half of the context free")
    count = session.conversation.trim(int(argument[:9]) if argument else None)
    used = _used(session.conversation)
    if not count:
        return f"Nothing to drop: {used}."
    return f"Dropped {f'the {count} oldest messages' if count > 1 else 'the oldest message'} with their answers: {used}."


def _used(conversation: Conversation) -> str:
    return f"{conversation.context_used:,} of {conversation.context_size:,} tokens used"


def _retry(session: Session, argument: str) -> Result:
    if session.conversation.turns and session.conversation.effective_params.greedy:
        tell("temperature is 0, so the answer will be the same: /set temperature 0.7 samples another one")
    return session.conversation.retry()


def _system(session: Session, argument: str) -> str:
    if argument:
        text = text_of_file(Path(argument[1:]).expanduser()) if argument.startswith("@") else argument
        session.conversation.system = None if argument == "none" else text
    return f"system: {session.conversation.system or 'none'}"


def _save(session: Session, argument: str, *, replace: bool = False) -> str:
    path = _path(argument) or session.file
    if path is None:
        raise MLXInferError("/save needs the name of a file")
    save(path, session.snapshot(), replace=replace or path == session.file)
    session.file = path
    return f"saved to {path}"


def _load(session: Session, argument: str) -> Shown:
    path = _path(argument)
    if path is None:
        raise MLXInferError("/load needs the name of a file")
    saved = read(path)
    shown = session.restore(saved)
    session.file = path
    first, *notes = shown.told.split("\n")
    return replace(shown, told="\n".join([f"{first} from {path}", *notes]))


def _path(argument: str) -> Path | None:
    """Return the path in the argument, which may be quoted or escaped as in a shell."""
    try:
        words = shlex.split(argument)
    except ValueError:
        words = []
    return Path(words[0] if len(words) == 1 else argument).expanduser() if argument else None


def _history(session: Session, argument: str) -> Result:
    archive = session.archive or Archive()
    if not argument.isdecimal():
        return "\n".join([*archive.lines(text=argument), "/history N continues one, /history TEXT searches, /delete N deletes one."])
    path = _numbered(archive, argument)
    return session.restore(read(path), archived=path)


def _numbered(archive: Archive, argument: str) -> Path:
    files = archive.files()
    if not (argument.isascii() and argument.isdecimal() and 1 <= int(argument[:9]) <= len(files)):
        raise MLXInferError(f"No conversation has the number {argument!r}: /history lists them.")
    return files[int(argument[:9]) - 1]


def _delete(session: Session, argument: str) -> str:
    archive = session.archive or Archive()
    path = _numbered(archive, argument)
    if not sys.stdin.isatty():
        raise MLXInferError("/delete asks first, so it needs a terminal")
    try:
        agreed = click.confirm(f"Delete {line_of(path)}", err=True)
    except click.Abort:
        agreed = False
    if agreed:
        archive.delete(path)
    return "Deleted." if agreed else "Kept."


def _title(session: Session, argument: str) -> str:
    if argument:
        session.title = shortened(argument, 80)
        if session.conversation.turns:
            session.keep()
    return f"title: {session.title or 'none'}"


def _export(session: Session, argument: str) -> str:
    path = _path(argument)
    if path is None:
        raise MLXInferError("/export needs the name of a file, such as talk.md")
    export(path, session.snapshot())
    return f"exported to {path}"


def _show(session: Session, argument: str) -> Shown:
    turns = session.conversation.turns
    if not turns:
        raise MLXInferError("Nothing to show: no message has been sent yet.")
    if argument not in ("", "last"):
        raise MLXInferError("/show takes last, or nothing for the whole conversation")
    return Shown(last_exchange(turns) if argument else list(turns), asked=True)


def _set(session: Session, argument: str) -> str:
    name, _, text = argument.replace("=", " ", 1).partition(" ")
    if not name:
        return "\n".join([*(_setting(session.conversation, each) for each in SETTABLE), _stats_setting(session)])
    if name == "stats":
        if text.strip() not in ("", "on", "off"):
            raise MLXInferError("/set stats takes on or off")
        session.stats = text.strip() == "on" if text.strip() else session.stats
        return _stats_setting(session)
    name = session.conversation.setting(name, text.strip() or None)
    if text.strip():
        session.conversation.set(name, _value(text.strip()))
    return _setting(session.conversation, name)


def _setting(conversation: Conversation, name: str) -> str:
    value = getattr(conversation.effective_params, name)
    return f"{name:<20} {'none' if value is None or value == () else value}"


def _stats_setting(session: Session) -> str:
    return f"{'stats':<20} {'on' if session.stats else 'off'}"


def _value(text: str) -> object:
    """Return a JSON value, None for "none", or the text itself."""
    if text == "none":
        return None
    try:
        return json.loads(text)
    except ValueError:
        return text


def _edit(session: Session, argument: str) -> Result:
    if not sys.stdin.isatty():
        raise MLXInferError("/edit needs a terminal")
    before = session.conversation.last_message
    try:
        text = click.edit(before or "", extension=".md")
    except click.ClickException as error:
        raise MLXInferError(f"/edit: {error.message} (set $EDITOR)") from error
    if text is None or not text.strip() or text.strip() == before:
        return "Nothing was changed."
    if before is not None:
        session.conversation.undo()
    tell(f"> {folded(text.strip())}")
    return session.conversation.ask(text.strip())


def _copy(session: Session, argument: str) -> str:
    turns = session.conversation.turns
    if not turns or turns[-1]["role"] != "assistant":
        raise MLXInferError("Nothing to copy: there is no answer yet.")
    copy_to_clipboard(turns[-1]["content"])
    return f"copied {len(turns[-1]['content'])} characters"


def _model(session: Session, argument: str) -> str:
    conversation = session.conversation
    if not argument:
        bytes_read = human_bytes(conversation.weight_bytes)
        return (
            f"{conversation.name}: {bytes_read} of weights, a context of {conversation.context_size} tokens. /model NAME opens another one"
        )
    if session.switch is None:
        raise MLXInferError("/model: this chat has only this model")
    if session.runner is not None:
        tell("The tools stay the same.")
    path = _path(argument)
    conversation.use(session.switch, str(path) if path is not None else argument)
    return f"Now talking to {conversation.name} ({_used(conversation)})."


def _tokens(session: Session, argument: str) -> str:
    if argument:
        return f"{session.conversation.count_text(argument)} tokens"
    lines = [f"{count:>7}  {name}" for name, count in session.conversation.token_counts()]
    return "\n".join([*lines, f"{session.conversation.context_used:>7}  of {session.conversation.context_size} tokens used"])


def _image(session: Session, argument: str) -> Result:
    """Attach a picture. With a text after the path, the message is sent."""
    found = first_path(argument)
    if found is None:
        raise MLXInferError("/image takes a picture file, and a text to send with it")
    path, text = found
    whole = Path(os.path.expanduser(argument))
    if not path.exists() and whole.exists():  # spaces without quotes
        path, text = whole, ""
    tell(session.conversation.attach(path))
    return session.conversation.ask(text.strip()) if text.strip() else ATTACHED


def _tools(session: Session, argument: str) -> str:
    if session.runner is None:
        return "No tools. Start with --tools FILE.py to offer some."
    return "\n".join(f"{name:<20} {shortened(tool.description or '', 60)}" for name, tool in session.runner.tools.items())


def _thinking(session: Session, argument: str) -> str:
    if argument in ("full", "folded"):
        session.folded = argument == "folded"
        return f"thinking is shown {'as one line' if session.folded else 'in full'}"
    if argument:
        raise MLXInferError("/thinking takes full or folded, or nothing for the reasoning of the last answer")
    thought = next((turn.get("reasoning") for turn in reversed(session.conversation.turns) if turn["role"] == "assistant"), None)
    return thought.strip() if thought else "The last answer has no reasoning."


def _stats(session: Session, argument: str) -> str:
    conversation = session.conversation
    lines = [conversation.name, f"context {conversation.context_used} of {conversation.context_size} tokens"]
    if conversation.usage:
        lines.append(usage_line(conversation.usage))
    if line := conversation.experts_line():
        lines.append(line)
    return "\n".join(lines)


def _exit(session: Session, argument: str) -> str:
    raise Leave


COMMANDS = {
    "/help": Command(_help, "", "this list"),
    "/reset": Command(_reset, "", "start a new conversation; the system message stays"),
    "/undo": Command(_undo, "", "remove the last message and its answer, to edit and send it again"),
    "/retry": Command(_retry, "", "answer the last message again, differently"),
    "/edit": Command(_edit, "", "change the last message in $EDITOR, and send it again"),
    "/continue": Command(lambda session, _: session.conversation.resume(), "", "resume an answer that was stopped or reached max_tokens"),
    "/image": Command(_image, "FILE [TEXT]", "show a picture to the model, with the text or with the next message"),
    "/copy": Command(_copy, "", "copy the last answer to the clipboard"),
    "/trim": Command(_trim, "[N]", "drop the N oldest messages with their answers, to make room in the context"),
    "/system": Command(_system, "[TEXT|@FILE]", "show or change the system message; none removes it"),
    "/model": Command(_model, "[NAME]", "show the model, or talk to another one"),
    "/tools": Command(_tools, "", "list the tools"),
    "/tokens": Command(_tokens, "[TEXT]", "show what fills the context, or count the tokens of a text"),
    "/save": Command(_save, "FILE", "write the conversation; /save! replaces another one"),
    "/load": Command(_load, "FILE", "continue a saved conversation"),
    "/show": Command(_show, "[last]", "show the whole conversation, or its last exchange"),
    "/export": Command(_export, "FILE.md", "write the conversation as Markdown"),
    "/history": Command(_history, "[N|TEXT]", "list the kept conversations or those with a text, or continue one"),
    "/title": Command(_title, "[TEXT]", "show or choose the conversation's title in that list"),
    "/delete": Command(_delete, "N", "delete a kept conversation"),
    "/set": Command(_set, "[NAME [VALUE]]", "show or change sampling, such as temperature; /set stats off hides the speed line"),
    "/thinking": Command(_thinking, "[full|folded]", "show the reasoning of the last answer, or change how reasoning is shown"),
    "/stats": Command(_stats, "", "context and speed"),
    "/exit": Command(_exit, "", "leave"),
}
_OTHER_NAMES = {"/quit": "/exit", "/bye": "/exit", "/?": "/help", "/clear": "/reset", "/new": "/reset", "/rename": "/title"}
_COMMAND = re.compile(r"\s*(/(?:[A-Za-z]+!?|\?))(?:\s+(.*))?", re.DOTALL)


def is_command(line: str) -> bool:
    """Return True for a command, False for a message."""
    return _COMMAND.fullmatch(line) is not None


def obey(session: Session, line: str) -> Result:
    """Run a command. Raises `MLXInferError` for an unknown or invalid one, `Leave` to end the chat."""
    found = _COMMAND.fullmatch(line)
    assert found is not None
    name, argument = found.group(1).lower(), (found.group(2) or "").strip()
    if name == "/save!":
        return _save(session, argument, replace=True)
    command = COMMANDS.get(_OTHER_NAMES.get(name, name))
    if command is None:
        near = nearest(name, COMMANDS)
        advice = f"Did you mean {near}?" if near else "/help lists the commands."
        raise MLXInferError(f"Unknown command {name}. {advice} To send a message with a slash, type two.")
    return command.run(session, argument)
