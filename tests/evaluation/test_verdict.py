"""Figures become sentences: each level follows its figures, and worse figures never sound better."""

from __future__ import annotations

import pytest

from mlxinfer.evaluation.verdict import changed_words, level_of, verdict


@pytest.mark.parametrize(
    ("kl", "top1", "sentence"),
    [
        (2.1795, 0.266, "This model is unusable: three of four words change."),
        (15.98, 0.01, "This model is unusable: almost all words change."),
        (0.7436, 0.546, "This model is much worse than its source: half of the words change."),
        (0.1714, 0.764, "This model differs noticeably from its source: one of four words changes."),
        (0.0437, 0.879, "This model is close to its source: one of eight words changes."),
        (0.0012, 0.985, "This model is as good as its source: one of 67 words changes."),
        (0.0, 1.0, "This model answers as its source does."),
    ],
)
def test_measured_models_are_told_in_words(kl: float, top1: float, sentence: str) -> None:
    assert verdict(kl, top1) == sentence


def test_the_worse_figure_decides() -> None:
    assert level_of(0.001, 0.4) == level_of(3.0, 0.99) == "unusable"


def test_a_share_of_changed_words_is_near_what_is_said() -> None:
    numbers = {"one": 1, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10}
    numbers |= {"eleven": 11, "twelve": 12}
    for tenth in range(60, 950):
        first, _, second, *_ = changed_words(1 - tenth / 1000).split()
        said = 0.5 if first == "half" else numbers[first] / (numbers.get(second) or int(second.replace(",", "")))
        assert said == pytest.approx(tenth / 1000, abs=0.08), tenth


def test_levels_never_rise_with_the_loss() -> None:
    order = ["same", "excellent", "good", "fair", "poor", "unusable"]
    ranks = [order.index(level_of(kl / 100, 1 - min(kl / 100, 1))) for kl in range(300)]
    assert ranks == sorted(ranks)
    assert set(ranks) == set(range(6))
