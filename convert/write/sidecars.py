"""The files next to the weights: tokenizer, chat template, licence, the recipe of vectors. Copied byte for byte; code is never copied."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

_WEIGHTS = {".safetensors", ".gguf", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".h5", ".msgpack", ".onnx", ".npz", ".tflite", ".ot"}
_WRITTEN = {"config.json", "model.safetensors.index.json", "pytorch_model.bin.index.json"}
_OF_OTHER_TOOLS = {"hf_quant_config.json", "quantize_config.json", "quant_config.json"}
"""What the source's quantization was, which would be read as the destination's."""
_MODULE = re.compile(r"\d+_[A-Z][a-z]+")
"""Folders of sentence-transformers, such as 1_Pooling."""
_OF_MODULES = ("config.json", "model.safetensors")


def sidecars(source: Path) -> tuple[list[Path], dict[str, str]]:
    """The files to copy, and those left out with the reason; hidden files are ignored. The only folders that are copied are that of
    additional chat templates and those of sentence-transformers."""
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
        return None if path.name == "additional_chat_templates" or _MODULE.fullmatch(path.name) else "a folder"
    if path.suffix == ".py":
        return "code is never copied"
    return "weights in another format" if path.suffix in _WEIGHTS - {".safetensors"} else None
