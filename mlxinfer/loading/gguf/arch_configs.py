"""A Hugging Face config of the old style, rebuilt from a GGUF file."""

from __future__ import annotations

from collections.abc import Callable

from ...errors import CheckpointError, UnsupportedModelError
from ...util.typed_reader import shown
from .attention_configs import ATTENTION_BUILDERS
from .base_config import Config, Source, base_config, dense_config, windowed_layers
from .files import GGUFFiles
from .hparams import HParams
from .hybrid_configs import HYBRID_BUILDERS


def _llama(source: Source) -> Config:
    """Also Mistral, which differs by its window only, and Mixtral, which has experts."""
    hparams = source.hparams
    if hparams.integer("expert_count", 0, low=0):
        return _mixtral(source)
    window = hparams.integer("attention.sliding_window", 0, low=0)
    if window:
        return dense_config(source, "mistral") | {"sliding_window": window}
    hparams.integer("expert_used_count", 0, low=0)
    biases = {
        "attention_bias": source.has("blk.0.attn_q.bias") or source.has("blk.0.attn_qkv.bias"),
        "mlp_bias": source.has("blk.0.ffn_up.bias"),
    }
    return dense_config(source, "llama") | biases


def _mixtral(source: Source) -> Config:
    config = dense_config(source, "mixtral")
    return config | {
        "intermediate_size": source.hparams.integer("expert_feed_forward_length", config["intermediate_size"]),
        "num_local_experts": source.hparams.integer("expert_count"),
        "num_experts_per_tok": source.hparams.integer("expert_used_count"),
        "sliding_window": None,
    }


def _qwen2(source: Source) -> Config:
    return dense_config(source, "qwen2")


def _qwen3(source: Source) -> Config:
    return dense_config(source, "qwen3") | {"attention_bias": False}


def _qwen3_moe(source: Source) -> Config:
    config = dense_config(source, "qwen3_moe") | _experts(source) | {"attention_bias": False}
    dense = [layer for layer in range(config["num_hidden_layers"]) if not source.has(f"blk.{layer}.ffn_gate_inp.weight")]
    return config | {"decoder_sparse_step": 1, "mlp_only_layers": dense}


def _experts(source: Source) -> Config:
    hparams = source.hparams
    return {
        "num_experts": hparams.integer("expert_count"),
        "num_experts_per_tok": hparams.integer("expert_used_count"),
        "moe_intermediate_size": hparams.integer("expert_feed_forward_length"),
        "norm_topk_prob": hparams.boolean("expert_weights_norm", True),
    }


