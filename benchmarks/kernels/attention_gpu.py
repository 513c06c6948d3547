"""Measures attention alone on a GPU, compared with MLX's and mlx-lm's.

For decode, the result is the share of the copy bandwidth; for prefill, multiply-adds per second. Every call reads the keys and values of
another layer, and all layers are larger than any cache. The calls of a sample are evaluated together, so launching does not count.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import click
import mlx.core as mx
import numpy as np

from mlxinfer.cache.kv_format import KVFormat
from mlxinfer.kernels_metal.paged_attention.arrays import sealed_arrays
from mlxinfer.kernels_metal.paged_attention.launcher import paged_attention_decode
from mlxinfer.kernels_metal.paged_attention.plan import DecodePlan, Pools, SegmentRows, plan_decode
from mlxinfer.kernels_metal.paged_attention.reference import attention_over_pages
from mlxinfer.kernels_metal.paged_attention.tiles import PAGE, Shape
from mlxinfer.kernels_metal.paged_attention_prefill.launcher import paged_attention_prefill
from mlxinfer.kernels_metal.paged_attention_prefill.plan import plan_prefill
from mlxinfer.kernels_metal.seal_page.launcher import seal_keys, seal_values

from .gpu import FRESH_BYTES, Calls, median_time

FORMATS = ("16", "8", "k8v4", "4")
HEADS = {"32 heads on 8 of 128": (32, 8, 128), "16 heads on 8 of 128": (16, 8, 128), "8 heads on 4 of 256": (8, 4, 256)}
"""Query heads, KV heads and head size of Llama-3.1-8B and Qwen3-4B, of smaller Qwen3 models, and of Gemma-3-4B."""
LENGTHS = (1024, 8192, 32768)
MOST_LAYERS = 32
MEMORY_SHARE = 1 / 3
"""Fraction of the usable memory for the layers of a case. Random numbers and MLX's exact attention take as much again."""
_CHECKED_TOKENS = 4096
"""Tokens of each sequence, at most, for which answers are compared with exact ones."""
TOLERANCE = 0.02
"""Allowed difference of bfloat16 results from float32 ones, for values of about 1."""


@dataclass(frozen=True, slots=True)
class Result:
    """A call: its time in seconds, and the bytes of keys and values, with their scales, that it must read."""

    name: str
    seconds: float
    bytes: int


