"""Checkpoints of `fallback_cases` as transformers writes them. Needs torch and transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from .cases import BASE, CASES, RENAMED, WHOLE, WRAPPED

Written = tuple[dict[str, Any], dict[str, mx.array], np.ndarray]


def variants() -> list[tuple[str, int]]:
    """Every `model_type`, and the number of each of its models."""
    listed = [(kind, number) for kind, models in {**CASES, **WHOLE}.items() for number in range(len(models))]
    return listed + [(kind, 0) for kind in (*RENAMED, *WRAPPED)]


def written(folder: Path, kind: str, number: int, tokens: list[int]) -> Written:
    """Config, tensors and logits `[T, vocab]` of one model."""
    if kind in RENAMED:
        config, tensors, logits = written(folder, RENAMED[kind], number, tokens)
        return config | {"model_type": kind}, tensors, logits
    if kind in WRAPPED:
        config, tensors, logits = written(folder, WRAPPED[kind], number, tokens)
        named = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
        return {"model_type": kind, "text_config": config, "tie_word_embeddings": True}, named, logits
    model = _model(kind, number)
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    tensors = dict(mx.load(str(folder / "model.safetensors")))
    if kind == "longcat_flash":  # transformers also writes matrices of experts that compute nothing
        real = config["n_routed_experts"]
        unused = [f".experts.{real + expert}." for expert in range(config["zero_expert_num"])]
        tensors = {name: tensor for name, tensor in tensors.items() if not any(part in name for part in unused)}
    return config, tensors, _logits(model, tokens)


def _model(kind: str, number: int) -> Any:
    """A torch model in float32 with random weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    torch.manual_seed(3)
    settings = WHOLE[kind][number] if kind in WHOLE else {**BASE, **CASES[kind][number]}
    config = AutoConfig.for_model(kind, **settings)
    build = AutoModelForImageTextToText if kind in WHOLE else AutoModelForCausalLM
    model = build.from_config(config, attn_implementation="eager", experts_implementation="eager").float().eval()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *((n, b) for n, b in model.named_buffers() if "bias" in n)]:
            if not tensor.is_floating_point():
                continue
            if tensor.dim() >= 2:
                tensor.normal_(0, 0.12)
            elif "norm" in name or ("ln_" in name and "weight" in name):
                tensor.add_(torch.randn_like(tensor) * 0.1)
            else:
                tensor.normal_(0, 0.1)
    return model


def _logits(model: Any, tokens: list[int]) -> np.ndarray:
    import torch

    with torch.no_grad():
        logits: np.ndarray = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float().numpy()
    return logits
