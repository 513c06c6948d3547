"""Choices of a router, drawn at random: uniform, skewed, sticky from token to token, with subjects that change, and with prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

Trace = Iterator[np.ndarray]
"""Steps: experts `[rows, k]`, distinct in each row."""


def uniform(rng: np.random.Generator, experts: int, k: int) -> Trace:
    """Choose every expert equally often, independently of the last token: the worst case."""
    while True:
        yield _draw(rng, np.zeros(experts), k)


def zipf(rng: np.random.Generator, experts: int, k: int, exponent: float = 1.0) -> Trace:
    """Choose experts with weights of 1 / rank^exponent."""
    weights = _zipf_logits(rng, experts, exponent)
    while True:
        yield _draw(rng, weights, k)


def sticky(rng: np.random.Generator, experts: int, k: int, kept: float = 0.4, exponent: float = 0.5) -> Trace:
    """Keep each expert of the last token with probability `kept`, and draw the others with weights of 1 / rank^exponent."""
    weights = _zipf_logits(rng, experts, exponent)
    last = _draw(rng, weights, k)[0]
    while True:
        stays = last[rng.random(k) < kept]
        boosted = weights.copy()
        boosted[stays] = np.inf
        last = _draw(rng, boosted, k)[0]
        yield last[None]


def subjects(rng: np.random.Generator, experts: int, k: int, length: int = 200, exponent: float = 1.2) -> Trace:
    """Choose with weights of 1 / rank^exponent, whose ranks change every `length` tokens."""
    while True:
        weights = _zipf_logits(rng, experts, exponent)
        for _ in range(length):
            yield _draw(rng, weights, k)


def with_prompts(rng: np.random.Generator, experts: int, k: int, rows: int = 256, length: int = 150) -> Trace:
    """Choose as `sticky`, with a prompt of `rows` rows before every `length` tokens."""
    tokens = sticky(rng, experts, k)
    while True:
        yield np.concatenate([next(tokens) for _ in range(rows)])
        for _ in range(length):
            yield next(tokens)


TRACES: dict[str, Callable[[np.random.Generator, int, int], Trace]] = {
    "uniform": uniform,
    "zipf": zipf,
    "sticky": sticky,
    "subjects": subjects,
    "prompts": with_prompts,
}


def _zipf_logits(rng: np.random.Generator, experts: int, exponent: float) -> np.ndarray:
    return np.asarray(-exponent * np.log(rng.permutation(experts) + 1.0))


def _draw(rng: np.random.Generator, logits: np.ndarray, k: int) -> np.ndarray:
    """Draw `[1, k]` experts without replacement.

    The Gumbel-top-k trick of Kool et al., "Stochastic Beams and Where to Find Them", 2019.
    """
    return np.argsort(-(logits + rng.gumbel(size=len(logits))), kind="stable")[None, :k]
