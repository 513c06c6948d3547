"""Text models of Gemma with image rows, of random settings, against transformers: spans, windows shorter than images, per-layer inputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support.models.tiny import write_with_transformers

from mlxinfer.cache.base import GivenRows, Segment
from mlxinfer.cache.kv_format import KVFormat
from mlxinfer.cache.paged import PagedCache
from mlxinfer.loading.load import load
from mlxinfer.models.decoder import Model

VOCAB, IMAGE, PAD, HIDDEN = 150, 149, 7, 48
SLIDING, FULL = "sliding_attention", "full_attention"
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "layer_types": [SLIDING, SLIDING, FULL, FULL],
    "pad_token_id": PAD,
}
GEMMA4: dict[str, Any] = TEXT | {"global_head_dim": 32, "hidden_size_per_layer_input": 0, "tie_word_embeddings": True}
SIGLIP: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "image_size": 28,
    "patch_size": 14,
}
TOWER4: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
PATCHES: dict[str, Any] = {"patch_size": 8, "pooling_kernel_size": 3, "mm_embed_dim": 16, "mm_posemb_size": 16, "output_proj_dims": 16}
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma3": ("gemma3", TEXT | {"query_pre_attn_scalar": 16}, SIGLIP),
    "gemma4": ("gemma4", GEMMA4 | {"use_bidirectional_attention": "vision"}, TOWER4),
    "gemma4_e": (
        "gemma4",
        GEMMA4
        | {
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB,
            "num_kv_shared_layers": 2,
            "layer_types": [SLIDING, FULL] * 2,
        },
        TOWER4,
    ),
    "gemma4_unified": ("gemma4_unified", GEMMA4 | {"use_bidirectional_attention": "vision"}, PATCHES),
}
"""Model type, text config and vision config of each kind."""


def prompt(seed: int) -> tuple[list[int], list[tuple[int, int]]]:
    """Token ids with one to three images of 1 to 90 rows, and their ranges."""
    rng = np.random.default_rng(seed)
    ids: list[int] = []
    ranges = []
    for _ in range(int(rng.integers(1, 4))):
        ids += rng.integers(8, 140, rng.integers(1, 60)).tolist()
        ranges.append((len(ids), len(ids) + int(rng.integers(1, 90))))
        ids += [IMAGE] * (ranges[-1][1] - ranges[-1][0])
    return ids + rng.integers(8, 140, rng.integers(2, 70)).tolist(), ranges


def theirs(model: Any, ids: list[int], ranges: list[tuple[int, int]], features: np.ndarray) -> np.ndarray:
    import torch
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    parts = torch.split(torch.tensor(features), [end - first for first, end in ranges])
    one = model.config.model_type == "gemma3"
    model.model.get_image_features = lambda *_, **__: BaseModelOutputWithPooling(pooler_output=torch.cat(parts) if one else parts)
    kinds = torch.tensor([[int(token == IMAGE) for token in ids]])
    with torch.no_grad():
        found = model(
            input_ids=torch.tensor([ids]),
            pixel_values=torch.zeros(1),
            **{"token_type_ids" if one else "mm_token_type_ids": kinds},
            use_cache=False,
        )
    logits: np.ndarray = found.logits[0].numpy()
    return logits


def ours(
    model: Model, ids: list[int], ranges: list[tuple[int, int]], features: np.ndarray, chunk: int, kv: KVFormat | None = None
) -> np.ndarray:
    """Logits by this project, in chunks of so many rows that divide no image."""
    cache = PagedCache(model.layers, dtype=mx.float32, kv_cache_tokens=2048, chunk=512, kv=kv)
    slot, past, rows = cache.open(), 0, []
    images = [row for first, end in ranges for row in range(first, end)]
    while past < len(ids):
        end = min(past + chunk, len(ids))
        end = next((last if first <= past else first for first, last in ranges if first < end < last), end)
        own = [row for row in images if past <= row < end]
        spans = tuple((first, last) for first, last in ranges if past <= first < end)
        step = cache.begin([Segment(slot, 0, end - past, past, len(ids), spans=spans)])
        if own:
            step.given = GivenRows(mx.array([row - past for row in own], mx.int32), mx.array(features[[images.index(row) for row in own]]))
        tokens = [0 if token == IMAGE else token for token in ids[past:end]]
        logits = model.logits(model.hidden(mx.array(tokens, mx.int32), step))
        mx.eval(logits, step.state)
        if step.needs_commit:
            cache.commit(step)
        rows.append(np.array(logits))
        past = end
    return np.concatenate(rows)


@pytest.mark.torch
@pytest.mark.parametrize("window", [5, *(pytest.param(rows, marks=pytest.mark.long) for rows in (40, 512))])
@pytest.mark.parametrize("kind", MODELS)
def test_image_rows_are_those_of_transformers(kind: str, window: int, tmp_path: Path) -> None:
    model_type, text, vision = MODELS[kind]
    keys = {"image_token_index": IMAGE, "mm_tokens_per_image": 4} if kind == "gemma3" else {"image_token_id": IMAGE, "audio_config": None}
    named = {"text_config": text | {"sliding_window": window}, "vision_config": vision}
    other = write_with_transformers(tmp_path, model_type, **keys, **named)
    model = load(tmp_path, dtype="float32").model
    for seed in range(3):
        ids, ranges = prompt(seed)
        features = np.random.default_rng(seed).normal(size=(ids.count(IMAGE), HIDDEN)).astype(np.float32)
        expected = theirs(other, ids, ranges, features)
        for chunk in (512, 1, 33):
            assert np.abs(ours(model, ids, ranges, features, chunk) - expected).max() < 1e-4 * np.abs(expected).max()
    causal = ours(model, ids, [(row, row + 1) for first, end in ranges for row in range(first, end)], features, 512)
    assert (np.abs(causal - expected).max() > 0.01) == (kind != "gemma4_e")
