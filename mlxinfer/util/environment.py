"""Environment variables of mlxinfer: the registry behind docs/settings.md and the command line's check of their values."""

from __future__ import annotations

import re
from collections.abc import Callable

from .dataclass import dataclass


@dataclass(frozen=True, slots=True)
class Variable:
    """An environment variable of mlxinfer."""

    name: str
    meaning: str
    """One line without a full stop."""
    default: str = ""
    """Behaviour without the variable; empty for none."""
    takes: str = ""
    """The values that have a meaning; empty if any text has one."""
    is_valid: Callable[[str], bool] | None = None
    """True for a text that `takes` describes; None if values are not checked, such as paths and keys."""


def _one_of(*values: str) -> tuple[str, Callable[[str], bool]]:
    takes = f"{', '.join(values[:-1])} or {values[-1]}"
    return takes, values.__contains__


def _thread_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= 256


def is_gigabytes(text: str) -> bool:
    """True for a number of gigabytes, such as 8 or 0.5."""
    return re.fullmatch(r"\d{1,9}(\.\d*)?|\.\d+", text) is not None


_SWITCH: tuple[str, Callable[[str], bool]] = ("0 (off) or 1", ("0", "1").__contains__)

VARIABLES = (
    Variable("MLXINFER_HOME", "Folder of converted models and of everything that can be made again", "`~/.cache/mlxinfer`"),
    Variable("MLXINFER_SOCKET", "Unix socket of the server, also for commands that use a running server", "`~/.mlxinfer/api.sock`"),
    Variable("MLXINFER_API_KEY", "Key that the server requires on TCP, and that commands send to it"),
    Variable("MLXINFER_PREFILL_API_KEY", "Key of the server in `prefill_from`"),
    Variable("MLXINFER_THREADS", "Threads of the CPU kernels", "all processors", "a number from 1 to 256", _thread_count),
    Variable(
        "MLXINFER_PACKED_GB",
        "Space for packed copies of GGUF files, all together",
        "8",
        "a number of gigabytes, 0 for none",
        is_gigabytes,
    ),
    Variable(
        "MLXINFER_EXPERTS_MEMORY",
        "Memory for the routed experts of a model, where `experts_memory` is auto",
        "what the cache leaves, if the experts do not fit",
        "a number of gigabytes, 0 to keep all experts in memory",
        is_gigabytes,
    ),
    Variable(
        "MLXINFER_WIRED_GB",
        "Memory that stays resident on a Mac, up to the recommended working set; much of it can stall a busy system",
        "60 % of the memory",
        "a number of gigabytes",
        is_gigabytes,
    ),
    Variable("MLXINFER_CPU_KERNELS", "Use the CPU kernels; when installing, 0 leaves them out and 1 requires them", "1", *_SWITCH),
    Variable("MLXINFER_METAL_KERNELS", "Use the Metal kernels of this package on a GPU", "1", *_SWITCH),
    Variable(
        "MLXINFER_COMPILED_STEPS",
        "On a GPU, let MLX replay decoding steps instead of building each in Python",
        "once replayed steps were equal to built ones",
        "0 (never) or 1 (without a check)",
        ("0", "1").__contains__,
    ),
    Variable(
        "MLXINFER_CPU_ISA",
        "Instructions that the CPU kernels use at most",
        "the best of the processor",
        *_one_of("portable", "avx2", "avx512", "dotprod", "i8mm"),
    ),
    Variable(
        "MLXINFER_CPU_PRECISION",
        "Rounding of activations in the CPU's products with quantized matrices",
        "int16",
        *_one_of("int8", "int16", "float32"),
    ),
    Variable("MLXINFER_KERNELS", "`emulator` runs the Metal kernels in the emulator, for tests; needs a checkout"),
    Variable("MLXINFER_EMULATOR_CACHE", "Folder of kernels that the emulator compiled", "`~/.cache/mlxinfer/emulator`"),
    Variable("MLXINFER_EMULATOR_CLANG", "Compiler of the emulator", "the first clang++ that works"),
    Variable("MLXINFER_ALL_ISAS", "When building, 1 compiles the CPU kernels for all instruction sets, not only this machine's best", "0"),
    Variable("MLXINFER_EXACT_MLX", "When building a wheel, 1 makes it require the version of MLX in use", "0"),
    Variable("MLXINFER_BUILD_STEPS", "When building, the file that gets a line for each step; set by `make`"),
    Variable("MLXINFER_RANK_CHILD", "File descriptors of a process of `serve --nodes`; set by its parent"),
)


def environment_table() -> str:
    """The table of environment variables in docs/settings.md."""
    rows = ["| variable | values | default | meaning |", "| --- | --- | --- | --- |"]
    rows += [f"| `{each.name}` | {each.takes} | {each.default} | {each.meaning} |" for each in VARIABLES]
    return "\n".join(rows) + "\n"
