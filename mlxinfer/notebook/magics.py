"""`%load_ext mlxinfer`: `%chat` and `%%chat` talk to a model in the cells of a notebook, as one conversation."""

from __future__ import annotations

import shlex
from argparse import ArgumentParser
from typing import TYPE_CHECKING, Any, NoReturn

from ..errors import MLXInferError, SettingError
from ..types import SamplingParams
from .display import stream

if TYPE_CHECKING:
    from ..engine.llm import LLM

DEFAULT_MODEL = "smollm2"


class _Options(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingError(f"%%chat: {message}. {self.format_usage().strip()}")


def _options() -> _Options:
    parser = _Options(prog="%%chat", add_help=False)
    parser.add_argument("-m", "--model", help=f"load this one first (default: {DEFAULT_MODEL})")
    parser.add_argument("-s", "--system", help="begin anew with this system prompt")
    parser.add_argument("-n", "--max-tokens", type=int, help="length of the answer in tokens")
    parser.add_argument("-t", "--temperature", type=float, help="0 is greedy")
    parser.add_argument("--new", action="store_true", help="begin a new conversation")
    return parser


class Conversation:
    """The one conversation of a notebook, with its model."""

    def __init__(self) -> None:
        self.llm: LLM | None = None
        self.messages: list[dict[str, Any]] = []

    def chat(self, line: str, cell: str | None = None) -> None:
        """`%chat TEXT`, or `%%chat [OPTIONS]` with the text in the cell. Shows the answer as it comes; `messages` keeps it."""
        text, options = (line, "") if cell is None else (cell, line)
        try:
            given = _options().parse_args(shlex.split(options))
        except ValueError as error:  # an open quote
            raise SettingError(f"%%chat: {error}") from error
        if given.model or self.llm is None:
            self.use(given.model or DEFAULT_MODEL)
        if given.new or given.system is not None:
            self.messages = []
        if given.system:
            self.messages = [{"role": "system", "content": given.system}]
        if text.strip():
            self._ask(text.strip(), SamplingParams(max_tokens=given.max_tokens or 1024, temperature=given.temperature))

    def use(self, model: str | LLM) -> None:
        """Go on with another model: an `LLM`, or what it is asked for by. Raises `MLXInferError`."""
        from ..engine.llm import LLM

        opened = LLM(model) if isinstance(model, str) else model
        if self.llm is not None and isinstance(model, str):
            self.llm.close()
        self.llm = opened

    def _ask(self, text: str, params: SamplingParams) -> None:
        assert self.llm is not None
        messages = [*self.messages, {"role": "user", "content": text}]
        completion = stream(self.llm, messages, params, markdown=True)
        self.messages = [*messages, {"role": "assistant", "content": completion.text}]


def load(shell: Any) -> None:
    """Add the magics and the looks of mlxinfer's objects to an IPython shell."""
    from .formats import register

    conversation = Conversation()

    def chat(line: str, cell: str | None = None) -> None:
        """Ask the model: `%chat How are you?`, or `%%chat --system "Answer in French." --temperature 0` above the text. The cells of a
        notebook are one conversation; `--new` begins another, `--model NAME` changes the model. ■ stops the answer, and keeps it."""
        try:
            conversation.chat(line, cell)
        except MLXInferError as error:
            print(f"mlxinfer: {error}")  # noqa: T201

    shell.register_magic_function(chat, "line_cell", "chat")
    shell.push({"conversation": conversation}, interactive=False)
    register(shell)
