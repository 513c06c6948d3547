"""Latent attention for the CPU kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from ...kernels_cpu import View
from ...nn.latent_attention import LatentAttention
from ...nn.norms import RMSNorm

if TYPE_CHECKING:
    from .cpu_program import Parts, Sink


def add_latent(latent: LatentAttention, parts: Parts, x: View, norm: RMSNorm | None, sink: Sink, rope: str | None) -> None:
    """Adds `latent(norm(x))` to the sink. A key is the latent vector, which does not rotate, and the channels that do; its value is the
    latent vector. Raises `NotNative`."""
    s, row = latent.sizes, parts.normed(x, norm)
    queries, keys = _queries(latent, parts, row), parts.product(latent.keys, row, "latent")
    turned, pair = queries.columns(s.plain, queries.count - s.plain), parts.norm(latent.norm)
    into = parts.product(latent.into, _by_head(queries, s.heads, s.plain, s.plain + s.turned), "latent queries")
    parts.fills(latent.layer, rope, latent.temperature)
    answers = parts.program.attend(
        _joined(into),
        keys,
        keys.columns(0, s.latent),
        s.heads * s.latent,
        step=s.latent,
        still=s.latent,
        turned=turned,
        turned_step=s.plain + s.turned,
        key_norm=pair,
        value_norm=pair,
        query_gain=None if latent.gain == 1.0 else mx.array([1.0] * s.latent + [latent.gain] * s.turned),
        scale=latent.scale,
    )
    values = parts.product(latent.out, _by_head(answers, s.heads, s.latent, s.latent), "values")
    sink.product(latent.output, _joined(values))


def _queries(latent: LatentAttention, parts: Parts, row: View) -> View:
    if latent.narrow is None:
        return parts.product(latent.queries, row, "queries")
    narrow, norm = latent.narrow
    return parts.product(latent.queries, parts.product(narrow, row, "narrow queries"), "queries", norm=norm)


def _by_head(x: View, heads: int, count: int, step: int) -> View:
    """The first `count` columns of each head of a buffer as a row of their own; heads begin `step` columns after one another."""
    return View(x.buffer, step, 0, count, heads)


def _joined(x: View) -> View:
    """The rows of all heads as one."""
    return View(x.buffer, x.each * x.width, 0, x.each * x.width)
