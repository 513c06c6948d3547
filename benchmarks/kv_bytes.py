"""Bytes of keys and values that a decode step must read, and the least time for that. Computed, not measured."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from mlxinfer.cache.base import PAGE, AttentionSpec
from mlxinfer.cache.kv_format import KVFormat
from mlxinfer.cache.store import LayerStore

CONTEXTS = (4096, 32768, 131072)
FORMATS = ("16", "8", "k8v4", "4")
OPEN = PAGE // 2
"""Tokens in the open page, on average."""

CHIPS: tuple[tuple[str, int], ...] = (
    ("M1", 68),
    ("M2, M3", 100),
    ("M4", 120),
    ("M3 Pro", 150),
    ("M5", 153),
    ("M1 Pro, M2 Pro", 200),
    ("M4 Pro", 273),
    ("M3 Max, 30 GPU cores", 300),
    ("M5 Pro", 307),
    ("M1 Max, M2 Max, M3 Max", 400),
    ("M4 Max, 32 GPU cores", 410),
    ("M5 Max, 32 GPU cores", 460),
    ("M4 Max", 546),
    ("M5 Max", 614),
    ("M1 Ultra, M2 Ultra", 800),
    ("M3 Ultra", 819),
)
"""Memory bandwidth stated by the manufacturer, GB/s."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Layers with keys and values, as (number of layers, spec)."""

    name: str
    layers: tuple[tuple[int, AttentionSpec], ...]


SHAPES = (
    Shape("Llama-3.1-8B", ((32, AttentionSpec(8, 128, 128)),)),
    Shape("Qwen3-4B", ((36, AttentionSpec(8, 128, 128)),)),
    Shape("Gemma-3-4B", ((5, AttentionSpec(4, 256, 256)), (29, AttentionSpec(4, 256, 256, window=1024)))),
)


def step_bytes(shape: Shape, context: int, form: KVFormat) -> int:
    """Bytes of keys and values that one sequence's step reads after `context` tokens: sealed pages in full, and half an open one."""
    return sum(count * layer_bytes(spec, context, form) for count, spec in shape.layers)


def layer_bytes(spec: AttentionSpec, context: int, form: KVFormat) -> int:
    seen = min(context, spec.window or context)
    sealed = -(-(seen - OPEN) // PAGE)
    open_page = LayerStore.page_bytes(spec, mx.bfloat16) * OPEN // PAGE
    return sealed * LayerStore.page_bytes(spec, mx.bfloat16, form) + open_page


def tables() -> str:
    """Markdown: the bytes, then for each shape the minimum time on every chip."""
    parts = [_bytes_table()]
    for shape in SHAPES:
        parts.append(f"**{shape.name}**, milliseconds a step at {', '.join(FORMATS[:-1])} and {FORMATS[-1]} bits:\n\n{_floor_table(shape)}")
    return "\n\n".join(parts) + "\n"


def _bytes_table() -> str:
    names = [f"{f} bits" if f.isdigit() else f for f in FORMATS]
    rows = [f"| MB a step | tokens before it | {' | '.join(names)} |", "| --- | ---: |" + " ---: |" * len(FORMATS)]
    for shape in SHAPES:
        for context in CONTEXTS:
            sizes = _sizes(shape, context)
            cells = [f"{size / 1e6:.0f}" + (f" ({size / sizes[0]:.2f})" if size != sizes[0] else "") for size in sizes]
            rows.append(f"| {shape.name} | {context} | {' | '.join(cells)} |")
    return "\n".join(rows)


def _floor_table(shape: Shape) -> str:
    rows = [f"| chip | GB/s | {' | '.join(f'{c // 1024}K' for c in CONTEXTS)} |", "| --- | ---: |" + " ---: |" * len(CONTEXTS)]
    for chip, bandwidth in CHIPS:
        cells = [" / ".join(_short(size / bandwidth / 1e6) for size in _sizes(shape, context)) for context in CONTEXTS]
        rows.append(f"| {chip} | {bandwidth} | {' | '.join(cells)} |")
    return "\n".join(rows)


def _sizes(shape: Shape, context: int) -> list[int]:
    return [step_bytes(shape, context, KVFormat.parse(form)) for form in FORMATS]


def _short(milliseconds: float) -> str:
    return f"{milliseconds:.0f}" if milliseconds >= 100 else f"{milliseconds:.1f}" if milliseconds >= 10 else f"{milliseconds:.2f}"
