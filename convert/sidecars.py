"""The files next to the weights: tokenizer, chat template, licence. Copied byte for byte; code is never copied."""

from __future__ import annotations

import shutil
from pathlib import Path

_WEIGHTS = {".safetensors", ".gguf", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".h5", ".msgpack", ".onnx", ".npz", ".tflite", ".ot"}
_WRITTEN = {"config.json", "model.safetensors.index.json", "pytorch_model.bin.index.json"}
_OF_OTHER_TOOLS = {"hf_quant_config.json", "quantize_config.json", "quant_config.json"}
"""What the source's quantization was, which would be read as the destination's."""


def sidecars(source: Path) -> tuple[list[Path], dict[str, str]]:
    """The files to copy, and those left out with the reason; hidden files are ignored. Only one folder is copied, that of additional chat
    templates."""
    copied, left = [], {}
    for path in sorted(source.glob("[!.]*")):
        reason = _reason_to_leave(path)
        if reason:
            left[path.name] = reason
        elif path.is_dir():
            copied += sorted(path.glob("*.jinja"))
        elif not (path.name in _WRITTEN | _OF_OTHER_TOOLS or path.suffix == ".safetensors"):
            copied.append(path)
    return copied, left


def copy_sidecars(files: list[Path], source: Path, destination: Path) -> list[str]:
    """Copy the bytes; returns the names, relative to the source."""
    names = []
    for path in files:
        target = destination / path.relative_to(source)
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, target)
        names.append(str(path.relative_to(source)))
    return names


def _reason_to_leave(path: Path) -> str | None:
    if path.is_dir():
        return None if path.name == "additional_chat_templates" else "a folder"
    if path.suffix == ".py":
        return "code is never copied"
    return "weights in another format" if path.suffix in _WEIGHTS - {".safetensors"} else None
