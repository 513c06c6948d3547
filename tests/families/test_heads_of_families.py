"""Heads that draft from a family's hidden rows: of its own checkpoints where these have one, or trained for it."""

from __future__ import annotations

import pytest
from support.engines.tiny_engine import request, run
from support.models.families import column, loaded_model, reference
from support.models.heads import HEAD, OWN_HEADS, Prompter, config_of, engine_with, model_with_head

from mlxinfer.engine.core.sequence import Sequence

LIMIT = 12


def requests(name: str) -> list[Sequence]:
    """One fills a page while it answers, the other is sampled."""
    tokens = reference(name)[0]
    return [request(tokens[:58], LIMIT), request(tokens[5:20], LIMIT, temperature=1.0, seed=4)]


@pytest.mark.long
@column("a head")
def test_a_head_changes_nothing(name: str, record_property: object) -> None:
    config = config_of(name)
    own = OWN_HEADS.get(name)
    fitting = HEAD | {"hidden_size": config["hidden_size"], "vocab_size": config["vocab_size"]}
    model, _ = model_with_head(name, True, **own) if own is not None else model_with_head(name, fitting)
    plain = engine_with(loaded_model(name), max_draft=0, max_num_batched_tokens=80)
    expected = run(plain, requests(name))
    engine = engine_with(model, max_num_batched_tokens=80)
    Prompter(engine, {tuple(s.prompt): answer for s, answer in zip(requests(name), expected, strict=True)})
    sequences = requests(name)
    assert run(engine, sequences) == expected
    assert sum(s.drafted_tokens for s in sequences) > 5
    if own is not None:
        assert callable(record_property)
        record_property("cell", "its own")
