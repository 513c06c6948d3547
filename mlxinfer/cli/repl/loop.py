"""Read, answer, repeat; and the commands that begin with a slash."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Generator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from ...errors import MLXInferError, PromptError
from ...types import Chunk
from ..console import did_you_mean, dumb_terminal, short_usage_line, tell, usage_line
from .conversation import SETTABLE, Conversation
from .saved import Archive, Saved, messages, read, save, shortened, state_folder
from .terminal import Keyboard, PipeReader, Reader, TerminalReader, Writer, bar, writer
from .tools import ToolRunner

FAILED = 2
"""Exit code of a chat over a pipe in which a message or a command failed."""


class Leave(Exception):
    """The user wants to go."""


@dataclass(slots=True)
class Session:
    """A conversation and what surrounds it on this screen."""

    conversation: Conversation
    """The conversation that goes on."""
    archive: Archive | None = None
    """Keeps the conversation after every turn; None where nothing is kept."""
    stats: bool = True
    """Whether a line about speed follows every answer."""
    runner: ToolRunner | None = None
    """Runs the calls that the model asks for; None without tools."""
    file: Path | None = None
    """Where the conversation was saved to or loaded from by the user."""

    def keep(self) -> None:
        """Write the conversation to the state folder. A disk that refuses is told once and does not end the chat."""
        if self.archive is None:
            return
        try:
            self.archive.keep(self.conversation.snapshot())
        except MLXInferError as error:
            self.archive = None
            tell(f"this conversation is no longer kept: {error}", problem=True)

    def restore(self, saved: Saved, *, archived: Path | None = None) -> str:
        """Go on with a saved conversation; `archived` is its file in the state folder. Returns what to tell the user."""
        self.conversation.restore(saved)
        if self.archive:
            self.archive.renew()
            if archived:
                self.archive.follow(archived)
        self.file = None
        other = saved.model if saved.model not in ("", self.conversation.name) else ""
        lines = [f"the answers so far are from {other}"] if other else []
        for turn in saved.turns[-2:]:
            lines.append(f"{'> ' if turn['role'] == 'user' else '  '}{shortened(turn['content'], 300)}")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Command:
    """What a command does, what follows its name, and its line in the help."""

    run: Callable[[Session, str], str]
    """What it does, with what follows its name; returns what to show."""
    argument: str
    """What follows its name, for the help; "" for nothing."""
    help: str
    """Its line in the help."""


def _help(session: Session, argument: str) -> str:
    lines = [f"{name + ' ' + command.argument:<20} {command.help}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            *lines,
            "",
            "Enter sends. Alt-Enter, or a \\ at the end of a line, begins a new line; so do lines between two triple quotes.",
            "A message that begins with a slash: type two of them.",
            "Ctrl-C stops an answer, Ctrl-D leaves.",
        ]
    )


def _reset(session: Session, argument: str) -> str:
    session.conversation.reset()
    session.file = None
    if session.archive is None:
        return "a new conversation"
    session.archive.renew()
    return "a new conversation (/history has the others)"


def _undo(session: Session, argument: str) -> str:
    return f"taken back: {shortened(session.conversation.undo(), 60)}"


def _trim(session: Session, argument: str) -> str:
    if argument and not (argument.isascii() and argument.isdigit() and int(argument[:9])):
        raise MLXInferError("/trim takes the number of messages to drop, or nothing for as many as leave half of the context free")
    count = session.conversation.trim(int(argument[:9]) if argument else None)
    used, size = session.conversation.context_used, session.conversation.context_size
    return f"dropped the {count} oldest messages and their answers: {used} of {size} tokens are used"


def _system(session: Session, argument: str) -> str:
    if argument:
        session.conversation.system = None if argument == "none" else argument
    return f"system: {session.conversation.system or 'none'}"


def _save(session: Session, argument: str, *, replace: bool = False) -> str:
    path = _path(argument) or session.file
    if path is None:
        raise MLXInferError("/save needs the name of a file")
    save(path, session.conversation.snapshot(), replace=replace or path == session.file)
    session.file = path
    return f"saved to {path}"


def _load(session: Session, argument: str) -> str:
    path = _path(argument)
    if path is None:
        raise MLXInferError("/load needs the name of a file")
    saved = read(path)
    shown = session.restore(saved)
    session.file = path
    return f"{messages(saved.turns)} from {path}\n{shown}".rstrip()


def _path(argument: str) -> Path | None:
    """A file's name, in quotes or with backslashes as in a shell, or as it is."""
    try:
        words = shlex.split(argument)
    except ValueError:
        words = []
    return Path(words[0] if len(words) == 1 else argument).expanduser() if argument else None


