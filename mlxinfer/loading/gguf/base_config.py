"""Config keys that all architectures have in common, from a GGUF file's metadata and the names of its tensors."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ...errors import CheckpointError
from ...util.dataclass import dataclass
from ...util.typed_reader import shown
from .files import GGUFFiles
from .hparams import HParams, short_float

FREQUENCY_DIVISORS = "rope_freqs.weight"
LONG_DIVISORS, SHORT_DIVISORS = "rope_factors_long.weight", "rope_factors_short.weight"
ROPE_TENSORS = frozenset({FREQUENCY_DIVISORS, LONG_DIVISORS, SHORT_DIVISORS})

SOFTMAX, SIGMOID = 1, 2
"""llama.cpp's numbers of the functions that score experts."""

_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def read_rope(
    hparams: HParams, files: GGUFFiles, head_dim: int, context: int, *, partial: bool = False, unit: float | None = None
) -> dict[str, Any]:
    """Read the rope's config keys.

    `partial` allows rotating a part of each head only. `unit` is the unit of the file's multiplier of YaRN's logarithm, or None if the
    architecture has no such multiplier.
    """
    theta = hparams.positive("rope.freq_base", 10000.0)
    rotated = hparams.integer("rope.dimension_count", head_dim)
    if rotated != head_dim and not (partial and rotated < head_dim and rotated % 2 == 0):
        raise hparams.unsupported("rope.dimension_count", f"is {rotated} of {head_dim} channels")
    config: dict[str, Any] = {"rope_theta": theta, "rope_scaling": _rope_scaling(hparams, files, theta, rotated, context, unit)}
    if partial:
        config["partial_rotary_factor"] = _rotated_share(rotated, head_dim)
    return config


def with_sections(source: Source, config: Config) -> Config:
    """Return the config with the numbers of pairs that turn by time, row and column (M-RoPE), if the file has them."""
    value = source.hparams.take("rope.dimension_sections")
    if value is None:
        return config
    if not isinstance(value, np.ndarray) or value.ndim != 1 or value.size not in (3, 4) or value.dtype.kind not in "iu" or value[3:].any():
        raise source.hparams.unsupported("rope.dimension_sections", "does not hold three numbers and a zero")
    sections = [int(count) for count in value[:3]]
    return config | {"rope_scaling": (config.get("rope_scaling") or {"rope_type": "default"}) | {"mrope_section": sections}}


def _rotated_share(rotated: int, head_dim: int) -> float:
    """The ratio, raised a little if rounding would make the reader's `int(head_dim * share)` one less."""
    share = rotated / head_dim
    return share if int(head_dim * share) == rotated else math.nextafter(share, 2)


def _rope_scaling(
    hparams: HParams, files: GGUFFiles, theta: float, rotated: int, context: int, unit: float | None
) -> dict[str, Any] | None:
    factor = hparams.number("rope.scaling.factor", hparams.number("rope.scale_linear", 0.0)) or 1.0
    kind = hparams.text("rope.scaling.type", "linear")
    trained = hparams.integer("rope.scaling.original_context_length", context)
    gain = hparams.positive("rope.scaling.attn_factor", 1.0)
    if kind not in ("none", "linear", "yarn", "longrope") or factor < 0:
        raise hparams.unsupported("rope.scaling.type", f"is {shown(kind)} with the factor {factor}")
    if kind == "none":
        factor = 1.0
    if FREQUENCY_DIVISORS in files.tensors and kind != "yarn":
        divisors = [value * factor for value in _divisors(files, FREQUENCY_DIVISORS, rotated)]
        return _fixed_divisors(divisors, theta, context, gain)
    if LONG_DIVISORS in files.tensors or kind == "longrope":
        long, short = _divisors(files, LONG_DIVISORS, rotated), _divisors(files, SHORT_DIVISORS, rotated)
        return _longrope(long, short, trained, gain)
    if kind == "yarn":
        return _yarn(hparams, factor, trained, gain, unit)
    if gain != 1.0:
        raise hparams.unsupported("rope.scaling.attn_factor", f"is {gain} without yarn or longrope")
    return None if factor == 1.0 else {"rope_type": "linear", "type": "linear", "factor": factor}


