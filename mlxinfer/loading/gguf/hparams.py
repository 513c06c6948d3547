"""Typed access to a GGUF file's hyperparameters: the metadata keys under the name of its architecture.

`HParams.finish` refuses a key that was not read, unless it is listed here as a key that changes no answer. Names are those of
llama.cpp's `gguf/constants.py` and of Ollama's `convert/`. Keys without an architecture (`general.`, `tokenizer.`, `quantize.imatrix.`,
`split.`, keys of exporters) are not checked.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import CheckpointError, UnsupportedModelError
from ...models.config_reader import way_on
from ...util.typed_reader import LARGEST, TypedReader, is_number, shown

_WITHOUT_EFFECT = re.compile(
    r"(vision|audio|mm|sam|clip|split|classifier|tokenizer|training|quantization)\..+"
    r"|(image|images|video|audio|vision|speech)_\w+|\w+_token_ids?|spatial_merge_size|n_deepstack_layers"
    r"|\w*(initializer|dropout)\w*|source_quantization|source_fp8_tensors"
    r"|vocab_size|tensor_data_layout|pooling_type|normalize_embeddings|rope\.scaling\.finetuned"
    r"|attention\.layer_norm_epsilon|attention\.layer_norm_rms_epsilon|expert_shared_count"
)
"""Keys of images, sound, training, initialisation, tokenizers, exporters and text vectors; keys of the other kind of norm; keys that
repeat the tensors."""

Hyper = Mapping[str, Any]


def is_harmless(key: str, value: object, hyper: Hyper) -> bool | None:
    """True if a key with this value changes nothing, None for an unknown key. `hyper` has all keys of the architecture. Keys have no
    prefix."""
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
    """True for no window, or one that no context exceeds."""
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
"""llama.cpp takes a factor of 0 as absent."""
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
"""Other keys that no graph reads, with the values that change nothing."""

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
"""Known keys that change the maths, with the reason."""


class HParams(TypedReader):
    """The keys `{arch}.*`. A value of a wrong type raises `CheckpointError`, an unsupported value `UnsupportedModelError`."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str, path: Path, written_as: str = "") -> None:
        """`written_as` is the architecture's name in the file, if it differs."""
        self.path = path
        self._prefix = (written_as or architecture) + "."
        prefix = architecture + "."
        self._hparams = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
        super().__init__(self._hparams)

    def error(self, key: str, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {self._prefix}{key} {what}; convert the model again")

    def unsupported(self, key: str, what: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{self.path}: {self._prefix}{key} {what}, which is not supported; {way_on(self._prefix + key)}")

    def optional_integer(self, key: str, default: int | None = None, *, low: float = 1, high: float = LARGEST) -> int | None:
        """Read an integer. A list of equal numbers, one per layer, is accepted."""
        value = self.take(key)
        if isinstance(value, np.ndarray) and value.ndim == 1 and value.size:
            if (value != value[0]).any():
                raise self.unsupported(key, "differs from layer to layer")
            self._hparams[key] = value[0].item()
        return super().optional_integer(key, default, low=low, high=high)

    def optional_number(self, key: str, default: float | None = None) -> float | None:
        """Read a number with only the digits that its float32 needs: 1e-05 rather than 9.999999747378752e-06."""
        value = super().optional_number(key, default)
        return None if value is None else short_float(value)

    def per_layer(self, key: str, count: int = 0) -> list[int] | None:
        """Read an integer for each of at least `count` layers. None if the key is absent or has one number for all."""
        value = self.take(key)
        if not isinstance(value, np.ndarray):
            return None
        if value.ndim != 1 or value.size < count or value.dtype.kind not in "iub" or not ((value >= 0) & (value <= LARGEST)).all():
            raise self.error(key, f"must hold a number for each of the {count} layers")
        return [int(number) for number in value]

    def flags(self, key: str, count: int) -> list[bool] | None:
        """Read a bool for each of `count` layers, or None. A file may have more, for layers that are left out."""
        value = self.take(key)
        if value is None:
            return None
        if not isinstance(value, np.ndarray) or value.ndim != 1 or value.size < count:
            raise self.error(key, f"must hold a flag for each of the {count} layers")
        return [bool(flag) for flag in value[:count]]

    def finish(self) -> None:
        """Raise `UnsupportedModelError` for the first unread key that may change the maths."""
        for key, value in self.untaken():
            known = is_harmless(key, value, self._hparams)
            if key in REFUSED:
                raise self.unsupported(key, f"= {shown(value)} {REFUSED[key]}")
            if known is None:
                raise UnsupportedModelError(
                    f"{self.path}: {self._prefix}{key} = {shown(value)} is not understood, and may change the answers; "
                    f"{way_on(self._prefix + key)}"
                )
            if not known:
                raise self.unsupported(key, f"is {shown(value)}")


def short_float(value: float) -> float:
    """The shortest decimal with the same float32. A float64 without an equal float32 stays unchanged."""
    with np.errstate(over="ignore"):
        narrow = np.float32(value)
    return float(str(narrow)) if float(narrow) == float(value) else float(value)
