"""Ropes of mlx-lm's graphs: settings in both spellings, and a check of the base that a graph uses.

Configs before transformers 5 have `rope_theta` and `rope_scaling`, later ones `rope_parameters`. A class of mlx-lm ignores unknown keys and
falls back to its own base, which changes every logit. Each class therefore receives both spellings and transformers' default base, and its
finished ropes are compared with the config.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import product
from typing import Any

import mlx.core as mx

from ...errors import UnsupportedModelError
from ..common import FULL, SLIDING

_BASE_OF = {
    1e4: "afmoe deepseek_v3 deepseek_v32 dots1 exaone_moe gemma glm_moe_dsa granitemoe internlm3 muse_glimmer_text nanochat nemotron olmoe "
    "qwen2_moe recurrent_gemma starcoder2",
    1e5: "helium",
    5e5: "bitnet cohere exaone llama4_text muse_spark_text",
    1e6: "phimoe solar_open",
    5e6: "minimax_m3_vl_text",
    6e6: "bailing_hybrid",
    1e7: "longcat_flash",
}
DEFAULTS: Mapping[str, Mapping[str, Any]] = {name: {"rope_theta": base} for base, names in _BASE_OF.items() for name in names.split()} | {
    "gemma3n_text": {"rope_theta": 1e6, "rope_local_base_freq": 1e4},
    "phi": {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
    "stablelm": {"rope_theta": 1e4, "partial_rotary_factor": 0.25},
}
"""Defaults of transformers 5.24 for base and rotated fraction, by `model_type`."""

OF_THEIR_CODE = {"deepseek": 1e4, "internlm2": 1e4, "minicpm": 1e4, "plamo": 1e4}
"""Default bases of the configuration classes in the models' repositories, by `model_type`."""

FIXED = {"gptj": 1e4, "phixtral": 1e4, "plamo2": 1e4, "qwen": 1e4}
"""Fixed bases of architectures whose configs need not state one, by `model_type`."""

_BASES = frozenset(
    {
        "rope_theta", "rope_local_base_freq", "rope_local_theta", "swa_rope_theta", "compress_rope_theta", "layer_rope_theta",
        "rotary_emb_base", "rope_freq_constant", "rope_embedding_base",
    }
)  # fmt: skip
"""Keys of bases, including those per kind of layer."""
_WITH_BASES = ("rope_parameters", "attn_config", "text_config", FULL, SLIDING)
_OF_WINDOWS = {"mimo_v2_flash": "swa_rope_theta", "plamo3": "rope_local_theta"}
"""Old key of the base of layers with a window, by `model_type`, if not `rope_local_base_freq`."""
_OF_FREQUENCIES = ("Llama3RoPE", "YarnRoPE")
"""Classes of mlx-lm that store frequencies instead of a base."""
_BY_KIND = frozenset({"laguna", "mellum", "spark2_5"})
"""Classes of mlx-lm that read only `rope_parameters` per kind of layer."""


