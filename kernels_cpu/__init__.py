"""Native operations for MLX's CPU backend, evaluated lazily on its stream like MLX's own.

They are compiled when mlxinfer is installed, where a C++ compiler is present, and for one version of MLX. Importing this package
costs nothing and never fails; `available()` says whether the operations can be called and `status()` why not. README.md describes
how an operation is added.
"""

from __future__ import annotations

from .attention import attention_plan, paged_attention, rotation
from .interface import AttentionPlan, Rotation
from .native import available, in_use, isa_name, status, thread_count
from .operations import rms_norm, silu_multiply
from .packed import PRECISIONS, Packed, block_types, default_precision, pack, pack_blocks

__all__ = [
    "PRECISIONS",
    "AttentionPlan",
    "Packed",
    "Rotation",
    "attention_plan",
    "available",
    "block_types",
    "default_precision",
    "in_use",
    "isa_name",
    "pack",
    "pack_blocks",
    "paged_attention",
    "rms_norm",
    "rotation",
    "silu_multiply",
    "status",
    "thread_count",
]
