"""Inference for Apple silicon, in MLX.

from mlxinfer import LLM, SamplingParams

llm = LLM("smollm2")
print(llm.chat([{"role": "user", "content": "What is the capital of France?"}], SamplingParams(temperature=0)).text)
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from ._version import __version__
from .errors import MLXInferError
from .garbage import no_garbage_collection
from .structure import Choice, Lark, Regex, Schema
from .types import Chunk, Completion, SamplingParams, TokenLogprob, Usage

if TYPE_CHECKING:
    from .engine.async_llm import AsyncLLM
    from .engine.llm import LLM
    from .tools import Tool
    from .types import ToolCall

if sys.platform == "darwin":
    # MLX begins a new command buffer once the arrays that it reads have 40 or 50 million elements. It counts the whole pool wherever a
    # kernel reads some of its pages, so that every attention layer would end one. What a command buffer reads stays alive until it is
    # done, hence a part of the memory: 171 for 16 GB. Not measured on a Mac yet.
    _memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    os.environ.setdefault("MLX_MAX_MB_PER_BUFFER", str(max(_memory // 10**8, 50)))

__all__ = [
    "LLM",
    "AsyncLLM",
    "Choice",
    "Chunk",
    "Completion",
    "Lark",
    "MLXInferError",
    "Regex",
    "SamplingParams",
    "Schema",
    "TokenLogprob",
    "Tool",
    "ToolCall",
    "Usage",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """`LLM` and `AsyncLLM` are imported on first use, as they import MLX, for which `mlxinfer --help` must not wait."""
    if name == "LLM":
        with no_garbage_collection():
            from .engine.llm import LLM
        return LLM
    if name == "AsyncLLM":
        with no_garbage_collection():
            from .engine.async_llm import AsyncLLM
        return AsyncLLM
    if name == "Tool":
        from .tools import Tool

        return Tool
    if name == "ToolCall":
        from .types import ToolCall

        return ToolCall
    raise AttributeError(f"module 'mlxinfer' has no attribute {name!r}")


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext mlxinfer` in a notebook: `%%chat`, and objects that show themselves."""
    from .notebook.magics import load

    load(shell)
