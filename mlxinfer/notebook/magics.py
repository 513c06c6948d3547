"""Magics of `%load_ext mlxinfer`: `%chat` and `%%chat` continue one conversation over a notebook's cells."""

from __future__ import annotations

import re
import shlex
from argparse import ArgumentParser
from io import StringIO
from typing import TYPE_CHECKING, Any, NoReturn

from ..errors import MLXInferError, SettingError
from ..types import SamplingParams
from .display import stream

if TYPE_CHECKING:
    from ..engine.llm import LLM

DEFAULT_MODEL = "smollm2"
_FLAGS = ("--new",)
"""Options without a value."""


_NOTHING = "write the message after it, as in %chat How are you?, or in a cell below %%chat"


class _Options(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingError(f"{self.prog}: {message}. {self.format_usage().strip()}")


def _options(magic: str) -> _Options:
    parser = _Options(prog=magic, add_help=False)
    parser.add_argument("-m", "--model", help=f"load this one first (default: {DEFAULT_MODEL})")
    parser.add_argument("-s", "--system", help="begin anew with this system prompt")
    parser.add_argument("-n", "--max-tokens", type=int, help="length of the answer in tokens")
    parser.add_argument("-t", "--temperature", type=float, help="0 is greedy")
    parser.add_argument("-i", "--image", action="append", default=[], help="show this picture file to the model; repeatable")
    parser.add_argument("--new", action="store_true", help="begin a new conversation")
    return parser


class CellConversation:
    """Conversation of a notebook, with its model."""

    def __init__(self) -> None:
        self.llm: LLM | None = None
        self.messages: list[dict[str, Any]] = []

    def chat(self, line: str, cell: str | None = None) -> None:
        """Run `%chat [OPTIONS] TEXT`, or `%%chat [OPTIONS]` with the text in the cell: stream the answer and append it to `messages`.

        Raises `MLXInferError`.
        """
        magic = "%chat" if cell is None else "%%chat"
        try:
            options, text = _divided(line) if cell is None else (shlex.split(line), cell)
        except ValueError as error:  # an open quote
            raise SettingError(f"{magic}: {error}") from None
        given = _options(magic).parse_args(options)
        if not text.strip() and not options:
            raise SettingError(f"{magic}: nothing to send: {_NOTHING}")
        if given.model or self.llm is None:
            self.use(given.model or DEFAULT_MODEL)
        if given.new or given.system is not None:
            self.messages = []
        if given.system:
            self.messages = [{"role": "system", "content": given.system}]
        if text.strip():
            params = SamplingParams(max_tokens=given.max_tokens or 1024, temperature=given.temperature)
            self._ask(text.strip(), given.image, params)

    def use(self, model: str | LLM) -> None:
        """Continue with another model: an `LLM` or a name. Raises `MLXInferError`."""
        from ..engine.llm import LLM

        opened = LLM(model) if isinstance(model, str) else model
        if self.llm is not None and isinstance(model, str):
            self.llm.close()
        self.llm = opened

    def _ask(self, text: str, images: list[str], params: SamplingParams) -> None:
        assert self.llm is not None
        pictures = [{"type": "image", "image": image} for image in images]
        content = [*pictures, {"type": "text", "text": text}] if pictures else text
        messages = [*self.messages, {"role": "user", "content": content}]
        completion = stream(self.llm, messages, params, markdown=True)
        self.messages = [*messages, {"role": "assistant", "content": completion.text}]


def _divided(line: str) -> tuple[list[str], str]:
    """Split a line into options and text, which starts after `--` or with the first word that is neither an option nor its value.

    Raises ValueError for an unclosed quote.
    """
    options: list[str] = []
    rest = line.lstrip()
    while re.match(r"--?[A-Za-z]", rest):
        option, rest = _word(rest)
        options.append(option)
        if option not in _FLAGS and "=" not in option and rest:
            value, rest = _word(rest)
            options.append(value)
    return options, rest[2:].lstrip() if re.match(r"--(\s|$)", rest) else rest


def _word(text: str) -> tuple[str, str]:
    """Return (first word without quotes, rest) in shell syntax, reading the text only to the word's end."""
    characters = StringIO(text)
    lexer = shlex.shlex(characters, posix=True)
    lexer.whitespace_split, lexer.commenters = True, ""
    return lexer.get_token() or "", characters.read().lstrip()


def _asks(lines: list[str]) -> list[str]:
    """Convert lines `%chat ...?` to calls, because IPython treats a final question mark as a request for help."""
    return [
        f"get_ipython().run_line_magic('chat', {line[6:].strip()!r})\n" if re.fullmatch(r"%chat .*\?\s*", line) else line for line in lines
    ]


def load(shell: Any) -> None:
    """Add the magics and the HTML display to an IPython shell."""
    from .formats import register

    conversation = CellConversation()

    def chat(line: str, cell: str | None = None) -> None:
        """Ask the model: `%chat How are you?`, or `%%chat --system "Answer in French." --temperature 0` above the text.

        Both accept options. The cells of a notebook are one conversation; `--new` starts another, `--model NAME` changes the model,
        `--image FILE` shows a picture to the model. ■ stops the answer and keeps its text.
        """
        try:
            conversation.chat(line, cell)
        except MLXInferError as error:
            print(f"mlxinfer: {error}")  # noqa: T201

    shell.register_magic_function(chat, "line_cell", "chat")
    shell.input_transformers_cleanup.append(_asks)
    shell.push({"conversation": conversation}, interactive=False)
    register(shell)
