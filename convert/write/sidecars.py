"""Files of a destination besides its weights: config, and copied files (tokenizer, template, licence, processor).

Copies are byte for byte; code is never copied.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

from ...loading.checkpoint import Checkpoint
from ...loading.files import to_json
from ...loading.formats import dtype_name
from ...loading.gguf import GGUFCheckpoint
from ...models.config_reader import IGNORED_KEYS
from ...models.fallback.hf_compat import lost_in_old_style, to_old_style
from ...nn.weights import Format
from ...tokenizer.tokenizer import Tokenizer
from ..plan.towers import paths_in_mlx, whole_config
from ..plan.weight_map import ConversionPlan

_WEIGHTS = {".safetensors", ".gguf", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".h5", ".msgpack", ".onnx", ".npz", ".tflite", ".ot"}
_WRITTEN = {"config.json", "model.safetensors.index.json", "pytorch_model.bin.index.json"}
_OF_OTHER_TOOLS = {"hf_quant_config.json", "quantize_config.json", "quant_config.json"}
"""Quantization configs of the source, which would be read as the destination's."""
_MODULE = re.compile(r"\d+_[A-Z][a-z]+")
"""Folders of sentence-transformers, such as 1_Pooling."""
_OF_MODULES = ("config.json", "model.safetensors")


def write_sidecars(checkpoint: Checkpoint, tokenizer: Tokenizer, planned: ConversionPlan, directory: Path) -> tuple[list[str], list[str]]:
    """Write the config and the files that belong to it. Return the names of these files, and notes for the user. Raises OSError."""
    config = directory / "config.json"
    config.write_text(to_json(destination_config(planned, checkpoint)), encoding="utf-8")
    if isinstance(checkpoint, GGUFCheckpoint):
        tokenizer.save(directory)
        # A tokenizer's files name one end token; models of several (end of text, end of turn) keep the list here.
        ends = {"eos_token_id": sorted(tokenizer.eos_token_ids)}
        (directory / "generation_config.json").write_text(to_json(ends), encoding="utf-8")
        return sorted(path.name for path in directory.iterdir() if path != config), []
    files, left = sidecars(checkpoint.path)
    return copy_sidecars(files, checkpoint.path, directory), [f"{name} is not copied: {reason}" for name, reason in left.items()]


def sidecars(source: Path) -> tuple[list[Path], dict[str, str]]:
    """Return the files to copy, and the names of others with the reason. Hidden files are ignored.

    Only folders of additional chat templates and of sentence-transformers are copied.
    """
    copied, left = [], {}
    for path in sorted(source.glob("[!.]*")):
        reason = _reason_to_leave(path)
        if reason:
            left[path.name] = reason
        elif path.is_dir():
            names = _OF_MODULES if _MODULE.fullmatch(path.name) else ("*.jinja",)
            copied += sorted(file for name in names for file in path.glob(name))
        elif not (path.name in _WRITTEN | _OF_OTHER_TOOLS or path.suffix == ".safetensors"):
            copied.append(path)
    return copied, left


def copy_sidecars(files: list[Path], source: Path, destination: Path) -> list[str]:
    """Copy files byte for byte, and return their names relative to the source."""
    names = []
    for path in files:
        target = destination / path.relative_to(source)
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, target)
        names.append(str(path.relative_to(source)))
    return names


def _reason_to_leave(path: Path) -> str | None:
    if path.is_dir():
        return None if path.name == "additional_chat_templates" or _MODULE.fullmatch(path.name) else "a folder"
    if path.suffix == ".py":
        return "code is never copied"
    return "weights in another format" if path.suffix in _WEIGHTS - {".safetensors"} else None


_DROPPED = ("_name_or_path", "quantization", "quantization_config", "compression_config")
_OF_TOWERS = ("vision_config", "audio_config")


def destination_config(plan: ConversionPlan, checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the config to write. Key order does not matter: `loading.files.to_json` sorts."""
    text = to_old_style(plan.config)
    written = text if plan.whole is None else whole_config(plan.whole, text)
    dropped = _DROPPED if plan.whole else (*_DROPPED, *_OF_TOWERS)
    written = {key: value for key, value in written.items() if key not in dropped}
    tied = not any(f".{output.name}".endswith(".lm_head.weight") for output in plan.outputs)
    for owner in (written, written.get("text_config"), written.get("llm_config")):
        if owner is not None:
            for key in written.get(IGNORED_KEYS) or ():
                owner.pop(key, None)
            owner["tie_word_embeddings"] = tied
            owner.pop("quantization_config", None)
    written["torch_dtype"] = dtype_name(plan.dtype)
    if "dtype" in written:
        written["dtype"] = written["torch_dtype"]
    if plan.default:
        written["quantization"] = written["quantization_config"] = _quantization_block(plan, plan.default, checkpoint)
    return written


def differences_in_mlx_lm(config: dict[str, Any]) -> list[str]:
    """Return notes on logits that mlx-lm is known to compute differently for this config."""
    notes = [f"mlx-lm cannot be told of {what}, so that it gives other logits" for what in lost_in_old_style(config)]
    window = config.get("sliding_window")
    if window and config.get("model_type") in ("mistral", "gemma2"):
        notes.append(f"mlx-lm runs {config['model_type']} without its window: beyond {window} tokens it gives other logits")
    if (config.get("rope_parameters") or config.get("rope_scaling") or {}).get("truncate") is False:
        notes.append("mlx-lm does not know YaRN with truncate = false, so that it gives other logits")
    return notes


def _quantization_block(plan: ConversionPlan, default: Format, checkpoint: Checkpoint) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for output in plan.outputs:
        if output.request.kind == "matrix" and output.target != default:
            path = output.name.removesuffix(".weight")
            found[path] = _quantization_entry(output.target) if isinstance(output.target, Format) else False
    if plan.whole:
        towers = plan.towers.quantization(checkpoint)
        found |= {path: _quantization_entry(form) for path, form in towers.items() if form != default}
        found = {**{name: entry for path, entry in found.items() for name in paths_in_mlx(path)}, **found}
    return _quantization_entry(default) | found


def _quantization_entry(form: Format) -> dict[str, Any]:
    return {"group_size": form.group_size, "bits": form.bits, "mode": form.mode}
