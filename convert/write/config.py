"""The destination's config: in the style that mlx-lm reads, with the quantization of every layer that deviates from the default."""

from __future__ import annotations

from typing import Any

from ...loading.formats import dtype_name
from ...models.config_reader import IGNORED_KEYS
from ...models.fallback.hf_compat import lost_in_old_style, to_old_style
from ...nn.weights import Format
from ..plan.weight_map import ConversionPlan

_DROPPED = ("_name_or_path", "quantization", "quantization_config", "compression_config", "vision_config", "audio_config")


def destination_config(plan: ConversionPlan) -> dict[str, Any]:
    """The config to write. Key order does not matter: `loading.files.to_json` sorts."""
    written = {key: value for key, value in to_old_style(plan.config).items() if key not in _DROPPED}
    tied = not any(f".{output.name}".endswith(".lm_head.weight") for output in plan.outputs)
    for owner in (written, written.get("text_config")):
        if owner is not None:
            for key in written.get(IGNORED_KEYS) or ():
                owner.pop(key, None)
            owner["tie_word_embeddings"] = tied
            owner.pop("quantization_config", None)
    written["torch_dtype"] = dtype_name(plan.dtype)
    if "dtype" in written:
        written["dtype"] = written["torch_dtype"]
    if plan.default:
        written["quantization"] = written["quantization_config"] = _quantization(plan, plan.default)
    return written


def differences_in_mlx_lm(config: dict[str, Any]) -> list[str]:
    """Where mlx-lm is known to compute other logits for this config than the model's authors and this program."""
    notes = [f"mlx-lm cannot be told of {what}, so that it gives other logits" for what in lost_in_old_style(config)]
    window = config.get("sliding_window")
    if window and config.get("model_type") in ("mistral", "gemma2"):
        notes.append(f"mlx-lm runs {config['model_type']} without its window: beyond {window} tokens it gives other logits")
    if (config.get("rope_parameters") or config.get("rope_scaling") or {}).get("truncate") is False:
        notes.append("mlx-lm does not know YaRN with truncate = false, so that it gives other logits")
    return notes


def _quantization(plan: ConversionPlan, default: Format) -> dict[str, Any]:
    block: dict[str, Any] = _entry(default)
    for output in plan.outputs:
        if output.request.kind == "matrix" and output.target != default:
            path = output.name.removesuffix(".weight")
            block[path] = _entry(output.target) if isinstance(output.target, Format) else False
    return block


def _entry(form: Format) -> dict[str, Any]:
    return {"group_size": form.group_size, "bits": form.bits, "mode": form.mode}
