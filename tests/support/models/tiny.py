"""Tiny random models: written by transformers, or run by this project, for comparison."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlxinfer.models import build
from mlxinfer.models.decoder import Model

from ..oracles.plain_step import PlainCache
from .plain_weights import PlainWeights

VOCAB = 96


def write_with_transformers(folder: Path, model_type: str, seed: int = 0, **settings: Any) -> Any:
    """A float32 checkpoint with random weights in `folder`; returns the torch model. Needs torch and transformers."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, Mistral4ForCausalLM

    config = AutoConfig.for_model(model_type, **settings)
    torch.manual_seed(seed)
    # transformers knows `mistral4` as the text part of others only
    known = AutoModelForImageTextToText if "text_config" in settings else AutoModelForCausalLM
    make = Mistral4ForCausalLM._from_config if model_type == "mistral4" else known.from_config
    model = make(config, attn_implementation="eager", experts_implementation="eager").float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, 0.12)
            elif "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.normal_(0, 0.1)
        for name, buffer in model.named_buffers():
            if "bias" in name:
                buffer.normal_(0, 0.1)
            elif "layer_scalar" in name:
                buffer.uniform_(0.6, 1.4)
    model.save_pretrained(folder)
    return model


def transformers_logits(model: Any, tokens: list[int]) -> np.ndarray:
    import torch

    with torch.no_grad():
        logits: np.ndarray = model(torch.tensor([tokens]), use_cache=False).logits[0].float().numpy()
    return logits


def open_model(folder: Path, **changes: Any) -> Model:
    """The checkpoint of a folder by this project's graphs, its config changed where asked."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8")) | changes
    weights = PlainWeights.open(folder / "model.safetensors")
    model = build(config, weights)
    unused = set(weights.tensors) - weights.used
    assert not unused, f"nobody asked for {sorted(unused)}"
    return model


def logits_of(model: Model, tokens: list[int], chunks: list[int] | None = None) -> np.ndarray:
    """float32 `[T, vocab]` of one sequence, in steps of these many tokens."""
    cache = PlainCache(model.layers)
    rows, start = [], 0
    for count in chunks or [len(tokens)]:
        step = cache.step([(0, count)], {0: len(tokens)})
        rows.append(model.logits(model.hidden(mx.array(tokens[start : start + count], mx.int32), step)))
        start += count
    assert start == len(tokens)
    return np.array(mx.concatenate(rows))


def random_tokens(count: int, seed: int = 11, vocab: int = VOCAB) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(3, vocab, count)]
