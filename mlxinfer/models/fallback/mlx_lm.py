"""mlx-lm's architectures as a `Model`, for models without a native graph.

They run one sequence at a time with mlx-lm's cache. Code of the model's repository is never executed: the class comes from the installed
mlx-lm.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from inspect import signature
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx.nn.layers.quantized import quantize
from mlx.utils import tree_flatten

from ...cache.base import LayerSpec, OpaqueSpec, Step
from ...errors import UnsupportedModelError, WeightsError
from ..config_reader import ignored_note
from .checks import note_of, refuse_what_differs
from .hf_compat import lost_in_old_style, to_old_style
from .ropes import check_bases, with_both_spellings

if TYPE_CHECKING:
    from ..hooks import Hooks

Tensors = Mapping[str, mx.array]

_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length", "n_ctx")
_NO_LIMIT = 1 << 20
_LISTED = 8
_CODE_KEYS = ("auto_map", "model_file", "trust_remote_code")
_ROTARY_SHARES = {"recurrent_gemma": 0.5}
"""Fraction of a head's channels that a graph always rotates, by module, if not all."""

_RENAMED: Mapping[str, tuple[tuple[str, str], ...]] = {
    "gpt2": (("transformer.", ""),),
    "muse_glimmer": (("model.vision_", "vision_"),),
    "olmo_hybrid": ((".attention_layer_norm.", ".input_layernorm."), (".feedforward_layer_norm.", ".post_attention_layernorm.")),
}
"""Parts of names in transformers 5 and in mlx-lm, by module."""


def supports(config: Mapping[str, Any]) -> bool:
    """Return True if mlx-lm has this architecture."""
    return isinstance(config.get("model_type"), str) and _module_name(config) is not None


def check_supported(config: Mapping[str, Any]) -> None:
    """Raise `UnsupportedModelError` for an architecture that mlx-lm does not have."""
    if not supports(config):
        unknown = f"architecture {config.get('model_type')!r} is supported neither here nor by the installed mlx-lm"
        raise UnsupportedModelError("; ".join([unknown, *code_note(config)]))


def build(config: Mapping[str, Any], tensors: Tensors, dtype: mx.Dtype | None = None) -> FallbackModel:
    """Build the model of a config of either style from lazy tensors (packed ones as `.weight`, `.scales`, `.biases`).

    Floating-point tensors are cast to `dtype`; weights are not evaluated. Raises `UnsupportedModelError`, and `WeightsError` with the
    names of missing, unexpected and mis-shaped tensors.
    """
    check_supported(config)
    refuse_what_differs(config)
    lost = lost_in_old_style(config)
    if lost:
        raise UnsupportedModelError(f"mlx-lm cannot represent {', '.join(lost)}, and would give other logits")
    old = with_both_spellings(to_old_style(config))
    old.setdefault("tie_word_embeddings", not any(name.endswith("lm_head.weight") for name in tensors))
    model, window = _instantiate(old)
    weights = _with_unread(model, _sanitized(model, _renamed(tensors, old)), old)
    _quantize(model, old, weights)
    _check_names(model, weights)
    model.load_weights(list(_cast(model, weights, dtype).items()))
    model.eval()
    return FallbackModel(model, old, window)


def code_note(config: Mapping[str, Any]) -> list[str]:
    """Return a note for a config that refers to code in its repository; empty otherwise."""
    key = next((key for key in _CODE_KEYS if config.get(key)), None)
    return [f"config.json names code of its repository ({key}), which is never run"] if key else []


@dataclass(slots=True)
class SequenceState:
    """mlx-lm's cache of one sequence."""

    caches: list[Any]
    """mlx-lm's caches, one per layer."""

    def arrays(self) -> list[mx.array]:
        leaves = dict(tree_flatten([cache.state for cache in self.caches])).values()
        return [leaf for leaf in leaves if isinstance(leaf, mx.array)]