def _history(session: Session, argument: str) -> str:
    archive = session.archive or Archive()
    if not argument:
        return "\n".join([*archive.lines(), "/history NUMBER goes on with one of them"])
    files = archive.files()
    if not (argument.isascii() and argument.isdigit() and 1 <= int(argument[:9]) <= len(files)):
        raise MLXInferError(f"there is no conversation {argument}: /history lists them")
    path = files[int(argument[:9]) - 1]
    saved = read(path)
    return f"{messages(saved.turns)}\n{session.restore(saved, archived=path)}"


def _set(session: Session, argument: str) -> str:
    name, _, text = argument.replace("=", " ", 1).partition(" ")
    if not name:
        return "\n".join([*(_setting(session.conversation, each) for each in SETTABLE), _stats_setting(session)])
    if name == "stats":
        if text.strip() not in ("", "on", "off"):
            raise MLXInferError("/set stats takes on or off")
        session.stats = text.strip() == "on" if text.strip() else session.stats
        return _stats_setting(session)
    name = session.conversation.setting(name)
    if text.strip():
        session.conversation.set(name, _value(text.strip()))
    return _setting(session.conversation, name)


def _setting(conversation: Conversation, name: str) -> str:
    value = getattr(conversation.effective_params, name)
    return f"{name:<20} {'none' if value is None or value == () else value}"


def _stats_setting(session: Session) -> str:
    return f"{'stats':<20} {'on' if session.stats else 'off'}"


def _value(text: str) -> object:
    """A number, true, false, a list or an object as in JSON; none; anything else is text."""
    if text == "none":
        return None
    try:
        return json.loads(text)
    except ValueError:
        return text


def _stats(session: Session, argument: str) -> str:
    conversation = session.conversation
    lines = [conversation.name, f"context {conversation.context_used} of {conversation.context_size} tokens"]
    if conversation.usage:
        lines.append(usage_line(conversation.usage))
    return "\n".join(lines)


def _exit(session: Session, argument: str) -> str:
    raise Leave


COMMANDS = {
    "/help": Command(_help, "", "this list"),
    "/reset": Command(_reset, "", "begin a new conversation; the system message stays"),
    "/undo": Command(_undo, "", "take the last message and its answer back, to edit and send it again"),
    "/continue": Command(lambda session, _: "", "", "go on with an answer that was stopped or reached max_tokens"),
    "/trim": Command(_trim, "[N]", "drop the N oldest messages with their answers, to make room in the context"),
    "/system": Command(_system, "[TEXT]", "show or change the system message; none removes it"),
    "/save": Command(_save, "FILE", "write the conversation; /save! replaces another one"),
    "/load": Command(_load, "FILE", "go on with a saved conversation"),
    "/history": Command(_history, "[N]", "list the conversations that were kept, or go on with one"),
    "/set": Command(_set, "[NAME [VALUE]]", "show or change how tokens are chosen, such as temperature; stats off hides the speed"),
    "/stats": Command(_stats, "", "context and speed"),
    "/exit": Command(_exit, "", "leave"),
}
_OTHER_NAMES = {"/quit": "/exit", "/bye": "/exit", "/?": "/help", "/clear": "/reset", "/new": "/reset"}
_COMMAND = re.compile(r"\s*(/(?:[A-Za-z]+!?|\?))(?:\s+(.*))?", re.DOTALL)


def obey(session: Session, line: str) -> str:
    """Run the command in a line. Raises `MLXInferError` for an unknown or wrong one, `Leave` to end."""
    found = _COMMAND.fullmatch(line)
    assert found is not None
    name, argument = found.group(1).lower(), (found.group(2) or "").strip()
    if name == "/save!":
        return _save(session, argument, replace=True)
    command = COMMANDS.get(_OTHER_NAMES.get(name, name))
    if command is None:
        raise MLXInferError(f"there is no {name}{did_you_mean(name, COMMANDS)}: /help lists the commands, // sends a slash")
    return command.run(session, argument)


