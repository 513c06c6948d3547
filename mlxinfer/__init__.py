"""Inference for Apple silicon, in MLX.

from mlxinfer import LLM, SamplingParams

llm = LLM("smollm2")
print(llm.chat([{"role": "user", "content": "What is the capital of France?"}], SamplingParams(temperature=0)).text)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._version import __version__
from .errors import MLXInferError
from .garbage import no_garbage_collection
from .structure import Choice, Lark, Regex, Schema
from .types import Chunk, Completion, SamplingParams, TokenLogprob, Usage

if TYPE_CHECKING:
    from .engine.async_llm import AsyncLLM
    from .engine.llm import LLM

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
    raise AttributeError(f"module 'mlxinfer' has no attribute {name!r}")