def _yarn(hparams: HParams, factor: float, trained: int, gain: float, unit: float | None) -> dict[str, Any]:
    if hparams.number("rope.scaling.yarn_ext_factor", 1.0) != 1.0:
        raise hparams.unsupported("rope.scaling.yarn_ext_factor", "is not 1")
    multiplier = hparams.number("rope.scaling.yarn_log_multiplier", 0.0)
    if multiplier != 0.0 and unit is None:
        raise hparams.unsupported("rope.scaling.yarn_log_multiplier", "is not 0")
    scaling: dict[str, Any] = {
        "rope_type": "yarn",
        "type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": trained,
        "beta_fast": hparams.positive("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": hparams.positive("rope.scaling.yarn_beta_slow", 1.0),
    }
    if multiplier != 0.0 and unit is not None:
        # llama.cpp takes the scale of single channels as 1, or in DeepSeek's files as that of all channels.
        every = short_float(np.float32(multiplier / unit))
        scaling |= {"mscale": every if unit != 1.0 else 1.0, "mscale_all_dim": every}
    if hparams.has("rope.scaling.yarn_attn_factor"):
        scaling["attention_factor"] = hparams.positive("rope.scaling.yarn_attn_factor") * gain
    elif gain != 1.0:
        scaling["attention_factor"] = (0.1 * math.log(max(factor, 1.0)) + 1.0) * gain
    return scaling


def _longrope(long: list[float], short: list[float], trained: int, gain: float) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "type": "longrope",
        "long_factor": long,
        "short_factor": short,
        "original_max_position_embeddings": trained,
        "attention_factor": gain,
    }


def _fixed_divisors(divisors: list[float], theta: float, context: int, gain: float) -> dict[str, Any] | None:
    """Describe fixed divisors of the frequencies, the form of Llama 3's scaling in GGUF.

    Divisors of the published models become "llama3". Any others become a longrope with two equal sets, which never switches.
    """
    if all(value == 1.0 for value in divisors) and gain == 1.0:
        return None
    factor = short_float(max(divisors))
    if gain == 1.0 and factor > 1 and np.allclose(divisors, _llama3_divisors(factor, theta, len(divisors)), rtol=1e-5):
        return {"rope_type": "llama3", "type": "llama3", "factor": factor, **_LLAMA3}
    return _longrope(divisors, divisors, context, gain)


def _llama3_divisors(factor: float, theta: float, pairs: int) -> np.ndarray:
    turns = _LLAMA3["original_max_position_embeddings"] / (2 * math.pi) * theta ** (-np.arange(pairs) / pairs)
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return np.asarray(1 / ((1 - kept) / factor + kept))


