"""Reads and operations of the kernels of `kernels_metal`, from their arrays and tables of work.

A kernel that is not listed reads each of its arrays once. Attention kernels read only the pages in their tables. Products with few rows
read their matrix once per 16 rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from .layout import Laid

_PAGE = 64
_ROWS_OF_PRODUCT = 16


Work = dict[str, int]
"""Fields of `primitives.Launch`."""
Named = Mapping[str, Laid]


def work_of(details: Mapping[str, Any], named: Named, outputs: Sequence[Laid]) -> Work:
    """The work of a launch with the inputs `named` and the `details` of its `graph.Marked`."""
    rule = _RULES.get(details["kernel"])
    return rule(details, named, outputs) if rule else {"reads": sum(a.bytes for a in named.values())}


def _decode(details: Mapping[str, Any], named: Named, outputs: Sequence[Laid]) -> Work:
    """Each work item reads its pages once for all query heads and rows, and only the existing rows of the open page. Queries, keys and
    values of the step may be in one array."""
    page, row = _page_bytes(named)
    read = tokens = 0
    for _slot, _start, count, past, _oldest, first, end, *_ in _table(details, "work", details["groups"][2]):
        own = end > past // _PAGE
        read += (end - first - own) * page + own * (past % _PAGE + count) * row
        tokens += count * (end - first) * _PAGE
    step = {id(a): named[name].bytes for name, a in zip(details["names"], details["arrays"], strict=True) if name in _STEP}
    others = sum(a.bytes for name, a in named.items() if name not in (*_POOLS, *_STEP))
    return {"reads": read + sum(step.values()) + others, "operations": 2 * tokens * _width(details)}


def _prefill(details: Mapping[str, Any], named: Named, outputs: Sequence[Laid]) -> Work:
    """Each tile of rows and heads reads all pages that its rows see."""
    page, _ = _page_bytes(named)
    asked = distinct = products = 0
    parts = details["template"]["GROUP_HEADS"] // details["template"]["HEADS"]
    for _start, count, position, past, _slot, _places, _out, window in _table(details, "tiles", details["groups"][0]):
        last = position + count
        first = max(0, position - window + 1) // _PAGE
        asked += (last // _PAGE + 1 - first) * page * parts
        distinct = max(distinct, (past // _PAGE + 1) * page)
        products += 2 * count * (last - first * _PAGE)
    others = sum(a.bytes for name, a in named.items() if name not in _POOLS)
    work = {"reads": asked + others, "repeated": max(asked - distinct, 0)}
    return work | {"operations": products * _width(details), "on_matrix_units": True}


def _unseal(details: Mapping[str, Any], named: Named, outputs: Sequence[Laid]) -> Work:
    """Reads as many pages as it writes."""
    page, _ = _page_bytes(named)
    return {"reads": page * outputs[0].shape[1] // _PAGE}


def _product(details: Mapping[str, Any], named: Named, outputs: Sequence[Laid]) -> Work:
    x = named["x"]
    matrix = sum(a.bytes for name, a in named.items() if name in ("weight", "scales", "biases"))
    rows, numbers = x.size // x.shape[-1], x.shape[-1] * named["weight"].shape[0]
    passes = math.ceil(rows / _ROWS_OF_PRODUCT)
    work = {"reads": x.bytes + passes * matrix, "repeated": (passes - 1) * matrix, "matrix": passes * matrix}
    return work | {"operations": 2 * rows * numbers, "unpacked": passes * numbers}


def _experts(details: Mapping[str, Any], named: Named, outputs: Sequence[Laid]) -> Work:
    """Each pair of a row and an expert reads the expert's matrix; caches deliver what several pairs read."""
    stored = [a for name, a in named.items() if name in ("weight", "scales", "biases")]
    experts, pairs = named["weight"].shape[0], named["chosen"].size
    each, columns = sum(a.bytes for a in stored) // experts, named["x"].shape[-1]
    others = sum(named[name].bytes for name in ("x", "chosen", "shares") if name in named)
    if details["template"]["BIASED"]:
        others += pairs * named["bias"].bytes // experts
    if details["template"].get("ADDED"):
        others += named["added"].bytes
    numbers = pairs * columns * named["weight"].shape[1]
    work = {"reads": others + pairs * each, "repeated": max(pairs - experts, 0) * each, "matrix": pairs * each}
    return work | {"operations": 2 * numbers, "unpacked": numbers if len(stored) > 1 else 0}


_RULES: dict[str, Callable[[Mapping[str, Any], Named, Sequence[Laid]], Work]] = {
    "paged_attention_decode": _decode,
    "paged_attention_prefill": _prefill,
    "unseal_pages": _unseal,
    "affine_matmul": _product,
    "affine_vector": _product,
    "mxfp4_matmul": _product,
    "mxfp4_vector": _product,
    "block_matmul": _product,
    **{f"{form}_experts_{way}": _experts for form in ("affine", "mxfp4", "plain") for way in ("in", "out")},
}

_POOLS = ("sealed_keys", "key_scales", "sealed_values", "value_scales", "first_keys", "first_values", "open_keys", "open_values")
"""Inputs of the attention kernels that a launch reads in part."""

_STEP = ("queries", "keys", "values")
"""Inputs of decode attention with the step's rows."""


def _width(details: Mapping[str, Any]) -> int:
    """Channels of queries and results of all heads."""
    template = details["template"]
    return int(details["groups"][1] * template["HEADS"] * (template["KEY_DIM"] + template["VALUE_DIM"]))


def _page_bytes(named: Named) -> tuple[int, int]:
    """Bytes of a sealed page and of a token in an open page, for all KV heads. Arrays of 8 numbers stand for missing pools."""
    pools = {name: a for name, a in named.items() if name in _POOLS and a.size > 8}
    row = sum(a.bytes // (a.shape[0] * a.shape[2]) for name, a in pools.items() if name.startswith("open"))
    sealed = sum(a.bytes // a.shape[1] for name, a in pools.items() if not name.startswith(("open", "first")))
    return sealed or row * _PAGE, row


def _table(details: Mapping[str, Any], name: str, count: int) -> list[tuple[int, ...]]:
    """Rows of a padded table of work."""
    array: mx.array = details["arrays"][details["names"].index(name)]
    flat = np.array(array).reshape(-1)
    width = flat.size // count
    return [tuple(int(n) for n in row) for row in flat[: count * width].reshape(count, width)]