def _gemma2(source: Source) -> Config:
    hparams = source.hparams
    config = _gemma(source, "gemma2", 46)
    return config | {
        "sliding_window": hparams.integer("attention.sliding_window", 4096),
        "layer_types": windowed_layers(source, config["num_hidden_layers"], 2),
        "attn_logit_softcapping": hparams.positive("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": hparams.positive("final_logit_softcapping", 30.0),
    }


def _gemma3(source: Source) -> Config:
    hparams = source.hparams
    config = _gemma(source, "gemma3_text", 62)
    window = hparams.integer("attention.sliding_window", 0, low=0)
    layers = config["num_hidden_layers"]
    cap = hparams.number("final_logit_softcapping", 0.0)
    return config | {
        "sliding_window": window or config["max_position_embeddings"],
        "layer_types": windowed_layers(source, layers, 6) if window else ["full_attention"] * layers,
        "rope_local_base_freq": hparams.positive("rope.freq_base_swa", 10000.0),
        "final_logit_softcapping": cap or None,
    }


def _gemma(source: Source, model_type: str, layers_of_27b: int) -> Config:
    """The 27B models scale queries by the hidden size over the heads, all others by the head's size; the file does not say so."""
    config = base_config(source, model_type) | {"intermediate_size": source.hparams.integer("feed_forward_length")}
    largest = config["num_hidden_layers"] == layers_of_27b
    scalar = config["hidden_size"] // config["num_attention_heads"] if largest else config["head_dim"]
    return config | {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": scalar}


def _phi3(source: Source) -> Config:
    config = base_config(source, "phi3", partial_rope=True)
    window = source.hparams.integer("attention.sliding_window", 0, low=0)
    trained = source.hparams.integer("rope.scaling.original_context_length", config["max_position_embeddings"])
    return config | {
        "intermediate_size": source.hparams.integer("feed_forward_length"),
        "hidden_act": "silu",
        "sliding_window": window or None,
        "original_max_position_embeddings": trained,
    }


def _granite(source: Source) -> Config:
    hparams = source.hparams
    config = dense_config(source, "granite")
    if hparams.take("rope.scaling.finetuned") is False:
        raise hparams.unsupported("rope.scaling.finetuned", "is false (a model without rope)")
    if config["head_dim"] * config["num_attention_heads"] != config["hidden_size"]:
        raise hparams.unsupported("attention.key_length", f"is {config['head_dim']}, not embedding_length / head_count")
    return config | {
        "attention_multiplier": hparams.positive("attention.scale", config["head_dim"] ** -0.5),
        "embedding_multiplier": hparams.positive("embedding_scale", 1.0),
        "residual_multiplier": hparams.positive("residual_scale", 1.0),
        "logits_scaling": hparams.positive("logit_scale"),
        "attention_bias": source.has("blk.0.attn_q.bias"),
        "mlp_bias": source.has("blk.0.ffn_up.bias"),
    }


def _smollm3(source: Source) -> Config:
    """Every fourth layer has no rope."""
    config = dense_config(source, "smollm3")
    no_rope = [int((layer + 1) % 4 != 0) for layer in range(config["num_hidden_layers"])]
    return config | {"no_rope_layer_interval": 4, "no_rope_layers": no_rope, "use_sliding_window": False}


def _gpt_oss(source: Source) -> Config:
    hparams = source.hparams
    config = base_config(source, "gpt_oss")
    if config["rope_scaling"] and config["rope_scaling"]["rope_type"] == "yarn":
        config["rope_scaling"]["truncate"] = False
    hparams.integer("feed_forward_length")
    return config | {
        "intermediate_size": hparams.integer("expert_feed_forward_length"),
        "num_local_experts": hparams.integer("expert_count"),
        "num_experts_per_tok": hparams.integer("expert_used_count"),
        "sliding_window": hparams.integer("attention.sliding_window"),
        "layer_types": windowed_layers(source, config["num_hidden_layers"], 2),
        "attention_bias": True,
        "swiglu_limit": 7.0,
        "hidden_act": "silu",
    }


def _qwen3_next(source: Source) -> Config:
    shared = source.hparams.integer("expert_shared_feed_forward_length")
    config = _hybrid(source, "qwen3_next") | _experts(source)
    return config | {"shared_expert_intermediate_size": shared, "decoder_sparse_step": 1, "mlp_only_layers": []}


def _qwen3_5(source: Source) -> Config:
    """The sections of its rope are for pictures; the positions of text are the same in all of them."""
    source.hparams.take("rope.dimension_sections")
    return _hybrid(source, "qwen3_5_text")


def _qwen3_5_moe(source: Source) -> Config:
    hparams = source.hparams
    hparams.take("rope.dimension_sections")
    shared = hparams.integer("expert_shared_feed_forward_length")
    return _hybrid(source, "qwen3_5_moe_text") | _experts(source) | {"shared_expert_intermediate_size": shared}


def _hybrid(source: Source, model_type: str) -> Config:
    hparams = source.hparams
    config = base_config(source, model_type, partial_rope=True)
    layers = config["num_hidden_layers"]
    period = hparams.integer("full_attention_interval", 4)
    recurrent = hparams.flags("attention.recurrent_layers", layers) or [(layer + 1) % period != 0 for layer in range(layers)]
    key_heads, value_heads = hparams.integer("ssm.group_count"), hparams.integer("ssm.time_step_rank")
    inner = hparams.integer("ssm.inner_size")
    if value_heads % key_heads:
        raise hparams.error("ssm.time_step_rank", f"is {value_heads}, not a multiple of the {key_heads} key heads")
    if inner % value_heads:
        raise hparams.error("ssm.inner_size", f"is {inner}, not a multiple of the {value_heads} heads")
    return config | {
        "intermediate_size": hparams.integer("feed_forward_length", 1, low=0) or 1,
        "hidden_act": "silu",
        "attention_bias": False,
        "full_attention_interval": period,
        "layer_types": ["linear_attention" if flag else "full_attention" for flag in recurrent],
        "linear_conv_kernel_dim": hparams.integer("ssm.conv_kernel"),
        "linear_key_head_dim": hparams.integer("ssm.state_size"),
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
        "linear_value_head_dim": inner // value_heads,
    }


BUILDERS: dict[str, Callable[[Source], Config]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3_moe,
    "qwen3next": _qwen3_next,
    "qwen35": _qwen3_5,
    "qwen35moe": _qwen3_5_moe,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "granite": _granite,
    "smollm3": _smollm3,
    "gpt-oss": _gpt_oss,
    **ATTENTION_BUILDERS,
    **HYBRID_BUILDERS,
}


def rebuild_config(files: GGUFFiles) -> Config:
    """The config. Raises `UnsupportedModelError` naming an unknown architecture or hyperparameter, `CheckpointError` for senseless ones."""
    name = architecture(files)
    source = Source(HParams(files.metadata, name, files.path, files.written_as), files)
    config = BUILDERS[name](source)
    source.hparams.finish()
    return config


def architecture(files: GGUFFiles) -> str:
    """`general.architecture`. Raises `UnsupportedModelError` for one that is not supported, and for files that hold no model."""
    kind = files.metadata.get("general.type", "model")
    if not isinstance(kind, str) or kind != "model":
        raise UnsupportedModelError(f"{files.path}: holds a {shown(kind)}, not a model; give the file of the language model")
    version = files.metadata.get("general.quantization_version", 2)
    if not isinstance(version, int) or version != 2:
        raise UnsupportedModelError(f"{files.path}: quantization version {shown(version)} is not supported, only 2; convert it again")
    name = files.metadata.get("general.architecture")
    if not isinstance(name, str):
        raise CheckpointError(f"{files.path}: general.architecture is missing from the metadata; convert the model again")
    if name not in BUILDERS:
        known = ", ".join(BUILDERS)
        raise UnsupportedModelError(
            f"{files.path}: the architecture {shown(files.written_as)} is not supported from GGUF (only {known}); "
            f"give the model's safetensors instead"
        )
    return name
