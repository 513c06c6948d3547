"""Architectures of GGUF files: table from `general.architecture` to the family that reads the metadata and names the tensors."""

from __future__ import annotations

from importlib import import_module

from ....errors import CheckpointError, UnsupportedModelError
from ....util.typed_reader import shown
from ..architecture import GGUFArchitecture
from ..base_config import Config, Source
from ..files import GGUFFiles
from ..hparams import HParams

FAMILIES = {
    "llama": "llama",
    "qwen2": "qwen",
    "qwen3": "qwen",
    "qwen3moe": "qwen",
    "qwen3next": "hybrid.qwen_hybrid",
    "qwen35": "hybrid.qwen_hybrid",
    "qwen35moe": "hybrid.qwen_hybrid",
    "gemma2": "gemma",
    "gemma3": "gemma",
    "phi3": "phi3",
    "granite": "llama",
    "smollm3": "llama",
    "gpt-oss": "gpt_oss",
    "olmo2": "olmo2",
    "mistral3": "llama",
    "glm4": "glm4",
    "glm4moe": "glm4",
    "cohere2": "cohere2",
    "exaone4": "exaone4",
    "hunyuan-dense": "hunyuan",
    "seed_oss": "seed_oss",
    "ernie4_5": "ernie4_5",
    "ernie4_5-moe": "ernie4_5",
    "minimax-m2": "minimax",
    "gemma4": "gemma4",
    "deepseek2": "deepseek",
    "mistral4": "deepseek",
    "minicpm3": "deepseek",
    "kimi-linear": "hybrid.kimi_linear",
    "granitehybrid": "hybrid.granite_hybrid",
    "nemotron_h": "hybrid.nemotron_h",
    "nemotron_h_moe": "hybrid.nemotron_h",
    "falcon-h1": "hybrid.falcon_h1",
    "lfm2": "hybrid.lfm2",
    "lfm2moe": "hybrid.lfm2",
}
"""`general.architecture` to the module under `families` that has it in `ARCHITECTURES`."""


def find_architecture(name: str) -> GGUFArchitecture:
    """Import the family of an architecture. Raises `KeyError` for an unknown name."""
    found: GGUFArchitecture = import_module(f".{FAMILIES[name]}", __name__).ARCHITECTURES[name]
    return found


def rebuild_config(files: GGUFFiles) -> Config:
    """The config. Raises `UnsupportedModelError` naming an unknown architecture or hyperparameter, `CheckpointError` for senseless ones."""
    name = architecture_name(files)
    source = Source(HParams(files.metadata, name, files.path, files.written_as), files)
    config = find_architecture(name).read_config(source)
    source.hparams.finish()
    return config


def architecture_name(files: GGUFFiles) -> str:
    """`general.architecture`. Raises `UnsupportedModelError` for one that is not supported, and for files that hold no model."""
    kind = files.metadata.get("general.type", "model")
    if not isinstance(kind, str) or kind != "model":
        raise UnsupportedModelError(f"{files.path}: holds a {shown(kind)}, not a model; give the file of the language model")
    version = files.metadata.get("general.quantization_version", 2)
    if not isinstance(version, int) or version != 2:
        raise UnsupportedModelError(f"{files.path}: quantization version {shown(version)} is not supported, only 2; convert it again")
    name = files.metadata.get("general.architecture")
    if not isinstance(name, str):
        raise CheckpointError(f"{files.path}: general.architecture is missing from the metadata; convert the model again")
    if name == "clip":
        raise UnsupportedModelError(
            f"{files.path}: holds a vision tower only (an mmproj file); give the file of the language model, and this one as --mmproj"
        )
    if name not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise UnsupportedModelError(
            f"{files.path}: the architecture {shown(files.written_as)} is not supported from GGUF (only {known}); "
            f"give the model's safetensors instead"
        )
    return name
