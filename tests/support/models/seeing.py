"""Tiny checkpoints that see images (tests/golden/vision), and requests with the pictures of their golden cases."""

from __future__ import annotations

import json
from collections.abc import Sequence as Many
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlxinfer.cache.base import AttentionSpec
from mlxinfer.cache.kv_format import KVFormat
from mlxinfer.config import EngineConfig
from mlxinfer.engine.core.engine import Engine
from mlxinfer.engine.core.sequence import Sequence
from mlxinfer.engine.spec_decode.draft_model import Drafter
from mlxinfer.loading.load import load
from mlxinfer.loading.vision import Vision
from mlxinfer.models.decoder import Model
from mlxinfer.sampling import sample_seed
from mlxinfer.tokenizer.tokenizer import Tokenizer
from mlxinfer.types import SamplingParams
from mlxinfer.vision.inputs import ImageInput, PromptImages
from mlxinfer.vision.picture import read_picture
from mlxinfer.vision.prompt import expanded

GOLDEN = Path(__file__).parents[2] / "golden" / "vision"
Picture = np.ndarray[Any, Any]
"""uint8 `[height, width, 3]`."""


@dataclass(frozen=True)
class Seeing:
    """A model with its tower."""

    model: Model
    vision: Vision
    tokenizer: Tokenizer
    mrope: bool
    spans: bool


@dataclass(frozen=True)
class Case:
    """A golden case: messages, their pictures, and what transformers answers greedily."""

    messages: list[dict[str, Any]]
    pictures: list[Picture]
    greedy: list[int]


@cache
def seeing(family: str = "smolvlm") -> Seeing:
    """As the loader leaves it: packed for the CPU kernels where these are in use."""
    loaded = load(GOLDEN / family, dtype="float32")
    assert isinstance(loaded.vision, Vision), loaded.vision
    spans = any(isinstance(spec, AttentionSpec) and spec.sees_spans for spec in loaded.model.layers)
    return Seeing(loaded.model, loaded.vision, loaded.tokenizer, getattr(loaded.model, "mrope", False), spans)


@cache
def cases(family: str = "smolvlm") -> dict[str, Case]:
    found = {}
    with np.load(GOLDEN / family / "reference.npz") as reference:
        for name in json.loads(str(reference["cases"])):
            places = sorted(key for key in reference.files if key.startswith(f"{name}_image_") and key.rpartition("_")[2].isdecimal())
            messages, greedy = json.loads(str(reference[f"{name}_messages"])), reference[f"{name}_greedy"].tolist()
            found[name] = Case(messages, [reference[key] for key in places], greedy)
    return found


def seeing_engine(family: str = "smolvlm", kv: KVFormat | None = None, drafter: Drafter | None = None, **settings: Any) -> Engine:
    values = {"max_context": 1024, "kv_cache_tokens": 8192, "max_num_batched_tokens": 64, "max_num_seqs": 8} | settings
    found = seeing(family)
    return Engine(found.model, EngineConfig(**values), dtype=mx.float32, kv=kv, drafter=drafter, vision=found.vision)


def prompt_of(messages: list[dict[str, Any]], pictures: Many[Picture], family: str = "smolvlm") -> tuple[list[int], PromptImages | None]:
    found = seeing(family)
    inputs = [ImageInput.of(found.vision.processor.pixels(read_picture(picture))) for picture in pictures]
    layouts = [image.layout for image in inputs]
    ids = found.tokenizer.encode_chat(messages, expand=lambda text: expanded(text, found.vision.processor, layouts))
    return ids, images_of(ids, inputs, family) if inputs else None


def images_of(ids: list[int], inputs: Many[ImageInput], family: str) -> PromptImages:
    found = seeing(family)
    return PromptImages.of(ids, inputs, found.vision.processor.image_token_id, mrope=found.mrope, spans=found.spans)


def seeing_request(
    messages: list[dict[str, Any]],
    pictures: Many[Picture],
    limit: int = 16,
    family: str = "smolvlm",
    index: int = 0,
    **params: Any,
) -> Sequence:
    params.setdefault("temperature", 0.0)
    ids, images = prompt_of(messages, pictures, family)
    settings = SamplingParams(**params)
    return Sequence(
        ids, settings, sample_seed(settings.seed or 0, index), len(ids) + limit, index=index, images=images if pictures else None
    )


def case_request(name: str, limit: int = 16, family: str = "smolvlm", index: int = 0, **params: Any) -> Sequence:
    case = cases(family)[name]
    return seeing_request(case.messages, case.pictures, limit, family, index, **params)
