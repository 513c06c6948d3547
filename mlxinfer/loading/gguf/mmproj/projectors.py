"""Projector types that can be read, from `clip.projector_type` or `clip.vision.projector_type`."""

from __future__ import annotations

from collections.abc import Callable

from ..base_config import Config
from ..reader import TensorInfo
from ..transforms import MappedTensor, half_rotation, values, without_one
from .projector import ClipSource, Projector, Settings, channels_last

_HALF = (0.5, 0.5, 0.5)
_CLIP_MEAN, _CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_IMAGENET_MEAN, _IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_SIGLIP = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.out_proj",
    "ln1": "layer_norm1",
    "ln2": "layer_norm2",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
_QWEN = {"attn_qkv": "attn.qkv", "attn_out": "attn.proj", "ln1": "norm1", "ln2": "norm2"}
_QWEN2_MODEL = {
    "v.patch_embd": "visual.patch_embed.proj",
    "v.post_ln": "visual.merger.ln_q",
    "mm.0": "visual.merger.mlp.0",
    "mm.2": "visual.merger.mlp.2",
}
_GATED = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}


def _named(name: str) -> Callable[[Config], str]:
    return lambda text: name


def _normalized(source: ClipSource, mean: tuple[float, ...], std: tuple[float, ...]) -> Settings:
    return {"image_mean": source.floats("image_mean", mean), "image_std": source.floats("image_std", std)}


def _siglip_names(prefix: str) -> dict[str, str]:
    return {
        "v.patch_embd": f"{prefix}embeddings.patch_embedding",
        "v.position_embd": f"{prefix}embeddings.position_embedding",
        "v.post_ln": f"{prefix}post_layernorm",
    }


