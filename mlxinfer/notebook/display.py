"""Streams an answer into a notebook cell."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from contextlib import closing
from html import escape
from inspect import isasyncgen
from io import BytesIO
from time import perf_counter
from typing import TYPE_CHECKING, Any, Union

from ..errors import MLXInferError
from ..types import Chunk, Completion, SamplingParams, Usage
from ..util.words import counted

if TYPE_CHECKING:
    from ..engine.llm import LLM

Messages = Sequence[Mapping[str, Any]]

_SIDE = 160
"""Largest side of a picture's copy in a cell, in pixels."""
_REDRAW_S = 0.1
"""Seconds between two updates of a cell; the front end draws each update."""


def stream(
    llm: LLM, prompt: Union[str, Messages], params: SamplingParams | None = None, *, markdown: bool = False, images: Sequence[Any] = ()
) -> Completion:
    """Stream the answer to a prompt or messages into the running cell, as text or `markdown`.

    A small copy of each picture in the last message is shown above the answer. With `images`, the prompt is a user's message, and they come
    first in the last one.

    Interrupting the cell stops the generation; the text so far is returned with `finish_reason` "cancelled". Outside of IPython the text is
    printed. Raises as `LLM.stream` does, and `MLXInferError` for an `AsyncLLM`.
    """
    chat = images or not isinstance(prompt, str)
    chunks = llm.stream_chat(prompt, params, images=images) if chat else llm.stream(prompt, params)  # type: ignore[arg-type]
    if isasyncgen(chunks):
        raise MLXInferError("stream needs an LLM: an AsyncLLM's answer is read with `async for chunk in llm.stream(prompt, params)`")
    show_pictures([*images, *pictures_of(prompt)])
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


def pictures_of(prompt: Union[str, Messages]) -> list[Any]:
    """Return the images of the last message."""
    content = prompt[-1].get("content") if prompt and not isinstance(prompt, str) else None
    return [part["image"] for part in content if "image" in part] if isinstance(content, list) else []


def show_pictures(images: Sequence[Any]) -> None:
    """Show a small copy of each image in the running cell; nothing outside of an IPython kernel. Raises `ImageError`."""
    handle = _display_handle() if images else None
    if handle is not None:
        small = "".join(f'<img src="{_small_copy(image)}" style="margin: 0 0.5em 0.5em 0">' for image in images)
        handle.update({"text/plain": counted(len(images), "picture"), "text/html": f"<div>{small}</div>"}, raw=True)


def _small_copy(image: Any) -> str:
    """Return a `data:` URL of a PNG of at most `_SIDE` pixels a side."""
    from PIL import Image

    from ..vision.picture import read_picture

    small, out = Image.fromarray(read_picture(image).pixels), BytesIO()
    small.thumbnail((_SIDE, _SIDE))
    small.save(out, "PNG")
    return f"data:image/png;base64,{b64encode(out.getvalue()).decode()}"


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
