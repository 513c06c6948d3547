"""Numbers that a lane of decode attention holds at a time, counted from the arrays that its source declares."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

import mlx.core as mx
import pytest
from support.models.published_configs import attention_layers

from mlxinfer.cache.base import AttentionSpec
from mlxinfer.kernels_metal.formats import element_bits, v_group
from mlxinfer.kernels_metal.paged_attention.tiles import DIMS, MOST_NUMBERS, DecodeTile, Shape, decode_tile, live_numbers, row_classes
from mlxinfer.kernels_metal.source import ROOT

REGISTERS = 128
"""32-bit registers of a thread of an Apple GPU."""
FORMATS = ((16, 16), (8, 8), (4, 4), (8, 3), (2, 2))
SOURCE = "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "paged_attention").rglob("*.[mh]*")) if path.suffix != ".md")
SPECS = tuple({(s.query_heads, s.kv_heads, s.key_dim, s.value_dim): s for s in attention_layers()}.values())


def body(start: str) -> str:
    """Return a function or struct of the source, from `start` to its closing brace at the margin."""
    at = SOURCE.index(start)
    return SOURCE[at : SOURCE.index("\n}", at)]


def arrays(code: str) -> Iterator[tuple[str, str, str]]:
    """Yield (type, name, size) of the arrays in registers that code declares."""
    for match in re.finditer(r"^\s*(float|uint|OnlineSoftmax) (\w+)\[(.+)\];", code, re.MULTILINE):
        yield match[1], match[2], match[3]


def declared(shape: Shape, tile: DecodeTile, function: str, *, without: tuple[str, ...] = (), bits: int = 16, run: int = 0) -> int:
    """Return the numbers in the arrays of a function or struct, for pages of `bits` bits of which a lane loads `run` values."""
    groups = 1 if shape.v_bits == 16 else shape.value_dim // v_group(shape.value_dim)
    parts = shape.value_dim // tile.value_run
    lanes = next(n for n in (32, 16, 8, 4, 2, 1) if n == 1 or parts > n // 2)
    words = -(-run * element_bits(bits, shape.dtype) // 32)
    names = {"QUERIES": tile.queries, "KEY_RUN": tile.key_run, "VALUE_RUN": tile.value_run, "GROUPS": groups, "RUNS": -(-parts // lanes)}
    steps = 64 // tile.key_run
    fit = 1 if words > 8 else 2 if words > 4 else 4 if words > 2 else 8
    keys = steps if steps * words <= 16 else 4 if words <= 4 else 2 if words <= 8 else 1
    names |= {"words": words, "ahead": keys if "multiply" in function else fit}
    total = 0
    for kind, name, size in arrays(body(function)):
        if name not in without:
            total += (2 if kind == "OnlineSoftmax" else 1) * eval(re.sub(r"D::", "", size), {}, names)
    return total


def counted(shape: Shape, tile: DecodeTile) -> int:
    """Return the most numbers in arrays of functions that are active at a time."""
    no_biases = ("biases",) if shape.v_bits == 16 else ()
    no_offsets = ("offsets",) if shape.k_bits == 16 else ()
    state = declared(shape, tile, "struct State {", without=no_biases)
    products = declared(shape, tile, "inline void attend_page(")
    own = declared(shape, tile, "inline void multiply_page(", without=no_offsets)
    keys = max(declared(shape, tile, "inline void multiply_channels(", bits=b, run=tile.key_run) for b in (16, shape.k_bits))
    weights = declared(shape, tile, "inline void weigh(", without=no_biases)
    values = max(declared(shape, tile, "inline void add_values(", bits=b, run=tile.value_run) for b in (16, shape.v_bits))
    return state + max(products + own + keys, products + weights, values)


def shapes(spec: AttentionSpec, dtype: mx.Dtype = mx.bfloat16) -> list[Shape]:
    heads = spec.query_heads or spec.kv_heads
    return [Shape(dtype, heads, spec.kv_heads, spec.key_dim, spec.value_dim, *bits) for bits in FORMATS]


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: f"{s.query_heads}x{s.kv_heads}x{s.key_dim}")
def test_no_kernel_of_a_known_model_needs_more_registers_than_a_thread_has(spec: AttentionSpec) -> None:
    for shape in shapes(spec):
        for rows in row_classes(shape):
            tile = decode_tile(shape, rows)
            numbers = counted(shape, tile)
            assert numbers <= MOST_NUMBERS <= REGISTERS - 16, (shape, rows, tile)
            assert numbers <= live_numbers(shape, tile.queries, tile.key_run, tile.value_run)


def test_live_numbers_are_those_that_the_source_declares() -> None:
    for dim, group, bits in itertools.product(DIMS[::6], (1, 3, 8), FORMATS):
        shape = Shape(mx.float16, group, 1, dim, dim, *bits)
        for rows in row_classes(shape):
            tile = decode_tile(shape, rows)
            live = live_numbers(shape, tile.queries, tile.key_run, tile.value_run)
            assert 0 <= live - counted(shape, tile) <= 16, (shape, rows, tile)


def test_eight_heads_of_128_channels_share_pages() -> None:
    """One simdgroup would hold 144 numbers, and a thread has 128 registers."""
    shape = Shape(mx.bfloat16, 64, 8, 128, 128, 16, 16)
    assert counted(shape, DecodeTile(8, 8, 4, 4, False, 16, 0)) > REGISTERS
    tile = decode_tile(shape, 1)
    assert (tile.queries, tile.simdgroups, tile.shared) == (4, 2, True)