def with_both_spellings(old: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config of the old style (see `to_old_style`) with flat `rope_parameters` that include the base."""
    both = dict(old)
    model_type = str(old.get("model_type"))
    text = old.get("text_config")
    if isinstance(text, Mapping):
        inner = text.get("model_type") or f"{model_type}_text"
        both["text_config"] = dict(text) | {
            key: value for key, value in with_both_spellings(dict(text) | {"model_type": inner}).items() if key != "model_type"
        }
    if not any(_bases(both)):
        usual = DEFAULTS.get(model_type) or ({"rope_theta": OF_THEIR_CODE[model_type]} if model_type in OF_THEIR_CODE else {})
        both |= {key: value for key, value in usual.items() if both.get(key) is None}
    local = _OF_WINDOWS.get(model_type)
    if local and both.get("rope_local_base_freq") is not None:
        both.setdefault(local, both["rope_local_base_freq"])
    if model_type not in _BY_KIND and isinstance(both.get("rope_theta"), (int, float)):
        both["rope_parameters"] = _flat(both)
    return both


def check_bases(model: Any, config: Mapping[str, Any], name: str, make_rope: Callable[..., Any]) -> None:
    """Compare a built graph's ropes with the config. `make_rope` is mlx-lm's `initialize_rope`.

    Raises `UnsupportedModelError` for a base that the config does not state.
    """
    if name in _BY_KIND:
        _check_kinds(config, name)
    stated = set(_bases(config)) or ({FIXED[name]} if name in FIXED else set())
    for base in sorted({base for base in _rotating(model) if base not in stated}):
        if stated:
            named = " and ".join(f"{number:g}" for number in sorted(stated))
            raise UnsupportedModelError(
                f"mlx-lm's {name} would rotate with the base {base:g}, where config.json says {named}: its logits would be wrong"
            )
        raise UnsupportedModelError(
            f"config.json names no rope_theta, and mlx-lm's {name} would take {base:g}, which nobody can confirm: "
            "add rope_theta to config.json, with the value that the model was trained with"
        )
    _check_frequencies(model, config, name, stated, make_rope)


def _check_kinds(config: Mapping[str, Any], name: str) -> None:
    parameters, kinds = config.get("rope_parameters"), set(config.get("layer_types") or ())
    known = parameters if isinstance(parameters, Mapping) else {}
    if any("rope_theta" not in (known.get(kind) or {}) for kind in kinds):
        listed = ", ".join(sorted(kinds))
        raise UnsupportedModelError(f"mlx-lm's {name} reads a rope_theta in rope_parameters for each of {listed}: config.json lacks one")


def _flat(old: Mapping[str, Any]) -> dict[str, Any]:
    """Return `rope_parameters` of all layers, or of layers without a window, from the old keys."""
    parameters, scaling = old.get("rope_parameters"), old.get("rope_scaling")
    given = parameters if isinstance(parameters, Mapping) else {}
    given = given[FULL] if isinstance(given.get(FULL), Mapping) else given
    flat = {key: value for key, value in given.items() if value is not None and not isinstance(value, Mapping)}
    if not flat and isinstance(scaling, Mapping):
        flat = dict(scaling)
    flat["rope_theta"] = old["rope_theta"]
    flat.setdefault("rope_type", flat.get("type", "default"))
    if not given and old.get("partial_rotary_factor") is not None:
        flat["partial_rotary_factor"] = old["partial_rotary_factor"]
    return flat


def _bases(config: Mapping[str, Any]) -> Iterator[float]:
    """Yield all bases of a config."""
    for key, value in config.items():
        if key in _BASES:
            yield from (float(number) for number in (value if isinstance(value, list) else [value]) if isinstance(number, (int, float)))
        elif key in _WITH_BASES and isinstance(value, Mapping):
            yield from _bases(value)


def _ropes(model: Any) -> Iterator[Any]:
    """Yield the ropes of a graph, without those of towers."""
    for path, part in model.named_modules():
        if "Ro" in type(part).__name__ and not any(tower in path for tower in ("vision", "visual", "audio")):
            yield part


def _rotating(model: Any) -> Iterator[float]:
    """Yield the bases of ropes that store a number."""
    for part in _ropes(model):
        base = getattr(part, "base", None)
        if isinstance(base, (int, float)):
            yield float(base)


def _check_frequencies(model: Any, config: Mapping[str, Any], name: str, stated: set[float], make_rope: Callable[..., Any]) -> None:
    """Compare ropes that store frequencies with those of the stated bases."""
    places = [place for place in (config, config.get("text_config")) if isinstance(place, Mapping)]
    scalings = [place["rope_scaling"] for place in places if isinstance(place.get("rope_scaling"), dict)]
    length = next((place["max_position_embeddings"] for place in places if "max_position_embeddings" in place), None)
    for part in _ropes(model):
        if type(part).__name__ not in _OF_FREQUENCIES:
            continue
        pairs = product(stated, scalings)
        expected = [make_rope(part.dims, base, part.traditional, scaling, length) for base, scaling in pairs]
        if not any(type(rope) is type(part) and mx.allclose(rope._freqs, part._freqs, rtol=1e-5).item() for rope in expected):
            raise UnsupportedModelError(f"mlx-lm's {name} would not rotate as rope_theta and rope_scaling of config.json say")
