"""Keys of GGUF files that change no answer, or none with certain values. What is neither here nor read is refused by name.

The names are those of `gguf/constants.py` (llama.cpp), and of `convert/` of Ollama. Keys without an architecture (`general.`, `tokenizer.`,
`quantize.imatrix.`, `split.`, those of exporters) are not asked about.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ...util.typed_reader import is_number

_WITHOUT_EFFECT = re.compile(
    r"(vision|audio|mm|sam|clip|split|classifier|tokenizer|training|quantization)\..+"
    r"|(image|images|video|audio|vision|speech)_\w+|\w+_token_ids?|spatial_merge_size|n_deepstack_layers"
    r"|\w*(initializer|dropout)\w*|source_quantization|source_fp8_tensors"
    r"|vocab_size|tensor_data_layout|pooling_type|normalize_embeddings|rope\.scaling\.finetuned"
    r"|attention\.layer_norm_epsilon|attention\.layer_norm_rms_epsilon|expert_shared_count"
)
"""Keys of images and sound, training and initialisation, tokenizers and exporters, and vectors of texts. Keys that only the other kind of
norm reads, and those that repeat what the tensors say."""

Hyper = Mapping[str, Any]


def is_harmless(key: str, value: object, hyper: Hyper) -> bool | None:
    """Return True if a key with this value changes nothing, None for an unknown key. `hyper` has all keys of the architecture, both
    without its name."""
    if _WITHOUT_EFFECT.fullmatch(key):
        return True
    rule = _RULES.get(key)
    if rule is None:
        return None
    values = list(value) if isinstance(value, (list, np.ndarray)) else [value]
    if isinstance(rule, tuple):
        return all(one in rule for one in values)
    return all(rule(one, hyper) for one in values)


def _number(hyper: Hyper, key: str, otherwise: float = math.nan) -> float:
    value = hyper.get(key)
    return float(value) if value is not None and is_number(value) else otherwise


def _channels(hyper: Hyper) -> float:
    """Channels of a head."""
    heads = _number(hyper, "attention.head_count")
    return _number(hyper, "attention.key_length", _number(hyper, "embedding_length") // heads if heads else math.nan)


def _usual_scale(value: object, hyper: Hyper) -> bool:
    return is_number(value) and math.isclose(float(value) * _channels(hyper) ** 0.5, 1.0, rel_tol=1e-5)  # type: ignore[arg-type]


def _all_channels(value: object, hyper: Hyper) -> bool:
    return value == _channels(hyper)


def _never_full(value: object, hyper: Hyper) -> bool:
    """A window that no context is longer than, or none."""
    return value == 0 or (is_number(value) and value >= _number(hyper, "context_length"))  # type: ignore[operator]


def _without_window(value: object, hyper: Hyper) -> bool:
    return _never_full(_number(hyper, "attention.sliding_window", 0), hyper)


def _without_experts(value: object, hyper: Hyper) -> bool:
    return _number(hyper, "expert_count", 0) == 0


def _same_base(value: object, hyper: Hyper) -> bool:
    return _without_window(value, hyper) or value == _number(hyper, "rope.freq_base", 10000.0)


def _without_yarn(value: object, hyper: Hyper) -> bool:
    return hyper.get("rope.scaling.type", "") in ("", "none", "linear", "longrope")


_OFF = (0, 1)
"""llama.cpp takes a factor of 0 for none."""
_RULES: Mapping[str, tuple[object, ...] | Callable[[object, Hyper], bool]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.head_dim": _all_channels,
    "attention.indexer.top_k": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.output_scale": _OFF,
    "attention.scale": _usual_scale,
    "attention.shared_kv_layers": (0,),
    "attention.sliding_window": _never_full,
    "attention.sliding_window_pattern": _without_window,
    "attention.temperature_scale": (0,),
    "attn_logit_softcapping": (0,),
    "embedding_length_per_layer_input": (0,),
    "embedding_scale": _OFF,
    "expert_count": (0,),
    "expert_feed_forward_length": _without_experts,
    "expert_gating_func": (1,),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_shared_feed_forward_length": (0,),
    "expert_used_count": _without_experts,
    "expert_weights_norm": (True,),
    "expert_weights_scale": _OFF,
    "final_logit_softcapping": (0,),
    "leading_dense_block_count": (0,),
    "logit_scale": _OFF,
    "residual_scale": _OFF,
    "rope.dimension_count_swa": _all_channels,
    "rope.freq_base_swa": _same_base,
    "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_beta_fast": _without_yarn,
    "rope.scaling.yarn_beta_slow": _without_yarn,
    "rope.scaling.yarn_ext_factor": (0,),
    "rope.scaling.yarn_log_multiplier": (0,),
    "router_logit_softcapping": (0,),
    "ssm.dt_b_c_rms": (False,),
    "swiglu_clamp_exp": (0,),
    "swiglu_clamp_shexp": (0,),
    "token_shift_count": (0,),
    "use_parallel_residual": (False,),
    "use_qk_norm": (False,),
}
"""Other keys that no graph reads, with the values that state what it does anyway."""

REFUSED: Mapping[str, str] = {
    **dict.fromkeys(
        ("activation_sparsity_scale", "altup.active_idx", "altup.num_inputs"), "belongs to Gemma 3n, which has no graph for GGUF"
    ),
    **dict.fromkeys(("attention.indexer.head_count", "attention.indexer.key_length"), "makes attention choose the keys that it reads"),
    **dict.fromkeys(("attention.group_norm_epsilon", "attention.group_norm_groups"), "asks for norms over groups of channels"),
    **dict.fromkeys(("convnext.block_count", "convnext.embedding_length"), "belongs to a model of speech"),
    **dict.fromkeys(("posnet.block_count", "posnet.embedding_length", "features_length"), "belongs to a model of speech"),
    **dict.fromkeys(("time_mix_extra_dim", "time_decay_extra_dim", "wkv.head_size", "rescale_every_n_layers"), "belongs to RWKV"),
    **dict.fromkeys([f"attention.{part}_lora_rank" for part in ("decay", "iclr", "value_residual_mix", "gate")], "belongs to RWKV"),
    **dict.fromkeys(("expert_chunk_feed_forward_length", "expert_group_scale", "experts_per_group"), "adds up experts in groups"),
    **dict.fromkeys(("moe_every_n_layers", "interleave_moe_layer_step"), "places experts in some layers, which the tensors must show"),
    **dict.fromkeys(
        ("rope.scaling.alpha", "rope.partial_rotary_factor", "rope.type"), "describes a rope in a way that no converter here has"
    ),
    "attention.global_head_count_kv": "gives full layers other KV heads; llama.cpp has a number for each layer instead",
    "attention.relative_buckets_count": "belongs to encoders",
    "attention.temperature_length": "changes queries with their position",
    "decoder_block_count": "belongs to encoders with a decoder",
    "embedding_length_out": "projects the stream to another width",
    "expert_weights_norm_clip": "bounds the sum of the experts' weights",
    "swin_norm": "asks for norms that no graph has",
}
"""Keys that are known and change the maths, with what they do."""