class FallbackModel:
    """Implements `Model`. Its hidden states are the logits, because mlx-lm's models return only these."""

    recompute_at: int | None = None
    mrope = False

    def __init__(self, model: Any, config: Mapping[str, Any], window: int | None = None) -> None:
        """Wrap a model. `window` is a window in tokens that mlx-lm's graph ignores; within it the logits are right."""
        from mlx_lm.models.cache import make_prompt_cache

        text = config.get("text_config") or {}
        self.model = model
        self.model_type = str(config["model_type"])
        self.vocab_size = int(config.get("vocab_size") or text.get("vocab_size") or 0)
        self.max_context = next((int(c[key]) for c in (config, text) for key in _CONTEXT_KEYS if c.get(key)), _NO_LIMIT)
        self.layers: tuple[LayerSpec, ...] = (OpaqueSpec(lambda: SequenceState(make_prompt_cache(model))),)
        alone = f"{self.model_type} has no graph of its own: it runs on mlx-lm's, one sequence at a time, with an unquantized cache"
        self.notes: tuple[str, ...] = (alone, *code_note(config), *note_of(self.model_type), *ignored_note(config))
        self.mtp = None
        if window is not None and window < self.max_context:
            self.max_context = window
            self.notes += (f"mlx-lm's graph does not know this model's window of {window} tokens: that is as long as a context may be",)

    def rotation(self, length: int) -> tuple[int, ...]:
        return ()

    def hidden(self, tokens: mx.array, step: Step, hooks: Hooks | None = None) -> mx.array:
        """Map int32 `[T]` to logits `[T, vocab]`."""
        assert hooks is None
        rows = []
        for segment in step.segments:
            state = step.opaque(segment)
            assert isinstance(state, SequenceState)
            row = tokens[None, segment.start : segment.start + segment.count]
            rows.append(self.model(row, cache=state.caches)[0])
        return mx.concatenate(rows) if len(rows) > 1 else rows[0]

    def draft(self, tokens: mx.array, before: mx.array, step: Step) -> tuple[mx.array, mx.array]:
        raise NotImplementedError("graphs of mlx-lm have no head that drafts")

    def logits(self, hidden: mx.array) -> mx.array:
        """Return the logits in float32."""
        return hidden.astype(mx.float32)

    scores = logits


def _module_name(config: Mapping[str, Any]) -> str | None:
    """Return mlx-lm's module for this config. The name is looked up in a list, never imported directly."""
    import mlx_lm.models
    from mlx_lm import utils

    model_type = to_old_style(config)["model_type"]
    renamed = getattr(utils, "MODEL_REMAPPING", {}).get(model_type, model_type)
    for architecture in config.get("architectures") or ():
        renamed = getattr(utils, "MODEL_ARCHITECTURE_REMAPPING", {}).get((model_type, architecture), renamed)
    return next((module.name for module in pkgutil.iter_modules(mlx_lm.models.__path__) if module.name == renamed), None)


