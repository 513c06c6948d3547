"""Stream an answer into a notebook cell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from html import escape
from time import perf_counter
from typing import TYPE_CHECKING, Any, Union

from ..types import Chunk, Completion, SamplingParams, Usage

if TYPE_CHECKING:
    from ..engine.llm import LLM

Messages = Sequence[Mapping[str, Any]]

_REDRAW_S = 0.05
"""Time between two updates of a cell: the front end draws each of them."""


def stream(llm: LLM, prompt: Union[str, Messages], params: SamplingParams | None = None) -> Completion:
    """Answer a prompt, or a list of messages, into the output of the running cell.

    Interrupting the cell stops the generation. The text so far stays, and the returned `Completion` has `finish_reason` "cancelled" and
    that text. Outside of IPython the text is printed. Raises what `LLM.stream` raises.
    """
    chunks = llm.stream(prompt, params) if isinstance(prompt, str) else llm.stream_chat(prompt, params)
    collected: list[Chunk] = []
    cell = _Cell()
    with closing(chunks):
        try:
            for chunk in chunks:
                collected.append(chunk)
                cell.show(chunk.text)
        except KeyboardInterrupt:
            pass
    completion = _completion(collected)
    cell.end(completion)
    return completion


def _completion(chunks: list[Chunk]) -> Completion:
    token_ids = [token for chunk in chunks for token in chunk.token_ids]
    logprobs = [logprob for chunk in chunks for logprob in chunk.logprobs or []]
    last = chunks[-1] if chunks else Chunk("")
    usage = last.usage or Usage(prompt_tokens=0, completion_tokens=len(token_ids))
    return Completion("".join(chunk.text for chunk in chunks), token_ids, last.finish_reason or "cancelled", usage, logprobs or None)


class _Cell:
    """One display that is drawn anew as the text grows; plain printing where there is no IPython kernel."""

    def __init__(self) -> None:
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
        self._draw(f"{completion.usage.completion_tokens} tokens · {speed}" if completion.finish_reason != "cancelled" else "stopped")

    def _draw(self, footer: str) -> None:
        self._drawn = perf_counter()
        html = f'<div style="white-space: pre-wrap; max-width: 50em">{escape(self._text)}</div>'
        if footer:
            html += f'<div style="opacity: 0.6; font-size: 85%">{escape(footer)}</div>'
        self._handle.update({"text/plain": self._text, "text/html": html}, raw=True)


def _display_handle() -> Any:
    """A display of the running IPython kernel, or None."""
    try:
        from IPython import display, get_ipython
    except ImportError:
        return None
    shell = get_ipython()
    if shell is None or not hasattr(shell, "kernel"):
        return None
    return display.display({"text/plain": "", "text/html": ""}, raw=True, display_id=True)  # type: ignore[no-untyped-call]