def layer_count(size: int) -> int:
    """Return the number of layers of `size` bytes that a sample reads: more bytes than a cache stores."""
    return min(max(2, FRESH_BYTES // size), MOST_LAYERS)


def case_bytes(heads: tuple[int, int, int], length: int, batch: int) -> int:
    """Return the bytes of a case's largest layers, those of 16 bits."""
    size = 2 * batch * heads[1] * length * heads[2] * 2
    return size * layer_count(size)


class Pages:
    """Layers of random sealed pages, scattered over the pool, for `batch` sequences of `length` tokens and a new token each."""

    def __init__(self, heads: tuple[int, int, int], form: KVFormat, length: int, batch: int, layers: int | None = None) -> None:
        query_heads, kv_heads, dim = heads
        self.shape = Shape(mx.bfloat16, query_heads, kv_heads, dim, dim, form.k_bits, form.v_bits)
        self.scale = dim**-0.5
        each = length // PAGE
        pools = Pools(each * batch, 0, batch)
        ids = np.random.default_rng(0).permutation(pools.pages).reshape(batch, each).tolist()
        rows = [SegmentRows(i, i, 1, each * PAGE + PAGE // 2, ids[i]) for i in range(batch)]
        self.plan: DecodePlan = plan_decode(self.shape, rows, pools, query_rows=batch)
        sealed_bytes = sum(math.prod(shape) * dtype.size for shape, dtype in sealed_arrays(self.shape, pools.pages))
        self.bytes = sealed_bytes + batch * kv_heads * PAGE * dim * 2
        opened = [((batch, kv_heads, PAGE, dim), mx.bfloat16)] * 2
        self.q = _random((batch, query_heads, dim), mx.bfloat16)
        self.layers: list[list[list[mx.array]]] = []
        for _ in range(layers or layer_count(self.bytes)):
            self.layers.append([[_random(*a) for a in each] for each in (sealed_arrays(self.shape, pools.pages), opened)])
            mx.eval(self.layers[-1])  # one by one: random numbers take more memory than the layers

    def calls(self) -> Calls:
        def call(sealed: list[mx.array], opened: list[mx.array]) -> mx.array:
            return paged_attention_decode(self.q, sealed, [], opened, self.plan, scale=self.scale)

        return [lambda sealed=s, opened=o: call(sealed, opened) for s, o in self.layers]  # type: ignore[misc]

    def error(self) -> float:
        """Largest difference from MLX in float32, on the first layer."""
        sealed, opened = self.layers[0]
        exact = attention_over_pages(self.q, sealed, [], opened, self.plan, scale=self.scale)
        return float(np.array(mx.abs(self.calls()[0]().astype(mx.float32) - exact.astype(mx.float32)).max()))


def _random(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """Random numbers: codes of all bits, values of about 1, and small scales, because a code can be 255."""
    if dtype == mx.uint32:
        return mx.random.randint(-(2**31), 2**31 - 1, shape, mx.int32).view(mx.uint32)
    return (mx.random.normal(shape) * (0.005 if dtype == mx.float16 else 1.0)).astype(dtype)


def stock(heads: tuple[int, int, int], length: int, batch: int, layers: int, bits: int) -> tuple[Calls, int]:
    """Calls of MLX's attention to bfloat16 (16 bits) or of mlx-lm's to the output of `mx.quantize`, and the bytes of a layer."""
    from mlx_lm.models.base import quantized_scaled_dot_product_attention

    query_heads, kv_heads, dim = heads
    q = _random((batch, query_heads, 1, dim), mx.bfloat16)
    pairs: list[list[Any]] = []
    for _ in range(layers):
        pair = [_random((batch, kv_heads, length, dim), mx.bfloat16) for _ in range(2)]
        pairs.append(pair if bits == 16 else [mx.quantize(x, group_size=64, bits=bits) for x in pair])
        mx.eval(pairs[-1])
    size = sum(a.nbytes for x in pairs[0] for a in (x if isinstance(x, (tuple, list)) else [x]))

    def call(k: Any, v: Any) -> mx.array:
        if bits == 16:
            return mx.fast.scaled_dot_product_attention(q, k, v, scale=dim**-0.5)
        # mlx-lm scales the queries in place.
        out: mx.array = quantized_scaled_dot_product_attention(q + 0, k, v, dim**-0.5, None, group_size=64, bits=bits)
        return out

    return [lambda k=k, v=v: call(k, v) for k, v in pairs], size  # type: ignore[misc]


def measure(heads: tuple[int, int, int], length: int, batch: int, samples: int = 10, layers: int | None = None) -> list[Result]:
    """Measure decode; MLX comes first. Raises `click.ClickException` for a kernel with wrong results, whose speed means nothing."""
    results = []
    for bits in (16, 8, 4):
        size = 2 * batch * heads[1] * length * heads[2] * (bits + (0.5 if bits < 16 else 0)) / 8
        calls, nbytes = stock(heads, length, batch, layers or layer_count(int(size)), bits)
        name = "MLX, bfloat16" if bits == 16 else f"mlx-lm, {bits} bits"
        results.append(Result(name, median_time(calls, samples), nbytes))
    for form in FORMATS:
        checked = Pages(heads, KVFormat.parse(form), min(length, _CHECKED_TOKENS), batch, 1).error()
        if not checked <= TOLERANCE:
            raise click.ClickException(f"{form} bits, {heads}: answers differ by {checked:.3g} from those in float32")
        pages = Pages(heads, KVFormat.parse(form), length, batch, layers)
        results.append(Result(f"mlxinfer, {form}{' bits' * form.isdigit()}", median_time(pages.calls(), samples), pages.bytes))
    return results


def measure_prefill(heads: tuple[int, int, int], past: int, count: int, samples: int = 10) -> list[tuple[str, float, float]]:
    """Measure prefill of `count` tokens after `past` others: name, seconds and multiply-adds of a call, which also seals filled pages.

    MLX's attention in bfloat16 comes first. Both token counts are rounded down to whole pages.
    """
    query_heads, kv_heads, dim = heads
    past, count = past // PAGE * PAGE, max(count // PAGE, 1) * PAGE
    work = 2.0 * query_heads * dim * count * (past + count / 2)
    q, k, v = (_random((count, h, dim), mx.bfloat16) for h in (query_heads, kv_heads, kv_heads))
    whole = [_random((1, kv_heads, past + count, dim), mx.bfloat16) for _ in range(2)]
    rows = q.swapaxes(0, 1)[None]
    seconds = median_time([lambda: mx.fast.scaled_dot_product_attention(rows, *whole, scale=dim**-0.5, mask="causal")], samples)
    results = [("MLX, bfloat16", seconds, work)]
    for form in map(KVFormat.parse, FORMATS):
        shape = Shape(mx.bfloat16, query_heads, kv_heads, dim, dim, form.k_bits, form.v_bits)
        pools = Pools(max(past // PAGE, 1), 0, 1)
        plan = plan_prefill(shape, [SegmentRows(0, 0, count, past, list(range(past // PAGE)))], pools, query_rows=count)
        sealed = [_random(*a) for a in sealed_arrays(shape, pools.pages)]
        opened = [mx.zeros((1, kv_heads, PAGE, dim), mx.bfloat16) for _ in range(2)]
        mx.eval(sealed, opened)

        def call(form: KVFormat = form, sealed: Any = sealed, opened: Any = opened, plan: Any = plan) -> mx.array:
            pages = [x.swapaxes(0, 1).reshape(kv_heads, -1, PAGE, dim) for x in (k, v)]
            filled = seal_keys(pages[0], form.k_bits) + seal_values(pages[1], form.v_bits) if plan.filled else []
            return paged_attention_prefill(q, k, v, sealed, filled, [], opened, plan, scale=dim**-0.5)

        results.append((f"mlxinfer, {form.name}", median_time([call], samples), work))
    return results


def prefill_table(results: list[tuple[str, float, float]]) -> str:
    rows = ["| | ms | multiply-adds/s | times MLX's bfloat16 |", "| --- | ---: | ---: | ---: |"]
    rows += [f"| {name} | {t * 1e3:.2f} | {work / t / 1e12:.2f} T | {results[0][1] / t:.2f} |" for name, t, work in results]
    return "\n".join(rows) + "\n"


def table(results: list[Result], copied: float) -> str:
    """Markdown. `copied` is the copy bandwidth, in bytes per second."""
    first = results[0]
    rows = ["| | us | MB | GB/s | of copying | times MLX's bfloat16 |", "| --- | ---: | ---: | ---: | ---: | ---: |"]
    for r in results:
        bandwidth = r.bytes / r.seconds
        cells = f"{r.seconds * 1e6:.0f} | {r.bytes / 1e6:.1f} | {bandwidth / 1e9:.0f} | {bandwidth / copied * 100:.0f} %"
        rows.append(f"| {r.name} | {cells} | {first.seconds / r.seconds:.2f} |")
    return "\n".join(rows) + "\n"