def _instantiate(config: dict[str, Any]) -> tuple[Any, int | None]:
    """Return (model, window that its graph ignores)."""
    name = _module_name(config)
    try:
        module: Any = import_module(f"mlx_lm.models.{name}")
    except (ImportError, SystemExit) as error:
        raise UnsupportedModelError(f"mlx-lm's {name} needs a package that is not installed ({error})") from error
    if not (hasattr(module, "Model") and hasattr(module, "ModelArgs")):
        raise UnsupportedModelError(f"mlx-lm's {name} is not an architecture")
    _check_that_rope_is_read(module.ModelArgs, name, config)
    try:
        model, window = module.Model(module.ModelArgs.from_dict(config)), _unread_window(module.ModelArgs, config)
    except (TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
        raise UnsupportedModelError(f"mlx-lm's {name} cannot read this config: {error}") from error
    from mlx_lm.models.rope_utils import initialize_rope

    check_bases(model, config, str(name), initialize_rope)
    return model, window


def _renamed(tensors: Tensors, config: Mapping[str, Any]) -> dict[str, mx.array]:
    """Return the tensors under the names and in the layouts of mlx-lm's module."""
    renamed = {}
    module = str(_module_name(config))
    for name, array in tensors.items():
        for old, new in _RENAMED.get(module, ()):
            name = name.replace(old, new, 1)
        renamed[name] = array
    if module == "qwen3_vl_moe":
        _turn_experts(renamed, config.get("text_config") or {})
    return renamed


def _with_unread(model: Any, weights: dict[str, mx.array], config: Mapping[str, Any]) -> dict[str, mx.array]:
    """Add unused tensors of Gemma 3n, whose late layers read earlier keys and values; transformers 5 omits them."""
    text = config.get("text_config") or {}
    shared, layers = text.get("num_kv_shared_layers"), text.get("num_hidden_layers")
    if config["model_type"] != "gemma3n" or not shared or not layers:
        return weights
    unread = [f".layers.{layer}.self_attn.{part}." for layer in range(layers - shared, layers) for part in ("k_proj", "v_proj", "k_norm")]
    wanted = dict(tree_flatten(model.parameters()))
    return {name: mx.zeros_like(array) for name, array in wanted.items() if any(part in name for part in unread)} | weights


def _turn_experts(tensors: dict[str, mx.array], text: Mapping[str, Any]) -> None:
    """Convert experts from the layout of transformers 5, with outputs in rows, to the published layout."""
    downs = [name for name in tensors if name.endswith(".experts.down_proj")]
    if any(tensors[name].shape[-1] != text.get("hidden_size") for name in downs):
        for down in downs:
            for name in (down, down.replace("down_proj", "gate_up_proj")):
                if name in tensors:
                    tensors[name] = tensors[name].swapaxes(-2, -1)


def _sanitized(model: Any, tensors: Tensors) -> dict[str, mx.array]:
    """Return the tensors under the names and in the layouts of the model."""
    if not hasattr(model, "sanitize"):
        return dict(tensors)
    try:
        weights: dict[str, mx.array] = model.sanitize(dict(tensors))
    except (KeyError, ValueError, TypeError, AttributeError, IndexError) as error:
        raise WeightsError(f"mlx-lm cannot arrange these tensors, some are missing or of another layout: {error!r}") from error
    return weights


def _check_that_rope_is_read(arguments: Any, name: str | None, config: Mapping[str, Any]) -> None:
    """Refuse rope keys that mlx-lm's model ignores, because its logits would differ silently."""
    read = set(signature(arguments).parameters)
    if read & {"rope_parameters", "text_config"}:
        return
    scaling, share = config.get("rope_scaling") or {}, config.get("partial_rotary_factor") or 1
    if scaling.get("rope_type", scaling.get("type", "default")) != "default" and "rope_scaling" not in read:
        raise UnsupportedModelError(f"mlx-lm's {name} does not read rope_scaling, which this config has")
    if share != _ROTARY_SHARES.get(str(name), 1) and not read & {"partial_rotary_factor", "rotary_pct", "rotary_dim"}:
        raise UnsupportedModelError(f"mlx-lm's {name} does not read partial_rotary_factor, which is {share} in this config")


def _unread_window(arguments: Any, config: Mapping[str, Any]) -> int | None:
    """Return the window of all layers in tokens if mlx-lm's model ignores it; otherwise None."""
    window, read = config.get("sliding_window"), signature(arguments).parameters
    if not isinstance(window, int) or "sliding_window" in read or "text_config" in read or config.get("use_sliding_window") is False:
        return None
    return window


def _quantize(model: Any, config: Mapping[str, Any], weights: Tensors) -> None:
    """Replace packed layers by quantized ones in the format of their tensors."""
    foreign = config.get("quantization_config")
    if "quantization" not in config and isinstance(foreign, dict) and foreign.get("quant_method") is not None:
        raise UnsupportedModelError(f"config.json: quantization_config with quant_method {foreign['quant_method']!r} is not supported")
    stated: Mapping[str, Any] = config.get("quantization") or {}

    def form(path: str, module: Any) -> bool | dict[str, Any]:
        scales = weights.get(f"{path}.scales")
        if not hasattr(module, "to_quantized") or scales is None:
            return False
        in_dims = module.weight.shape[-1]
        groups, bits = in_dims // scales.shape[-1], weights[f"{path}.weight"].shape[-1] * 32 // in_dims
        own = stated.get(path)
        mode = (own if isinstance(own, dict) else stated).get("mode", "affine")
        if scales.dtype == mx.uint8 and mode == "affine":
            mode = {(4, 16): "nvfp4", (4, 32): "mxfp4", (8, 32): "mxfp8"}.get((bits, groups), mode)
        return {"group_size": groups, "bits": bits, "mode": "affine" if scales.dtype != mx.uint8 else mode}

    quantize(model, class_predicate=form)


def _check_names(model: Any, weights: Tensors) -> None:
    wanted = dict(tree_flatten(model.parameters()))
    problems = [f"{name} is missing" for name in wanted if name not in weights]
    problems += [f"{name} is unexpected" for name in weights if name not in wanted]
    problems += [
        f"{name} has shape {list(weights[name].shape)}, expected {list(array.shape)}"
        for name, array in wanted.items()
        if name in weights and weights[name].shape != array.shape
    ]
    if problems:
        more = len(problems) - _LISTED
        raise WeightsError("; ".join(problems[:_LISTED]) + (f"; and {more} more" if more > 0 else ""))


def _cast(model: Any, weights: Tensors, dtype: mx.Dtype | None) -> dict[str, mx.array]:
    may_cast: Callable[[str], bool] = getattr(model, "cast_predicate", lambda name: True)
    return {
        name: array.astype(dtype) if dtype and mx.issubdtype(array.dtype, mx.floating) and may_cast(name) else array
        for name, array in weights.items()
    }