def _divisors(files: GGUFFiles, name: str, rotated: int) -> list[float]:
    if name not in files.tensors:
        raise CheckpointError(f"{files.path}: tensor {name} is missing, which its rope needs; convert the model again")
    shape = files.tensors[name].shape
    values = [short_float(value) for value in files.floats(name)] if shape == (rotated // 2,) else []
    if not values or not all(math.isfinite(value) and value > 0 for value in values):
        raise CheckpointError(f"{files.path}: tensor {name} must hold {rotated // 2} positive divisors; convert the model again")
    return values


Config = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Source:
    """The contents of a GGUF file that a config is rebuilt from."""

    hparams: HParams
    files: GGUFFiles

    def has(self, tensor: str) -> bool:
        return tensor in self.files.tensors

    def has_any(self, end: str) -> bool:
        """True if a layer has a tensor of this name."""
        return any(name.startswith("blk.") and name.split(".", 2)[-1] == end for name in self.files.tensors)

    def rows(self, tensor: str) -> int:
        """Rows of a matrix; 0 if the file has no matrix of this name."""
        info = self.files.tensors.get(tensor)
        return info.shape[0] if info is not None and len(info.shape) == 2 else 0


def base_config(
    source: Source,
    model_type: str,
    *,
    partial_rope: bool = False,
    head_dim: int | None = None,
    unit: float | None = None,
    ropeless: bool = False,
    kv_heads: int | None = None,
    eps: str = "attention.layer_norm_rms_epsilon",
) -> Config:
    """Read the keys that every decoder has.

    `head_dim` is the number of channels that the rope counts in, if heads have more. `unit` is as for `read_rope`. `ropeless` leaves the
    rope to the caller. `kv_heads` replaces the file's number. `eps` is the key of the norms' epsilon.
    """
    hparams = source.hparams
    layers = hparams.integer("block_count") - hparams.integer("nextn_predict_layers", 0, low=0)
    hidden, heads = hparams.integer("embedding_length"), hparams.integer("attention.head_count")
    own = head_dim if head_dim is not None else hparams.integer("attention.key_length", hidden // heads)
    context = hparams.integer("context_length")
    if not 1 <= layers <= len(source.files.tensors):
        raise hparams.error("block_count", f"leaves {layers} layers for {len(source.files.tensors)} tensors")
    if head_dim is None and hparams.integer("attention.value_length", own) != own:
        raise hparams.unsupported("attention.value_length", f"differs from key_length, {own}")
    return {
        "model_type": model_type,
        "vocab_size": _vocabulary(source),
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads or _kv_heads(hparams, heads),
        "head_dim": own,
        "max_position_embeddings": context,
        "rms_norm_eps": hparams.positive(eps),
        "tie_word_embeddings": not source.has("output.weight"),
        **({} if ropeless else read_rope(hparams, source.files, own, context, partial=partial_rope, unit=unit)),
        **_special_tokens(source),
    }


def _kv_heads(hparams: HParams, heads: int) -> int:
    """The number of KV heads, which all layers that have any must share. Layers without KV heads are recurrent."""
    counts = hparams.per_layer("attention.head_count_kv")
    if counts is None or not any(counts):
        return hparams.integer("attention.head_count_kv", heads)
    found = sorted(set(counts) - {0})
    if len(found) > 1:
        raise hparams.unsupported("attention.head_count_kv", "differs from layer to layer")
    return found[0]


def attends(source: Source, layers: int) -> list[bool]:
    """For each layer, True if it attends. Recurrent layers have no KV heads."""
    counts = source.hparams.per_layer("attention.head_count_kv", layers)
    return [True] * layers if counts is None else [count > 0 for count in counts[:layers]]


def layer_types(source: Source, layers: int, other: str = "linear_attention") -> list[str]:
    """Name each layer "full_attention" if it has KV heads, else `other`."""
    return ["full_attention" if flag else other for flag in attends(source, layers)]


def dense_config(source: Source, model_type: str, **how: Any) -> Config:
    """Read the keys of a decoder with feed-forward layers; `how` as for `base_config`."""
    return base_config(source, model_type, **how) | {
        "intermediate_size": source.hparams.integer("feed_forward_length"),
        "hidden_act": "silu",
    }


def windowed_layers(source: Source, layers: int, period: int) -> list[str]:
    """The layers with a window: those flagged in the file, or all but the last of every `period`."""
    key = "attention.sliding_window_pattern"
    if isinstance(source.hparams.take(key), int):
        period = source.hparams.integer(key)
        flags = None
    else:
        flags = source.hparams.flags(key, layers)
    if flags is None:
        flags = [(layer + 1) % period != 0 for layer in range(layers)]
    return ["sliding_attention" if windowed else "full_attention" for windowed in flags]


def read_experts(source: Source, scores: int) -> Config:
    """Config keys of experts like DeepSeek V3's. Raises `UnsupportedModelError` for another scoring function than `scores`."""
    hparams = source.hparams
    check_scores(source, scores)
    return {
        "n_routed_experts": hparams.integer("expert_count"),
        "num_experts_per_tok": hparams.integer("expert_used_count"),
        "moe_intermediate_size": hparams.integer("expert_feed_forward_length"),
        "n_shared_experts": hparams.integer("expert_shared_count", 0, low=0),
        "first_k_dense_replace": hparams.integer("leading_dense_block_count", 0, low=0),
        "routed_scaling_factor": hparams.number("expert_weights_scale", 1.0) or 1.0,
        "norm_topk_prob": bool(hparams.take("expert_weights_norm", False)),
        "n_group": hparams.integer("expert_group_count", 1, low=0) or 1,
        "topk_group": hparams.integer("expert_group_used_count", 1, low=0) or 1,
    }


def check_scores(source: Source, scores: int) -> None:
    """Raise `UnsupportedModelError` for another scoring function than `scores`; a file may leave it out."""
    found = source.hparams.integer("expert_gating_func", scores, low=0)
    if found not in (0, scores):
        raise source.hparams.unsupported("expert_gating_func", f"is {found}")


def _vocabulary(source: Source) -> int:
    if not source.has("token_embd.weight"):
        raise CheckpointError(f"{source.files.path}: tensor token_embd.weight is missing; download or convert the model again")
    shape = source.files.tensors["token_embd.weight"].shape
    if len(shape) != 2:
        raise CheckpointError(
            f"{source.files.path}: tensor token_embd.weight has shape {list(shape)}, must be a matrix; convert the model again"
        )
    return shape[0]


def _special_tokens(source: Source) -> Config:
    metadata = source.files.metadata
    tokens = {key: metadata.get(f"tokenizer.ggml.{name}") for key, name in _SPECIAL.items()}
    return {key: token for key, token in tokens.items() if type(token) is int}


_SPECIAL = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}
