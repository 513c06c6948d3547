"""The router's choice of experts in plain MLX."""

from __future__ import annotations

import mlx.core as mx

from ...util.dataclass import dataclass

SCORES = ("none", "softmax", "sigmoid")
"""Kinds of scores: the logits, probabilities over all experts, sigmoids."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Rule that chooses experts from logits: the best by score, with bias, of the groups with the largest ranks."""

    chosen: int
    """Experts for each row."""
    scores: str
    """One of `SCORES`. With "none" the weights are a softmax over the chosen logits."""
    normalized: bool = False
    """True if the weights are divided by their sum."""
    least: float = 0.0
    """Minimum of that sum."""
    added: float = 0.0
    """Added to that sum."""
    scale: float = 1.0
    """Factor of the weights."""
    groups: int = 1
    """Groups of neighbouring experts."""
    kept: int = 1
    """Groups from which experts are chosen."""
    ranked: int = 2
    """Number of a group's best scores whose sum ranks it."""


def choose_experts(logits: mx.array, rule: Rule, bias: mx.array | None = None, gains: mx.array | None = None) -> tuple[mx.array, mx.array]:
    """Choose from router logits `[T, experts]`: the experts uint32 `[T, k]` and their weights float32 `[T, k]`, in any order.

    `bias` float32 `[experts]` is added to the scores for the choice only (arXiv:2408.15664). `gains` float32 `[experts]` are factors of the
    weights. Groups are those of arXiv:2412.19437.
    """
    scores = _scored(logits, rule.scores)
    wanted = scores if bias is None else scores + bias
    best = _top_experts(_from_groups(wanted, rule) if rule.kept < rule.groups else wanted, rule.chosen)
    shares = mx.take_along_axis(scores, best, axis=-1)
    if rule.scores == "none":
        shares = mx.softmax(shares.astype(mx.float32), axis=-1)
    if rule.normalized:
        total = shares.sum(axis=-1, keepdims=True)
        total = mx.maximum(total, rule.least) if rule.least else total
        shares = shares / (total + rule.added if rule.added else total)
    shares = shares if rule.scale == 1.0 else shares * rule.scale
    return best, shares if gains is None else shares * gains[best]


def _scored(logits: mx.array, scores: str) -> mx.array:
    if scores == "none":
        return logits
    wide = logits.astype(mx.float32)
    return mx.sigmoid(wide) if scores == "sigmoid" else mx.softmax(wide, axis=-1)


def _from_groups(wanted: mx.array, rule: Rule) -> mx.array:
    rows, experts = wanted.shape
    grouped = wanted.reshape(rows, rule.groups, experts // rule.groups)
    ranks = mx.topk(grouped, min(rule.ranked, grouped.shape[-1]), axis=-1).sum(axis=-1)
    chosen = mx.argpartition(ranks, kth=-rule.kept, axis=-1)[..., -rule.kept :]
    inside = mx.put_along_axis(mx.zeros(ranks.shape, mx.bool_), chosen, mx.array(True), axis=-1)
    return mx.where(inside[..., None], grouped, -mx.inf).reshape(rows, experts)


def _top_experts(scores: mx.array, count: int) -> mx.array:
    if count >= scores.shape[-1]:
        return mx.broadcast_to(mx.arange(scores.shape[-1], dtype=mx.uint32), scores.shape)
    return mx.stop_gradient(mx.argpartition(scores, kth=-count, axis=-1)[..., -count:])  # a choice has no gradient
