"""Tokenizers cut down from real models, so small, with the ids that llama.cpp gave for a page of odd texts."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from mlxinfer.tokenizer import Tokenizer, from_gguf

GOLDEN = Path(__file__).parents[2] / "golden" / "tokenizer" / "llamacpp_vocabularies.json"


@cache
def golden() -> dict[str, Any]:
    """`texts`, and under `vocabularies` the GGUF metadata of each tokenizer and its `ids` of those texts."""
    contents: dict[str, Any] = json.loads(GOLDEN.read_text(encoding="utf-8"))
    return contents


def golden_metadata(name: str) -> dict[str, Any]:
    return dict(golden()["vocabularies"][name]["metadata"])


@cache
def golden_tokenizer(name: str) -> Tokenizer:
    return from_gguf(golden_metadata(name))
