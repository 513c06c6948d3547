"""Native operations for MLX's CPU backend, evaluated lazily on its stream like MLX's own.

Installing mlxinfer compiles them for one version of MLX, if a C++ compiler is present. Importing this package is cheap and never fails.
`available()` is True if the operations can be called; otherwise `status()` has the reason. README.md describes how to add an operation.
"""

from __future__ import annotations

from .feedback import MOST_COLUMNS, can_feed_back, feed_back
from .fit import can_fit, fit_affine
from .native import AttentionPlan, Blocks, Rotation, WeightFile, available, in_use, isa_name, missing_lines, status, thread_count
from .operations import (
    ACTIVATIONS,
    AfterBlocks,
    activate,
    argmax,
    attention_plan,
    can_compute_towers,
    can_mask,
    layer_norm,
    masked,
    paged_attention,
    patch_attention,
    rms_norm,
    rotation,
    run_blocks,
    silu_multiply,
    threshold,
)
from .packed import PRECISIONS, Packed, default_precision, gguf_types, pack, pack_gguf, packed_in, packs_float8, weight_memory
from .program import ExpertChoice, NextWave, Norm, Program, ProgramProjection, Router, View, can_run_blocks, can_run_waves
from .weight_file import ALIGNMENT, into_huge_pages, map_weights, mapped_gguf, packed_version, preamble

__all__ = [
    "ACTIVATIONS",
    "ALIGNMENT",
    "MOST_COLUMNS",
    "PRECISIONS",
    "AfterBlocks",
    "AttentionPlan",
    "Blocks",
    "ExpertChoice",
    "NextWave",
    "Norm",
    "Packed",
    "Program",
    "ProgramProjection",
    "Rotation",
    "Router",
    "View",
    "WeightFile",
    "activate",
    "argmax",
    "attention_plan",
    "available",
    "can_compute_towers",
    "can_feed_back",
    "can_fit",
    "can_mask",
    "can_run_blocks",
    "can_run_waves",
    "default_precision",
    "feed_back",
    "fit_affine",
    "gguf_types",
    "in_use",
    "into_huge_pages",
    "isa_name",
    "layer_norm",
    "map_weights",
    "mapped_gguf",
    "masked",
    "missing_lines",
    "pack",
    "pack_gguf",
    "packed_in",
    "packed_version",
    "packs_float8",
    "paged_attention",
    "patch_attention",
    "preamble",
    "rms_norm",
    "rotation",
    "run_blocks",
    "silu_multiply",
    "status",
    "thread_count",
    "threshold",
    "weight_memory",
]
