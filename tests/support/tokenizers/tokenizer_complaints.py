"""Complaints about a tokenizer whose files are damaged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mlxinfer.errors import MLXInferError
from mlxinfer.tokenizer import Tokenizer, from_directory


def complaint_about(build: Callable[[], Tokenizer], text: str) -> str:
    """The error of a tokenizer that cannot be built, or cannot encode `text` and decode it again; nothing of one that can."""
    try:
        tokenizer = build()
        tokenizer.decode(tokenizer.encode(text))
    except MLXInferError as error:
        return str(error)
    return ""


def complaint(directory: Path) -> str:
    """`complaint_about` the tokenizer of a model directory."""
    return complaint_about(lambda: from_directory(directory), "ab a<s>")
