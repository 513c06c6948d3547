"""A Hugging Face config of the old style, rebuilt from a GGUF file's metadata and from which tensors it has.

What llama.cpp holds in code rather than in the file (window patterns, layers without rope, gpt-oss's activation) is written out.
Sources: the converter and `llama_model_*::load_arch_hparams` of https://github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...errors import CheckpointError, UnsupportedModelError
from .hyper import Hyper
from .rope import read_rope
from .split import GGUFFiles

Config = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Source:
    """The hyperparameters of one file under the name of its architecture, and its tensors."""

    hyper: Hyper
    files: GGUFFiles

    def has(self, tensor: str) -> bool:
        return tensor in self.files.tensors


def rebuild_config(files: GGUFFiles) -> Config:
    """The config. Raises `UnsupportedModelError` naming an unknown architecture or hyperparameter, `CheckpointError` for senseless ones."""
    name = architecture(files)
    source = Source(Hyper(files.metadata, name, files.path), files)
    config = _BUILDERS[name](source)
    source.hyper.finish()
    return config


def architecture(files: GGUFFiles) -> str:
    """`general.architecture`, one that is supported. Raises `UnsupportedModelError` for another, and for files that are no model."""
    kind = files.metadata.get("general.type", "model")
    if kind != "model":
        raise UnsupportedModelError(f"{files.path}: holds a {str(kind)[:40]}, not a model; give the file of the language model")
    version = files.metadata.get("general.quantization_version", 2)
    if version != 2:
        raise UnsupportedModelError(f"{files.path}: quantization version {str(version)[:40]} is not supported, only 2; convert it again")
    name = files.metadata.get("general.architecture")
    if not isinstance(name, str):
        raise CheckpointError(f"{files.path}: general.architecture is missing from the metadata; convert the model again")
    if name not in _BUILDERS:
        known = ", ".join(_BUILDERS)
        raise UnsupportedModelError(f"{files.path}: the architecture {name[:40]!r} is not supported from GGUF (only {known})")
    return name


def _base(source: Source, model_type: str, *, partial_rope: bool = False) -> Config:
    """The keys that every decoder has."""
    hyper = source.hyper
    layers = hyper.integer("block_count") - hyper.integer("nextn_predict_layers", 0, low=0)
    hidden, heads = hyper.integer("embedding_length"), hyper.integer("attention.head_count")
    head_dim = hyper.integer("attention.key_length", hidden // heads)
    context = hyper.integer("context_length")
    if not 1 <= layers <= len(source.files.tensors):
        raise hyper.bad("block_count", f"leaves {layers} layers for {len(source.files.tensors)} tensors")
    if hyper.integer("attention.value_length", head_dim) != head_dim:
        raise hyper.unsupported("attention.value_length", f"differs from key_length, {head_dim}")
    return {
        "model_type": model_type,
        "vocab_size": _vocabulary(source),
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": hyper.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": context,
        "rms_norm_eps": hyper.positive("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": not source.has("output.weight"),
        **read_rope(hyper, source.files, head_dim, context, partial=partial_rope),
        **_special_tokens(source),
    }


def _dense(source: Source, model_type: str) -> Config:
    return _base(source, model_type) | {"intermediate_size": source.hyper.integer("feed_forward_length"), "hidden_act": "silu"}


def _vocabulary(source: Source) -> int:
    if not source.has("token_embd.weight"):
        raise CheckpointError(f"{source.files.path}: tensor token_embd.weight is missing; download or convert the model again")
    return source.files.tensors["token_embd.weight"].shape[0]


def _special_tokens(source: Source) -> Config:
    metadata = source.files.metadata
    tokens = {key: metadata.get(f"tokenizer.ggml.{name}") for key, name in _SPECIAL.items()}
    return {key: token for key, token in tokens.items() if type(token) is int}


_SPECIAL = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}


def _llama(source: Source) -> Config:
    """Also Mistral, which differs by its window only, and Mixtral, which has experts."""
    hyper = source.hyper
    if hyper.integer("expert_count", 0, low=0):
        return _mixtral(source)
    window = hyper.integer("attention.sliding_window", 0, low=0)
    if window:
        return _dense(source, "mistral") | {"sliding_window": window}
    hyper.integer("expert_used_count", 0, low=0)
    biases = {
        "attention_bias": source.has("blk.0.attn_q.bias") or source.has("blk.0.attn_qkv.bias"),
        "mlp_bias": source.has("blk.0.ffn_up.bias"),
    }
    return _dense(source, "llama") | biases


def _mixtral(source: Source) -> Config:
    return _dense(source, "mixtral") | {
        "num_local_experts": source.hyper.integer("expert_count"),
        "num_experts_per_tok": source.hyper.integer("expert_used_count"),
        "sliding_window": None,
    }


def _qwen2(source: Source) -> Config:
    return _dense(source, "qwen2")


def _qwen3(source: Source) -> Config:
    return _dense(source, "qwen3") | {"attention_bias": False}


def _qwen3_moe(source: Source) -> Config:
    config = _dense(source, "qwen3_moe") | _experts(source) | {"attention_bias": False}
    dense = [layer for layer in range(config["num_hidden_layers"]) if not source.has(f"blk.{layer}.ffn_gate_inp.weight")]
    return config | {"decoder_sparse_step": 1, "mlp_only_layers": dense}


def _experts(source: Source) -> Config:
    hyper = source.hyper
    return {
        "num_experts": hyper.integer("expert_count"),
        "num_experts_per_tok": hyper.integer("expert_used_count"),
        "moe_intermediate_size": hyper.integer("expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


def _gemma2(source: Source) -> Config:
    hyper = source.hyper
    config = _gemma(source, "gemma2", 46)
    return config | {
        "sliding_window": hyper.integer("attention.sliding_window", 4096),
        "layer_types": _windowed_layers(source, config["num_hidden_layers"], 2),
        "attn_logit_softcapping": hyper.positive("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": hyper.positive("final_logit_softcapping", 30.0),
    }


def _gemma3(source: Source) -> Config:
    hyper = source.hyper
    config = _gemma(source, "gemma3_text", 62)
    window = hyper.integer("attention.sliding_window", 0, low=0)
    layers = config["num_hidden_layers"]
    cap = hyper.number("final_logit_softcapping", 0.0)
    return config | {
        "sliding_window": window or config["max_position_embeddings"],
        "layer_types": _windowed_layers(source, layers, 6) if window else ["full_attention"] * layers,
        "rope_local_base_freq": hyper.positive("rope.freq_base_swa", 10000.0),
        "final_logit_softcapping": cap or None,
    }


def _gemma(source: Source, model_type: str, layers_of_27b: int) -> Config:
    """The 27B models scale queries by the hidden size over the heads, all others by the head's size; the file does not say so."""
    config = _base(source, model_type) | {"intermediate_size": source.hyper.integer("feed_forward_length")}
    largest = config["num_hidden_layers"] == layers_of_27b
    scalar = config["hidden_size"] // config["num_attention_heads"] if largest else config["head_dim"]
    return config | {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": scalar, "tie_word_embeddings": True}


def _windowed_layers(source: Source, layers: int, period: int) -> list[str]:
    """The layers that see a window only: those flagged in the file, or all but the last of every `period`."""
    key = "attention.sliding_window_pattern"
    if isinstance(source.hyper.take(key), int):
        period = source.hyper.integer(key)
        flags = None
    else:
        flags = source.hyper.flags(key, layers)
    if flags is None:
        flags = [(layer + 1) % period != 0 for layer in range(layers)]
    return ["sliding_attention" if windowed else "full_attention" for windowed in flags]


def _phi3(source: Source) -> Config:
    config = _base(source, "phi3", partial_rope=True)
    window = source.hyper.integer("attention.sliding_window", 0, low=0)
    trained = source.hyper.integer("rope.scaling.original_context_length", config["max_position_embeddings"])
    return config | {
        "intermediate_size": source.hyper.integer("feed_forward_length"),
        "hidden_act": "silu",
        "sliding_window": window or None,
        "original_max_position_embeddings": trained,
    }


def _granite(source: Source) -> Config:
    hyper = source.hyper
    config = _dense(source, "granite")
    if hyper.take("rope.scaling.finetuned") is False:
        raise hyper.unsupported("rope.scaling.finetuned", "is false (a model without rope)")
    if config["head_dim"] * config["num_attention_heads"] != config["hidden_size"]:
        raise hyper.unsupported("attention.key_length", f"is {config['head_dim']}, not embedding_length / head_count")
    return config | {
        "attention_multiplier": hyper.positive("attention.scale", config["head_dim"] ** -0.5),
        "embedding_multiplier": hyper.positive("embedding_scale", 1.0),
        "residual_multiplier": hyper.positive("residual_scale", 1.0),
        "logits_scaling": hyper.positive("logit_scale"),
        "attention_bias": source.has("blk.0.attn_q.bias"),
        "mlp_bias": source.has("blk.0.ffn_up.bias"),
    }


def _olmo2(source: Source) -> Config:
    return _dense(source, "olmo2") | {"attention_bias": False}


def _smollm3(source: Source) -> Config:
    """Every fourth layer has no rope."""
    config = _dense(source, "smollm3")
    no_rope = [int((layer + 1) % 4 != 0) for layer in range(config["num_hidden_layers"])]
    return config | {"no_rope_layer_interval": 4, "no_rope_layers": no_rope, "use_sliding_window": False}


def _gpt_oss(source: Source) -> Config:
    hyper = source.hyper
    config = _base(source, "gpt_oss")
    if config["rope_scaling"] and config["rope_scaling"]["rope_type"] == "yarn":
        config["rope_scaling"]["truncate"] = False
    hyper.integer("feed_forward_length")
    return config | {
        "intermediate_size": hyper.integer("expert_feed_forward_length"),
        "num_local_experts": hyper.integer("expert_count"),
        "num_experts_per_tok": hyper.integer("expert_used_count"),
        "sliding_window": hyper.integer("attention.sliding_window"),
        "layer_types": _windowed_layers(source, config["num_hidden_layers"], 2),
        "attention_bias": True,
        "swiglu_limit": 7.0,
        "hidden_act": "silu",
    }


def _qwen3_next(source: Source) -> Config:
    shared = source.hyper.integer("expert_shared_feed_forward_length")
    config = _hybrid(source, "qwen3_next") | _experts(source)
    return config | {"shared_expert_intermediate_size": shared, "decoder_sparse_step": 1, "mlp_only_layers": []}


def _qwen3_5(source: Source) -> Config:
    """The sections of its rope are for pictures; the positions of text are the same in all of them."""
    source.hyper.take("rope.dimension_sections")
    return _hybrid(source, "qwen3_5_text")


def _hybrid(source: Source, model_type: str) -> Config:
    hyper = source.hyper
    config = _base(source, model_type, partial_rope=True)
    layers = config["num_hidden_layers"]
    period = hyper.integer("full_attention_interval", 4)
    recurrent = hyper.flags("attention.recurrent_layers", layers) or [(layer + 1) % period != 0 for layer in range(layers)]
    value_heads = hyper.integer("ssm.time_step_rank")
    inner = hyper.integer("ssm.inner_size")
    if inner % value_heads:
        raise hyper.bad("ssm.inner_size", f"is {inner}, not a multiple of the {value_heads} heads")
    return config | {
        "intermediate_size": hyper.integer("feed_forward_length"),
        "hidden_act": "silu",
        "attention_bias": False,
        "full_attention_interval": period,
        "layer_types": ["linear_attention" if flag else "full_attention" for flag in recurrent],
        "linear_conv_kernel_dim": hyper.integer("ssm.conv_kernel"),
        "linear_key_head_dim": hyper.integer("ssm.state_size"),
        "linear_num_key_heads": hyper.integer("ssm.group_count"),
        "linear_num_value_heads": value_heads,
        "linear_value_head_dim": inner // value_heads,
    }


_BUILDERS: dict[str, Callable[[Source], Config]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3_moe,
    "qwen3next": _qwen3_next,
    "qwen35": _qwen3_5,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "granite": _granite,
    "olmo2": _olmo2,
    "smollm3": _smollm3,
    "gpt-oss": _gpt_oss,
}
