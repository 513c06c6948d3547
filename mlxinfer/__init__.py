"""Inference for Apple silicon, in MLX.

from mlxinfer import LLM, SamplingParams

llm = LLM("smollm2")
print(llm.chat([{"role": "user", "content": "What is the capital of France?"}], SamplingParams(temperature=0)).text)
"""

from __future__ import annotations

import os
import sys

from ._version import __version__

TYPE_CHECKING = False
if TYPE_CHECKING:  # importing typing takes longer than all else here
    from typing import Any

    from .engine.async_llm import AsyncLLM
    from .engine.llm import LLM
    from .errors import MLXInferError
    from .structure import Choice, Lark, Regex, Schema
    from .tools import Tool
    from .types import Chunk, Completion, SamplingParams, TokenLogprob, ToolCall, Usage

if sys.platform == "darwin":
    # MLX starts a new command buffer once the arrays read in it have 40 or 50 million elements. A kernel that reads a few pages counts the
    # whole pool, so each attention layer would end a command buffer. Arrays stay alive until their command buffer is done, so the limit
    # is a fraction of the memory: 171 for 16 GB. Not measured on a Mac yet.
    _memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    os.environ.setdefault("MLX_MAX_MB_PER_BUFFER", str(max(_memory // 10**8, 50)))
    from .util.mac import chip_generation

    # A command buffer costs about 20 us. Longer ones gave others 5 to 13 % with mixtures of experts before M5, and nothing on M5
    # (github.com/ml-explore/mlx/issues/4521). Not measured here.
    if (chip_generation() or 5) < 5:
        os.environ.setdefault("MLX_MAX_OPS_PER_BUFFER", "500")

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


_MODULES = {
    "LLM": "engine.llm",
    "AsyncLLM": "engine.async_llm",
    "MLXInferError": "errors",
    "Tool": "tools",
    **dict.fromkeys(("Choice", "Lark", "Regex", "Schema"), "structure"),
    **dict.fromkeys(("Chunk", "Completion", "SamplingParams", "TokenLogprob", "ToolCall", "Usage"), "types"),
}
"""Module of each public name, imported at first use, so that the command line answers Ctrl-C and `--help` at once."""
_PLAIN = ("errors", "structure", "types")
"""Modules available as attributes without an import."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES and name not in _PLAIN:
        raise AttributeError(f"module 'mlxinfer' has no attribute {name!r}")
    from importlib import import_module

    from .util.garbage import no_garbage_collection

    if name in _PLAIN:
        return import_module(f".{name}", __name__)
    with no_garbage_collection():
        return getattr(import_module(f".{_MODULES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def load_ipython_extension(shell: Any) -> None:
    """Load the notebook extension (`%load_ext mlxinfer`): `%%chat` and rich display of objects."""
    from .notebook.magics import load

    load(shell)
