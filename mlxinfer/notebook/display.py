"""Streams an answer into a notebook cell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from html import escape
from inspect import isasyncgen
from time import perf_counter
from typing import TYPE_CHECKING, Any, Union

from ..errors import MLXInferError
from ..types import Chunk, Completion, SamplingParams, Usage
from ..util.words import counted

if TYPE_CHECKING:
    from ..engine.llm import LLM

Messages = Sequence[Mapping[str, Any]]

_REDRAW_S = 0.1
"""Seconds between two updates of a cell; the front end draws each update."""


def stream(llm: LLM, prompt: Union[str, Messages], params: SamplingParams | None = None, *, markdown: bool = False) -> Completion:
    """Stream the answer to a prompt or messages into the running cell, as text or `markdown`.

    Interrupting the cell stops the generation; the text so far is returned with `finish_reason` "cancelled". Outside of IPython the text is
    printed. Raises as `LLM.stream` does, and `MLXInferError` for an `AsyncLLM`.
    """
    chunks = llm.stream(prompt, params) if isinstance(prompt, str) else llm.stream_chat(prompt, params)
    if isasyncgen(chunks):
        raise MLXInferError("stream needs an LLM: an AsyncLLM's answer is read with `async for chunk in llm.stream(prompt, params)`")
    collected: list[Chunk] = []
    cell = _Cell(markdown=markdown)
    with closing(chunks):
        try:
            for chunk in chunks:
                collected.append(chunk)
                cell.show(chunk.text)
        except KeyboardInterrupt:
            pass
    completion = _completion(collected)
    try:
        cell.end(completion)
    except KeyboardInterrupt:  # the answer is complete
        cell.end(completion)
    return completion


def _completion(chunks: list[Chunk]) -> Completion:
    token_ids = [token for chunk in chunks for token in chunk.token_ids]
    logprobs = [logprob for chunk in chunks for logprob in chunk.logprobs or []]
    last = chunks[-1] if chunks else Chunk("")
    usage = last.usage or Usage(prompt_tokens=0, completion_tokens=len(token_ids))
    text, reasoning = ("".join(getattr(chunk, name) for chunk in chunks) for name in ("text", "reasoning"))
    return Completion(text, token_ids, last.finish_reason or "cancelled", usage, logprobs or None, reasoning=reasoning or None)


class _Cell:
    """Display that is redrawn as the text grows; plain printing without an IPython kernel."""

    def __init__(self, *, markdown: bool = False) -> None:
        self._markdown = markdown
        self._text = ""
        self._drawn = 0.0
        self._handle = _display_handle()

    def show(self, text: str) -> None:
        if self._handle is None:
            print(text, end="", flush=True)  # noqa: T201
            return
        self._text += text
        if perf_counter() - self._drawn >= _REDRAW_S:
            self._draw("")

    def end(self, completion: Completion) -> None:
        if self._handle is None:
            print()  # noqa: T201
            return
        speed = f"{completion.usage.decode_tps:.1f} tokens/s" if completion.usage.decode_tps else completion.finish_reason
        self._draw(
            f"{counted(completion.usage.completion_tokens, 'token')} · {speed}" if completion.finish_reason != "cancelled" else "stopped"
        )

    def _draw(self, footer: str) -> None:
        self._drawn = perf_counter()
        if self._markdown:
            below = f"\n\n*{footer}*" if footer else ""
            self._handle.update({"text/plain": self._text, "text/markdown": self._text + below}, raw=True)
            return
        html = f'<div style="white-space: pre-wrap; max-width: 50em">{escape(self._text)}</div>'
        if footer:
            html += f'<div style="opacity: 0.6; font-size: 85%">{escape(footer)}</div>'
        self._handle.update({"text/plain": self._text, "text/html": html}, raw=True)


def _display_handle() -> Any:
    """Return a display of the running IPython kernel, or None."""
    try:
        from IPython import display, get_ipython
    except ImportError:
        return None
    shell = get_ipython()
    if shell is None or not hasattr(shell, "kernel"):
        return None
    return display.display({"text/plain": "", "text/html": ""}, raw=True, display_id=True)  # type: ignore[no-untyped-call]
