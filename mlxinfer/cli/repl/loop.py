"""Main loop of the chat."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Generator
from contextlib import nullcontext

from ...errors import ContextLengthError, ImageError, MLXInferError, PromptError
from ...types import Chunk
from ..common.console import dumb_terminal, short_usage_line, tell
from ..common.waiting import Progress
from .attachments import named_pictures, with_files
from .commands import ATTACHED, COMMANDS, Leave, Session, is_command, obey
from .pictures import dropped
from .reader import PipeReader, Reader, TerminalReader
from .saved import state_folder
from .shown import Shown
from .terminal import AnswerWriter, Keyboard, bar, writer

FAILED = 2
"""Exit code of a piped chat in which a message or a command failed."""
FIRST_STEPS = """\
Enter sends, Alt-Enter starts a new line. Ctrl-C stops an answer, Ctrl-D leaves, Ctrl-R searches your history.
@FILE in a message adds the file's text. /undo removes the last message, /retry answers it again.
Conversations stay on this machine, for you alone: mlxinfer chat --continue continues the last one, --no-keep keeps none."""
"""Introduction for users without a history of messages."""


def converse(session: Session, shown: Shown | None = None) -> int:
    """Chat until the input ends or the user leaves, and return the exit code. `shown` are the turns of a continued conversation.

    Raises only errors that end the program.
    """
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    new_here = interactive and not (state_folder() / "history").exists()
    chat = Chat(session, _reader(session, interactive), writer(lambda: session.folded), interactive)
    if interactive:
        conversation = session.conversation
        tell(f"{conversation.name} · context of {conversation.context_size} tokens · /help lists the commands")
    if new_here:
        tell(FIRST_STEPS)
    if shown is not None:
        chat.show(shown)
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
    """Loop that reads a line, runs the command or answers the message, and reports errors."""

    def __init__(self, session: Session, reader: Reader, out: AnswerWriter, interactive: bool) -> None:
        self.session = session
        self.keyboard = Keyboard()
        self._reader = reader
        self._out = out
        self._interactive = interactive
        self._code = 0

    def run(self) -> int:
        """Run the loop and return the exit code."""
        hint_given = False
        while True:
            try:
                self.keyboard.restore()
                line = self._read()
            except KeyboardInterrupt:
                if hint_given or not self._interactive:
                    raise
                hint_given = True
                tell("Press Ctrl-C again, or Ctrl-D, to leave.")
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
        """Handle a command or a message. Errors are reported and the chat continues."""
        try:
            if is_command(line):
                result = obey(self.session, line)
                if isinstance(result, str):
                    tell(result)
                elif isinstance(result, Shown):
                    self.show(result)
                else:
                    self._answer(result)
            elif line.strip():
                self._ask(line.lstrip()[1:] if line.lstrip().startswith("//") else line)
        except MLXInferError as error:
            self._fail(error)

    def show(self, shown: Shown) -> None:
        """Show turns of the conversation; a pipe gets them only on request."""
        if shown.told:
            tell(shown.told)
        if self._interactive or shown.asked:
            shown.write(self._out)

    def _ask(self, line: str) -> None:
        """Send a message with its files. On a terminal, the oldest messages are dropped if the context is full."""
        conversation = self.session.conversation
        line = self._attached(line)
        if not line.strip():
            tell(ATTACHED)
            return
        text, files = with_files(line)
        for file in files:
            tell(f"with {file}")
        try:
            self._answer(conversation.ask(text))
        except ContextLengthError:
            dropped = conversation.make_room(text) if self._interactive else 0
            if not dropped:
                raise
            tell(f"the context is full: dropped the oldest {f'{dropped} messages' if dropped > 1 else 'message'} with their answers")
            self._answer(conversation.ask(text))

    def _attached(self, line: str) -> str:
        """Attach the pictures that were dropped into a message or are named in it, and return its text."""
        conversation = self.session.conversation
        before = list(conversation.pending)
        paths, text = dropped(line)
        try:
            for path in (*paths, *named_pictures(text)):
                tell(conversation.attach(path))
        except ImageError:
            conversation.pending, conversation.draft = before, line
            raise
        return text

    def _fail(self, error: MLXInferError) -> None:
        tell(str(error), problem=True)
        if not self._interactive:
            self._code = FAILED

    def _answer(self, chunks: Generator[Chunk, None, None]) -> None:
        progress = Progress(self.session.conversation.reading)
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
        """Run the model's tool calls that the user accepts, and continue with the results."""
        conversation, runner = self.session.conversation, self.session.runner
        if runner is not None and conversation.calls:
            self.keyboard.restore()
            self._answer(conversation.give([runner.result(call) for call in conversation.calls]))

    def _summary(self) -> str:
        conversation = self.session.conversation
        if conversation.draft:
            return "Stopped before the first token: the message is back at the prompt."
        if conversation.finish_reason == "cancelled":
            return "Stopped. /continue resumes."
        stats = short_usage_line(conversation.usage) if conversation.usage and self.session.stats else ""
        return " · ".join(filter(None, [stats, conversation.why_stopped()]))