def _rows_of_tile(source: ClipSource, scale: int) -> int:
    return (source.side // source.patch // scale) ** 2


# --- Idefics 3 and SmolVLM


def _idefics3(source: ClipSource) -> Config:
    eps = source.keys.number("vision.attention.layer_norm_epsilon", 1e-6)
    vision = source.vision_config() | {"model_type": "idefics3_vision", "image_size": source.side, "layer_norm_eps": eps}
    return {"vision_config": vision, "scale_factor": source.integer("projector.scale_factor", 2)}


def _idefics3_settings(source: ClipSource) -> tuple[Settings, Settings]:
    longest = source.integer("preproc_image_size", 4 * source.side)
    image = {"size": {"longest_edge": longest}, "max_image_size": {"longest_edge": source.side}, **_normalized(source, _HALF, _HALF)}
    return image, {"image_seq_len": _rows_of_tile(source, source.integer("projector.scale_factor", 2))}


# --- Gemma 3


def _gemma3(source: ClipSource) -> Config:
    eps = source.keys.number("vision.attention.layer_norm_epsilon", 1e-6)
    vision = source.vision_config() | {"model_type": "siglip_vision_model", "image_size": source.side, "layer_norm_eps": eps}
    return {"vision_config": vision, "mm_tokens_per_image": _rows_of_tile(source, source.integer("projector.scale_factor", 4))}


def _gemma3_settings(source: ClipSource) -> tuple[Settings, Settings]:
    image = {"size": {"height": source.side, "width": source.side}, **_normalized(source, _HALF, _HALF)}
    return image, {"image_seq_length": _rows_of_tile(source, source.integer("projector.scale_factor", 4))}


# --- Pixtral


def _pixtral(source: ClipSource) -> Config:
    silu = source.keys.boolean("use_silu", False)
    vision = source.vision_config() | {"model_type": "pixtral", "hidden_act": "silu" if silu else "gelu"}
    bias = source.has("mm.1.bias")
    return {"vision_config": vision, "spatial_merge_size": _merge(source), "multimodal_projector_bias": bias}


def _pixtral_settings(source: ClipSource) -> tuple[Settings, Settings]:
    image = {"size": {"longest_edge": source.side}, "patch_size": source.patch, **_normalized(source, _CLIP_MEAN, _CLIP_STD)}
    return image, {"patch_size": source.patch, "spatial_merge_size": _merge(source)}


def _merge(source: ClipSource) -> int:
    return source.integer("spatial_merge_size", 2)


# --- Qwen


def _qwen_vision(source: ClipSource) -> Config:
    return {
        "depth": source.layers,
        "num_heads": source.integer("attention.head_count"),
        "patch_size": source.patch,
        "spatial_merge_size": _merge(source),
        "temporal_patch_size": 2,
    }


def _qwen2(source: ClipSource) -> Config:
    text = source.shape("mm.2.weight")[0]
    act = "gelu" if source.keys.boolean("use_gelu", False) else "silu" if source.keys.boolean("use_silu", False) else "quick_gelu"
    own = {"model_type": "qwen2_vl", "embed_dim": source.hidden, "hidden_size": text, "mlp_ratio": source.inner / source.hidden}
    return {"vision_config": _qwen_vision(source) | own | {"hidden_act": act}}


def _qwen2_5(source: ClipSource) -> Config:
    full = source.keys.take("vision.wa_layer_indexes")
    if full is None:
        every = source.integer("n_wa_pattern", 8)
        full = [layer for layer in range(source.layers) if (layer + 1) % every == 0]
    own = {
        "model_type": "qwen2_5_vl",
        "hidden_size": source.hidden,
        "intermediate_size": source.inner,
        "out_hidden_size": source.shape("mm.2.weight")[0],
        "window_size": source.integer("window_size", 112),
        "fullatt_block_indexes": [int(layer) for layer in full],
    }
    return {"vision_config": _qwen_vision(source) | own}


def _qwen3(source: ClipSource) -> Config:
    flags = source.keys.flags("vision.is_deepstack_layers", source.layers) or [False] * source.layers
    own = {
        "model_type": "qwen3_vl",
        "hidden_size": source.hidden,
        "intermediate_size": source.inner,
        "out_hidden_size": source.shape("mm.2.weight")[0],
        "num_position_embeddings": source.shape("v.position_embd.weight")[0],
        "deepstack_visual_indexes": [layer for layer, flag in enumerate(flags) if flag],
    }
    return {"vision_config": _qwen_vision(source) | own}


def _qwen_limits(source: ClipSource, least: int, most: int) -> Settings:
    size = {"shortest_edge": source.integer("image_min_pixels", least), "longest_edge": source.integer("image_max_pixels", most)}
    return {"size": size, "patch_size": source.patch, "merge_size": _merge(source), "temporal_patch_size": 2}


def _qwen2_settings(source: ClipSource) -> tuple[Settings, Settings]:
    return _qwen_limits(source, 3136, 12845056) | _normalized(source, _CLIP_MEAN, _CLIP_STD), {}


def _qwen3_settings(source: ClipSource) -> tuple[Settings, Settings]:
    """Files that were converted without processor settings have the mean of CLIP, which the hub's models do not."""
    return _qwen_limits(source, 65536, 16777216) | {"image_mean": list(_HALF), "image_std": list(_HALF)}, {}


def _qwen3_kind(text: Config) -> str:
    kinds = {"qwen3_5_text": "qwen3_5", "qwen3_5_moe_text": "qwen3_5_moe", "qwen3_moe": "qwen3_vl_moe", "qwen3_vl_moe_text": "qwen3_vl_moe"}
    return kinds.get(str(text["model_type"]), "qwen3_vl")


# --- InternVL


def _internvl(source: ClipSource) -> Config:
    scale = source.integer("projector.scale_factor", 2)
    vision = source.vision_config() | {
        "model_type": "internvl_vision",
        "image_size": source.side,
        "layer_norm_eps": source.keys.number("vision.attention.layer_norm_epsilon", 1e-6),
        "hidden_act": "gelu",
        "norm_type": "layer_norm" if source.has("v.blk.0.ln1.bias") else "rms_norm",
        "use_qk_norm": source.has("v.blk.0.attn_q_norm.weight"),
        "attention_bias": source.has("v.blk.0.attn_q.bias"),
    }
    return {"vision_config": vision, "downsample_ratio": 1 / scale}


def _internvl_settings(source: ClipSource) -> tuple[Settings, Settings]:
    image = {
        "size": {"height": source.side, "width": source.side},
        "crop_to_patches": True,
        "min_patches": source.integer("preproc_min_tiles", 1),
        "max_patches": source.integer("preproc_max_tiles", 12),
        **_normalized(source, _IMAGENET_MEAN, _IMAGENET_STD),
    }
    return image, {"image_seq_length": _rows_of_tile(source, source.integer("projector.scale_factor", 2))}


# --- LFM2-VL


def _lfm2(source: ClipSource) -> Config:
    vision = source.vision_config() | {
        "model_type": "siglip2_vision_model",
        "layer_norm_eps": source.keys.number("vision.attention.layer_norm_epsilon", 1e-6),
        "num_patches": source.shape("v.position_embd.weight")[0],
    }
    outer = {
        "downsample_factor": source.integer("projector.scale_factor", 2),
        "projector_hidden_size": source.shape("mm.1.weight")[0],
        "projector_bias": source.has("mm.1.bias"),
        "projector_use_layernorm": source.has("mm.input_norm.weight"),
    }
    return {"vision_config": vision, **outer}


def _lfm2_settings(source: ClipSource) -> tuple[Settings, Settings]:
    factor = source.integer("projector.scale_factor", 2)
    return {"encoder_patch_size": source.patch, "downsample_factor": factor, **_normalized(source, _HALF, _HALF)}, {}


# --- Gemma 4

_CLIPPED = ("input_min", "input_max", "output_min", "output_max")
_GEMMA4_PRODUCTS = {
    **{f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"},
    "attn_out": "self_attn.o_proj",
    **{f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
}
_GEMMA4_BLOCK = {
    **{f"{name}.weight": f"{target}.linear.weight" for name, target in _GEMMA4_PRODUCTS.items()},
    **{f"{name}.{part}": f"{target}.{part}" for name, target in _GEMMA4_PRODUCTS.items() for part in _CLIPPED},
    "ln1": "input_layernorm",
    "ln2": "pre_feedforward_layernorm",
    "attn_post_norm": "post_attention_layernorm",
    "ffn_post_norm": "post_feedforward_layernorm",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}


def _gemma4(source: ClipSource) -> Config:
    dim = source.shape("v.blk.0.attn_q_norm.weight")[0]
    vision = source.vision_config() | {
        "model_type": "gemma4_vision",
        "head_dim": dim,
        "num_key_value_heads": source.shape("v.blk.0.attn_k.weight")[0] // dim,
        "rms_norm_eps": source.keys.number("vision.attention.layer_norm_epsilon", 1e-6),
        "position_embedding_size": source.shape("v.position_embd.weight")[1],
        "pooling_kernel_size": source.integer("projector.scale_factor", 3),
        "use_clipped_linears": source.has("v.blk.0.attn_q.input_max"),
        "standardize": source.has("v.std_bias"),
    }
    return {"vision_config": vision}


def _gemma4_settings(source: ClipSource) -> tuple[Settings, Settings]:
    return {"patch_size": source.patch, "pooling_kernel_size": source.integer("projector.scale_factor", 3), "max_soft_tokens": 280}, {}


def _scalar(info: TensorInfo, config: Config) -> MappedTensor:
    return values(info, lambda x: x.reshape(()), ())


PROJECTORS: dict[str, Projector] = {
    "idefics3": Projector(
        _named("idefics3"),
        _idefics3,
        _idefics3_settings,
        "<image>",
        {**_siglip_names("model.vision_model."), "mm.model.fc": "model.connector.modality_projection.proj"},
        _SIGLIP,
        "model.vision_model.encoder.layers",
    ),
    "gemma3": Projector(
        _named("gemma3"),
        _gemma3,
        _gemma3_settings,
        "<image_soft_token>",
        {
            **_siglip_names("vision_tower.vision_model."),
            "mm.input_projection.weight": "multi_modal_projector.mm_input_projection_weight",
            "mm.soft_emb_norm": "multi_modal_projector.mm_soft_emb_norm",
        },
        _SIGLIP,
        "vision_tower.vision_model.encoder.layers",
        {"mm.soft_emb_norm": without_one},
    ),
    "pixtral": Projector(
        _named("mistral3"),
        _pixtral,
        _pixtral_settings,
        "[IMG]",
        {
            "v.patch_embd": "vision_tower.patch_conv",
            "v.pre_ln": "vision_tower.ln_pre",
            "mm.input_norm": "multi_modal_projector.norm",
            "mm.patch_merger": "multi_modal_projector.patch_merger.merging_layer",
            "mm.1": "multi_modal_projector.linear_1",
            "mm.2": "multi_modal_projector.linear_2",
        },
        {
            **{f"attn_{part}": f"attention.{part}_proj" for part in "qkv"},
            "attn_out": "attention.o_proj",
            "ln1": "attention_norm",
            "ln2": "ffn_norm",
            **{f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
        },
        "vision_tower.transformer.layers",
        {"attn_q": half_rotation("num_attention_heads"), "attn_k": half_rotation("num_attention_heads")},
        ignored=frozenset({"v.token_embd.img_break"}),
    ),
    "qwen2vl_merger": Projector(
        _named("qwen2_vl"),
        _qwen2,
        _qwen2_settings,
        "<|image_pad|>",
        _QWEN2_MODEL,
        {**_QWEN, "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
        "visual.blocks",
        joined=True,
    ),
    "qwen2.5vl_merger": Projector(
        _named("qwen2_5_vl"),
        _qwen2_5,
        _qwen2_settings,
        "<|image_pad|>",
        _QWEN2_MODEL,
        {**_QWEN, **_GATED},
        "visual.blocks",
        joined=True,
    ),
    "qwen3vl_merger": Projector(
        _qwen3_kind,
        _qwen3,
        _qwen3_settings,
        "<|image_pad|>",
        {
            "v.patch_embd": "model.visual.patch_embed.proj",
            "v.position_embd": "model.visual.pos_embed",
            "v.post_ln": "model.visual.merger.norm",
            "mm.0": "model.visual.merger.linear_fc1",
            "mm.2": "model.visual.merger.linear_fc2",
        },
        {**_QWEN, "ffn_up": "mlp.linear_fc1", "ffn_down": "mlp.linear_fc2"},
        "model.visual.blocks",
        joined=True,
    ),
    "internvl": Projector(
        _named("internvl"),
        _internvl,
        _internvl_settings,
        "<IMG_CONTEXT>",
        {
            "v.patch_embd": "vision_tower.embeddings.patch_embeddings.projection",
            "v.position_embd.weight": "vision_tower.embeddings.position_embeddings",
            "v.position_embd": "vision_tower.embeddings.position_embeddings",
            "v.class_embd": "vision_tower.embeddings.cls_token",
            "mm.model.mlp.0": "multi_modal_projector.layer_norm",
            "mm.model.mlp.1": "multi_modal_projector.linear_1",
            "mm.model.mlp.3": "multi_modal_projector.linear_2",
        },
        {
            **{f"attn_{part}": f"attention.{part}_proj" for part in "qkv"},
            "attn_q_norm": "attention.q_norm",
            "attn_k_norm": "attention.k_norm",
            "attn_out": "attention.projection_layer",
            "ln1": "layernorm_before",
            "ln2": "layernorm_after",
            "ls1.weight": "lambda_1",
            "ls2.weight": "lambda_2",
            "ls1": "lambda_1",
            "ls2": "lambda_2",
            "ffn_up": "mlp.fc1",
            "ffn_down": "mlp.fc2",
        },
        "vision_tower.encoder.layer",
    ),
    "lfm2": Projector(
        _named("lfm2_vl"),
        _lfm2,
        _lfm2_settings,
        "<image>",
        {
            **_siglip_names("model.vision_tower.vision_model."),
            "mm.1": "model.multi_modal_projector.linear_1",
            "mm.2": "model.multi_modal_projector.linear_2",
            "mm.input_norm": "model.multi_modal_projector.layer_norm",
        },
        _SIGLIP,
        "model.vision_tower.vision_model.encoder.layers",
        {"v.patch_embd": channels_last},
    ),
    "gemma4v": Projector(
        _named("gemma4"),
        _gemma4,
        _gemma4_settings,
        "<|image|>",
        {
            "v.patch_embd": "model.vision_tower.patch_embedder.input_proj",
            "v.position_embd.weight": "model.vision_tower.patch_embedder.position_embedding_table",
            "v.std_bias": "model.vision_tower.std_bias",
            "v.std_scale": "model.vision_tower.std_scale",
            "mm.input_projection": "model.embed_vision.embedding_projection",
        },
        _GEMMA4_BLOCK,
        "model.vision_tower.encoder.layers",
        {"v.patch_embd": channels_last, **{f"{name}.{part}": _scalar for name in _GEMMA4_PRODUCTS for part in _CLIPPED}},
    ),
}
