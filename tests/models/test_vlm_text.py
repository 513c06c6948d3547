"""Text models inside checkpoints that also see images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support.models.plain_weights import PlainWeights
from support.models.tiny import logits_of, random_tokens, transformers_logits, write_with_transformers

from mlxinfer.errors import UnsupportedModelError
from mlxinfer.loading.load import load
from mlxinfer.models import architecture, build
from mlxinfer.models.vlm_text import graph_name
from mlxinfer.nn.mrope import MRope

GOLDEN = Path(__file__).parents[1] / "golden" / "arch"
MODELS = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "mistral3": "ministral3",
    "smolvlm": "llama",
    "idefics3": "llama",
}
OLD_NAMES = ("plain", "mlx-lm", "transformers")
NAMES = [(model_type, style) for model_type in MODELS for style in OLD_NAMES]
NAMES += [(model_type, style) for model_type in ("smolvlm", "idefics3") for style in ("hub", "mlx-vlm")]


def inner(model_type: str) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((GOLDEN / MODELS[model_type] / "config.json").read_text(encoding="utf-8"))
    return read


def renamed(model_type: str, style: str) -> dict[str, mx.array]:
    def name(old: str) -> str:
        if style == "plain":
            return old
        if style in ("mlx-lm", "mlx-vlm"):
            return f"language_model.{old if style == 'mlx-lm' else old.removeprefix('model.')}"
        return old.replace("model.", "model.text_model." if style == "hub" else "model.language_model.", 1)

    held = mx.load(str(GOLDEN / MODELS[model_type] / "model.safetensors"))
    return {name(old): tensor for old, tensor in held.items()}


@pytest.mark.parametrize(("model_type", "style"), NAMES)
def test_the_text_model_is_found_under_each_name(model_type: str, style: str) -> None:
    data = np.load(GOLDEN / MODELS[model_type] / "reference.npz")
    weights = PlainWeights(renamed(model_type, style))
    config = {"model_type": model_type, "text_config": inner(model_type), "vision_config": {"depth": 2}, "image_token_id": 5}
    model = build(config, weights)
    assert weights.used == set(weights.tensors)
    stacked = {name for name in weights.tensors if ".experts." in name}
    assert set(weights.tensors) - stacked <= set(weights.asked)
    assert model.notes == ()
    assert np.abs(logits_of(model, data["ids"].tolist()) - data["logits"]).max() < 2e-3


@pytest.mark.parametrize(("model_type", "style"), NAMES)
def test_the_names_in_a_conversion_are_those_of_the_graph(model_type: str, style: str) -> None:
    assert sorted(map(graph_name, renamed(model_type, style))) == sorted(renamed(model_type, "plain"))


@pytest.mark.parametrize("model_type", sorted(MODELS.keys() - {"mistral3", "smolvlm", "idefics3"}))
def test_a_flat_config_as_mlx_lm_allows(model_type: str) -> None:
    data = np.load(GOLDEN / MODELS[model_type] / "reference.npz")
    model = build(inner(model_type) | {"model_type": model_type}, PlainWeights(renamed(model_type, "plain")))
    assert model.notes == ()
    assert np.abs(logits_of(model, data["ids"].tolist()) - data["logits"]).max() < 2e-3


@pytest.mark.parametrize(
    "changes", [{"text_config": "gemma"}, {"text_config": {"model_type": "llama"}}, {"text_config": {}, "pooling": 4}], ids=str
)
def test_what_is_not_understood_outside_is_named(changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match=r"text_config|pooling"):
        build({"model_type": "gemma3", **changes}, PlainWeights({}))


TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 320,
}
MROPE = {"rope_scaling": {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True}}
QWEN_EYES = {
    "depth": 1,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 64,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
QWEN2_TEXT = {key: value for key, value in TEXT.items() if key != "head_dim"} | {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 2, 2]}
}
QWEN2_EYES = {"depth": 1, "hidden_size": 32, "embed_dim": 32, "num_heads": 2, "intermediate_size": 64, "out_hidden_size": 64}
EYES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
WHOLE: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"text_config": QWEN2_TEXT, "vision_config": QWEN2_EYES | {"hidden_size": 64}},
    "qwen2_5_vl": {"text_config": QWEN2_TEXT, "vision_config": QWEN2_EYES | {"fullatt_block_indexes": [0]}},
    "qwen3_vl": {"text_config": TEXT | MROPE, "vision_config": QWEN_EYES},
    "qwen3_vl_moe": {
        "text_config": TEXT | MROPE | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        "vision_config": QWEN_EYES,
    },
    "lfm2_vl": {
        "text_config": TEXT | {"model_type": "lfm2", "layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False},
        "vision_config": EYES | {"num_patches": 16, "patch_size": 4},
    },
    "internvl": {
        "text_config": {key: value for key, value in TEXT.items() if key != "head_dim"} | {"model_type": "qwen2"},
        "vision_config": EYES | {"image_size": [16, 16], "patch_size": [4, 4]},
    },
    "smolvlm": {
        "text_config": TEXT | {"model_type": "llama", "pad_token_id": 2},
        "vision_config": EYES | {"image_size": 16, "patch_size": 4},
    },
    "idefics3": {
        "text_config": TEXT | {"model_type": "mistral", "sliding_window": 32, "pad_token_id": 2},
        "vision_config": EYES | {"image_size": 16, "patch_size": 4},
    },
    "exaone4_5": {
        "text_config": TEXT | {"model_type": "exaone4", "sliding_window": 16, "sliding_window_pattern": 3},
        "vision_config": QWEN_EYES | {"num_key_value_heads": 2, "fullatt_block_indexes": [0]},
    },
    "gemma4_unified": {
        "text_config": TEXT
        | {
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "global_head_dim": 32,
            "sliding_window": 16,
            "pad_token_id": 0,
        }
    },
}


@pytest.mark.torch
@pytest.mark.parametrize("model_type", WHOLE)
def test_the_text_model_inside_computes_what_transformers_computes(model_type: str, tmp_path: Path) -> None:
    tokens = [token % 300 + 3 for token in random_tokens(90)]
    expected = transformers_logits(write_with_transformers(tmp_path, model_type, **WHOLE[model_type]), tokens)
    loaded = load(tmp_path, dtype="float32")
    assert loaded.vision in loaded.notes
    for chunks in (None, [33, 1, 56]):
        assert np.abs(logits_of(loaded.model, tokens, chunks) - expected).max() < 1e-4 * np.abs(expected).max()


SMOLVLM_256M: dict[str, Any] = {
    "architectures": ["Idefics3ForConditionalGeneration"],
    "image_token_id": 49190,
    "model_type": "idefics3",
    "scale_factor": 4,
    "text_config": {
        "_flash_attn_2_enabled": True,
        "_name_or_path": "None",
        "architectures": ["VLlama3ForCausalLM"],
        "head_dim": 64,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "is_llama_config": True,
        "max_position_embeddings": 8192,
        "model_type": "llama",
        "neftune_noise_alpha": 0.0,
        "num_attention_heads": 9,
        "num_hidden_layers": 30,
        "num_key_value_heads": 3,
        "pad_token_id": 2,
        "perceiver_config": {"model_type": "vllama3", "resampler_depth": 6, "resampler_n_latents": 64},
        "pixel_shuffle_factor": 4,
        "qk_layer_norms": False,
        "rms_norm_eps": 1e-05,
        "rope_interleaved": False,
        "rope_theta": 100000,
        "torch_dtype": "bfloat16",
        "transformers.js_config": {"kv_cache_dtype": {"fp16": "float16", "q4f16": "float16"}},
        "use_resampler": False,
        "vocab_size": 49280,
    },
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers.js_config": {"kv_cache_dtype": {"fp16": "float16", "q4f16": "float16"}},
    "transformers_version": "4.46.0",
    "use_cache": True,
    "use_reentrant_checkpoint": False,
    "vision_config": {"hidden_size": 768, "model_type": "idefics3", "num_attention_heads": 12, "patch_size": 16, "image_size": 512},
    "vocab_size": 49280,
}


def test_the_published_config_of_smolvlm_256m() -> None:
    sizes = architecture(SMOLVLM_256M).sizes
    assert (sizes.hidden, sizes.layers, sizes.vocab, sizes.positions) == (576, 30, 49280, 8192)
    resampled = SMOLVLM_256M | {"text_config": SMOLVLM_256M["text_config"] | {"use_resampler": True}}
    with pytest.raises(UnsupportedModelError, match="use_resampler"):
        architecture(resampled)


QWEN2_5_VL_3B: dict[str, Any] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "vision_token_id": 151654,
    "image_token_id": 151655,
    "video_token_id": 151656,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "max_position_embeddings": 128000,
    "max_window_layers": 70,
    "model_type": "qwen2_5_vl",
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.41.2",
    "use_cache": True,
    "use_sliding_window": False,
    "vision_config": {"depth": 32, "hidden_act": "silu", "hidden_size": 1280, "num_heads": 16, "window_size": 112},
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vocab_size": 151936,
}


def test_a_flat_config_of_qwen2_5_vl_as_published() -> None:
    found = architecture(QWEN2_5_VL_3B)
    rope = found.ropes["rope"]
    assert (found.sizes.hidden, found.sizes.heads.dim, found.sizes.eps, rope.context) == (2048, 128, 1e-6, 128000)
    assert isinstance(rope, MRope)
    assert rope.axes.tolist() == [0] * 16 + [1] * 24 + [2] * 24
    assert rope.frequencies(0)[1] == pytest.approx(1e6 ** (-1 / 64))


def test_sections_of_a_config_without_them() -> None:
    for rope_keys in ({}, {"rope_theta": 5e6}, {"rope_scaling": None}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e6}}):
        rope = architecture({"model_type": "qwen3_vl", "text_config": {"head_dim": 128, **rope_keys}}).ropes["rope"]
        assert isinstance(rope, MRope)
        assert rope.axes.tolist() == [0, 1, 2] * 20 + [0] * 4
        assert rope.frequencies(0)[1] == pytest.approx(5e6 ** (-1 / 64))


def test_the_names_of_internvl_before_transformers(tmp_path: Path) -> None:
    """`internvl_chat` has the text model's config under `llm_config`, and towers called `vision_model` and `mlp1`."""
    data = np.load(GOLDEN / "qwen2" / "reference.npz")
    held = mx.load(str(GOLDEN / "qwen2" / "model.safetensors"))
    tensors = {f"language_model.{name}": tensor for name, tensor in held.items()}
    tensors |= {"vision_model.encoder.layers.0.ls1": mx.ones(4), "mlp1.0.weight": mx.ones(4)}
    mx.save_safetensors(str(tmp_path / "model.safetensors"), tensors)
    text = json.loads((GOLDEN / "qwen2" / "config.json").read_text(encoding="utf-8"))
    config = {"model_type": "internvl_chat", "llm_config": text, "auto_map": {"AutoModel": "x"}, "downsample_ratio": 0.5}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    loaded = load(tmp_path, dtype="float32")
    assert loaded.vision in loaded.notes
    assert np.abs(logits_of(loaded.model, data["ids"].tolist()) - data["logits"]).max() < 2e-3
