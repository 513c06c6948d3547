"""Launches `router`: from a router's logits to the chosen experts and their weights."""

from __future__ import annotations

from functools import cache

import mlx.core as mx

from ...errors import UnsupportedShapeError
from ..executors import Launch, Template
from .reference import SCORES, Rule

MOST_EXPERTS = 1024
"""Maximum that fits in the registers of a simdgroup."""
MOST_CHOSEN, MOST_GROUPS = 32, 32
"""Maxima: a lane has a place of the result, and a lane ranks a group."""
MOST_RANKED = 8
_DTYPES = (mx.float32, mx.float16, mx.bfloat16)


def choose_experts(logits: mx.array, rule: Rule, bias: mx.array | None = None, gains: mx.array | None = None) -> tuple[mx.array, mx.array]:
    """See `reference.choose_experts`; here the experts of a row are in descending order of score with bias, equal ones in ascending order.

    Logits are float32, float16 or bfloat16. What is not a number is chosen last. Raises ValueError for shapes that do not fit, and
    `UnsupportedShapeError`.
    """
    launch = launch_of(logits, rule, biased=bias is not None, gained=gains is not None)
    for vector in (bias, gains):
        if vector is not None and (vector.shape != logits.shape[1:] or vector.dtype != mx.float32):
            raise ValueError(f"a bias or gain is {vector.dtype}{list(vector.shape)}; expected float32 {list(logits.shape[1:])}")
    experts, shares = launch.run([logits, *vectors_of(rule, bias, gains)])
    return experts, shares


def launch_of(logits: mx.array, rule: Rule, *, biased: bool, gained: bool) -> Launch:
    """Return the launch of `choose_experts` for logits of this shape, which callers may cache. Raises the errors of `choose_experts`."""
    rows, experts = _check(logits, rule)
    template: Template = [
        ("EXPERTS", experts),
        ("CHOSEN", rule.chosen),
        ("SCORES", SCORES.index(rule.scores)),
        ("BIASED", biased),
        ("GAINED", gained),
        ("NORMALIZED", rule.normalized),
        ("GROUPS", rule.groups),
        ("KEPT", rule.kept),
        ("RANKED", min(rule.ranked, experts // rule.groups)),
    ]
    shapes, dtypes = [(rows, rule.chosen)] * 2, [mx.uint32, mx.float32]
    return Launch("router/router.metal", "router", template, shapes, dtypes, (32 * rows, 1, 1), (32, 1, 1))


def vectors_of(rule: Rule, bias: mx.array | None, gains: mx.array | None) -> list[mx.array]:
    """Return the inputs of the kernel after the logits."""
    settings = _settings(rule.least, rule.added, rule.scale)
    return [settings if bias is None else bias, settings if gains is None else gains, settings]


@cache
def _settings(least: float, added: float, scale: float) -> mx.array:
    made = mx.array([least, added, scale], mx.float32)
    mx.eval(made)  # it outlives the thread that made it
    return made


def _check(logits: mx.array, rule: Rule) -> tuple[int, int]:
    if logits.ndim != 2 or 0 in logits.shape:
        raise ValueError(f"logits are {list(logits.shape)}; expected [rows, experts]")
    rows, experts = logits.shape
    fits = rule.groups > 0 and experts % rule.groups == 0 and 0 < rule.kept <= rule.groups
    if not fits or not 0 < rule.chosen <= experts // rule.groups * rule.kept or rule.scores not in SCORES:
        raise ValueError(f"{experts} experts do not fit {rule}")
    counts = experts <= MOST_EXPERTS and rule.chosen <= MOST_CHOSEN and rule.groups <= MOST_GROUPS and 0 < rule.ranked <= MOST_RANKED
    if not counts or logits.dtype not in _DTYPES:
        raise UnsupportedShapeError(
            f"no choice of {rule.chosen} of {experts} experts in {rule.groups} groups from {str(logits.dtype).removeprefix('mlx.core.')}; "
            f"there are {MOST_CHOSEN} of {MOST_EXPERTS} in {MOST_GROUPS} at most"
        )
    return rows, experts