def converse(session: Session) -> int:
    """Until the input ends or the user leaves. Returns the exit code; only errors that end the program come out of here."""
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    chat = Chat(session, _reader(session, interactive), writer(), interactive)
    if interactive:
        conversation = session.conversation
        tell(f"{conversation.name} · context of {conversation.context_size} tokens · /help lists the commands")
    try:
        return chat.run()
    finally:
        chat.keyboard.restore()


def _reader(session: Session, interactive: bool) -> Reader:
    if not interactive:
        return PipeReader()
    if dumb_terminal():
        return PipeReader("> ")
    return TerminalReader(COMMANDS, lambda: bar(session.conversation, shutil.get_terminal_size().columns), state_folder() / "history")


class Chat:
    """The loop: reads a line, obeys or answers it, and says what went wrong."""

    def __init__(self, session: Session, reader: Reader, out: Writer, interactive: bool) -> None:
        self.session = session
        self.keyboard = Keyboard()
        self._reader = reader
        self._out = out
        self._interactive = interactive
        self._code = 0

    def run(self) -> int:
        """Returns the exit code."""
        hint_given = False
        while True:
            try:
                self.keyboard.restore()
                line = self._read()
            except KeyboardInterrupt:
                if hint_given or not self._interactive:
                    raise
                hint_given = True
                tell("Ctrl-C again, or Ctrl-D, leaves")
                continue
            except EOFError:
                return self._code
            hint_given = False
            try:
                self._handle(line)
            except Leave:
                return self._code
            except KeyboardInterrupt:
                if not self._interactive:
                    raise

    def _read(self) -> str:
        draft, self.session.conversation.draft = self.session.conversation.draft, ""
        try:
            return self._reader.read(draft)
        except PromptError as error:
            self._fail(error)
            return ""

    def _handle(self, line: str) -> None:
        """A command or a message. Errors are told, and the chat goes on."""
        try:
            command = _COMMAND.fullmatch(line)
            if command and command.group(1).lower() == "/continue":
                self._answer(self.session.conversation.resume())
            elif command:
                tell(obey(self.session, line))
            elif line.strip():
                self._answer(self.session.conversation.ask(line.lstrip()[1:] if line.lstrip().startswith("//") else line))
        except MLXInferError as error:
            self._fail(error)

    def _fail(self, error: MLXInferError) -> None:
        tell(str(error), problem=True)
        if not self._interactive:
            self._code = FAILED

    def _answer(self, chunks: Generator[Chunk, None, None]) -> None:
        progress = _Progress(self.session.conversation)
        with self.keyboard.hushed() if self._interactive else nullcontext():
            try:
                self._out.begin(progress.note)
                for chunk in chunks:
                    progress.writing = True
                    self._out.reasoning(chunk.reasoning)
                    self._out.text(chunk.text)
            except KeyboardInterrupt:
                if not self._interactive:
                    raise
            finally:
                chunks.close()
                self._out.end()
                self.session.keep()
        if self._interactive:
            tell(self._summary())
        self._run_calls()

    def _run_calls(self) -> None:
        """Run what the model asks for, as far as the user agrees, and let it go on with the results."""
        conversation, runner = self.session.conversation, self.session.runner
        if runner is not None and conversation.calls:
            self.keyboard.restore()
            self._answer(conversation.give([runner.result(call) for call in conversation.calls]))

    def _summary(self) -> str:
        conversation = self.session.conversation
        if conversation.draft:
            return "stopped before the first token: the message is back at the prompt"
        if conversation.finish_reason == "cancelled":
            return "stopped (/continue goes on)"
        stats = short_usage_line(conversation.usage) if conversation.usage and self.session.stats else ""
        return " · ".join(filter(None, [stats, conversation.why_stopped()]))


class _Progress:
    """What is going on before there is text to show."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self.writing = False

    def note(self) -> str:
        if self.writing:
            return "writing…"
        tokens = self._conversation.reading()
        return f"reading… {tokens[0]} of {tokens[1]} tokens" if tokens else "reading…"
