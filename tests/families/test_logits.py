"""Every golden checkpoint gives transformers' logits, however its tokens are read and whichever style its config has."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from support.models.families import GOLDEN, LIMIT, Pages, column, config, error, old_keys, reference
from support.models.plain_weights import PlainWeights
from support.models.tiny import logits_of, open_model

from mlxinfer.models import build


@column("logits")
def test_logits(name: str, record_property: Callable[[str, object], None]) -> None:
    """By plain MLX over a cache of its own, which shares nothing with the pages."""
    tokens, expected = reference(name)
    found = error(logits_of(open_model(GOLDEN / name), tokens), expected)
    record_property("error", found)
    assert found < LIMIT


@column("chunks")
def test_chunks_of_any_size(name: str) -> None:
    """Over pages, with the CPU kernels where these are in use."""
    tokens, expected = reference(name)
    pages = Pages(name)
    rest = len(tokens) - 71
    assert error(pages.read_all(pages.open(), tokens, [7, 1, 55, 1, 7, rest]), expected) < LIMIT
    assert error(pages.read((pages.open(), tokens))[0], expected) < LIMIT


@column("batch")
def test_others_in_the_same_step(name: str) -> None:
    tokens, expected = reference(name)
    pages = Pages(name)
    slots = [pages.open(), pages.open(), pages.open()]
    done, rows = [0, 0, 0], [[], [], []]
    last = len(tokens)
    for parts in (
        [(0, 63), (1, 3)],
        [(1, 40), (2, 66), (0, 1)],
        [(0, 1), (1, 1), (2, 1)],
        [(2, last - 67), (0, last - 65), (1, last - 44)],
    ):
        found = pages.read(*[(slots[i], tokens[done[i] : done[i] + count]) for i, count in parts])
        for (i, count), logits in zip(parts, found, strict=True):
            rows[i].append(logits)
            done[i] += count
    assert done == [last] * 3
    assert max(error(np.concatenate(found), expected) for found in rows) < LIMIT


@column("configs of transformers 4 and 5")
def test_the_old_style_of_the_config_means_the_same(name: str) -> None:
    tokens, expected = reference(name)
    model = build(old_keys(name), PlainWeights.open(GOLDEN / name / "model.safetensors"))
    assert error(logits_of(model, tokens), expected) < LIMIT


@column("names of its own")
def test_what_was_asked_for_is_a_checkpoint_of_its_own(name: str) -> None:
    """The tensors that a graph asks for form a checkpoint, which is what conversion writes."""
    tokens, expected = reference(name)
    weights = PlainWeights.open(GOLDEN / name / "model.safetensors")
    build(config(name), weights)
    again = PlainWeights(weights.asked)
    model = build(config(name), again)
    assert again.used == set(weights.asked)
    assert error(logits_of(model, tokens), expected) < LIMIT
