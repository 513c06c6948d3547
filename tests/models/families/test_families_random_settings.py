"""Every newer family with settings drawn at random: its logits are those of transformers, however the tokens are cut, by plain MLX and by
what the engine runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.models.families import LIMIT, ModelPages, error
from support.models.plain_weights import PlainWeights
from support.models.random_settings import BASE, FAMILIES, Draw
from support.models.tiny import logits_of, open_model, random_tokens, transformers_logits, write_with_transformers

from mlxinfer.models import build
from mlxinfer.nn.packing import settle

pytestmark = pytest.mark.torch

TOKENS = random_tokens(100)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("family", FAMILIES)
def test_logits(family: str, seed: int, tmp_path: Path) -> None:
    settings = FAMILIES[family](Draw(seed, *family.encode()))
    expected = transformers_logits(write_with_transformers(tmp_path, family, seed, **BASE, **settings), TOKENS)
    plain = open_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    packed = build(config, PlainWeights.open(tmp_path / "model.safetensors"), ready=settle)
    pages = ModelPages(packed, len(TOKENS))
    paged = pages.read_all(pages.open(), TOKENS, [70, 1, 2, 1, 5, 1, 20])
    for logits in (logits_of(plain, TOKENS), logits_of(plain, TOKENS, [33, 1, 66]), paged):
        assert error(logits, expected) < LIMIT, settings
