"""Verdicts on the figures of a comparison, as sentences."""

from __future__ import annotations

from typing import Literal

Level = Literal["same", "excellent", "good", "fair", "poor", "unusable"]

_LEVELS: tuple[tuple[Level, float, float], ...] = (
    ("same", 1e-6, 1.0),
    ("excellent", 0.01, 0.93),
    ("good", 0.05, 0.85),
    ("fair", 0.2, 0.75),
    ("poor", 1.0, 0.5),
)
"""Largest KL divergence in nats, and smallest share of equal most likely tokens.

Common files (Q4_K_M, 4 bits in groups of 64) are good or fair; 8 bits are excellent. Beyond 1 nat, small models wrote nothing sensible. A
model compared with itself has about 1e-8.
"""
_SENTENCES: dict[Level, str] = {
    "same": "This model answers as its source does.",
    "excellent": "This model is as good as its source: {words}.",
    "good": "This model is close to its source: {words}.",
    "fair": "This model differs noticeably from its source: {words}.",
    "poor": "This model is much worse than its source: {words}.",
    "unusable": "This model is unusable: {words}.",
}
_SHARES = {
    "two of five": 0.4,
    "half of the": 0.5,
    "three of five": 0.6,
    "two of three": 0.667,
    "three of four": 0.75,
    "nine of ten": 0.9,
}
_NUMBERS = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
_MANY = 0.36
"""Shares from here on are nearer to two of five than to one of three."""


def level_of(kl: float, top1: float) -> Level:
    """Return the level of a mean KL divergence in nats and a share of equal most likely tokens; the worse of both decides."""
    return next((level for level, most, least in _LEVELS if kl <= most and top1 >= least), "unusable")


def verdict(kl: float, top1: float) -> str:
    """Return a sentence for people who do not know KL divergence, such as "This model is unusable: three of four words change."."""
    return _SENTENCES[level_of(kl, top1)].format(words=changed_words(top1))


def changed_words(top1: float) -> str:
    """Return the share of changed words, such as "one of eight words changes"."""
    changed = 1.0 - top1
    if changed >= _MANY:
        words = "almost all" if changed > 0.95 else min(_SHARES, key=lambda each: abs(_SHARES[each] - changed))
        return f"{words} words change"
    if changed < 0.001:
        return "hardly any word changes"
    count = round(1 / changed)
    return f"one of {_NUMBERS[count - 2] if count < 13 else f'{count:,}'} words changes"
