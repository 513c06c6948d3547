"""Reads adapters in GGUF files, the form of llama.cpp's `convert_lora_to_gguf.py`.

The converter transforms an update's outputs like the model's matrices, which is undone here.

Source: `src/llama-adapter.cpp` of https://github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..errors import AdapterError, UnsupportedModelError
from ..loading.gguf.names import map_tensors
from ..loading.gguf.reader import GGUFFile, TensorInfo
from ..loading.gguf.tensors import decode, rows_at_a_time
from ..loading.gguf.transforms import MappedTensor
from ..nn.weights import Dense, numbers
from ..util.typed_reader import is_number
from .update import Factors, Update, check_factors, finite_factors, key_of, not_applied

_A, _B = ".lora_a", ".lora_b"


def gguf_updates(path: Path, file: GGUFFile, config: Mapping[str, Any]) -> Iterator[Update]:
    """Yield the updates of an adapter for a text model of this config. Raises `AdapterError` for tensors that cannot be applied."""
    alpha = _alpha(path, file)
    for info in file.tensors.values():
        stem = info.name[: -len(_A)]
        if not info.name.endswith((_A, _B)):
            raise not_applied(path, info.name)
        if stem + _A not in file.tensors or stem + _B not in file.tensors:
            raise AdapterError(f"{path}: {stem!r} has only one of lora_a and lora_b; convert the adapter again")
        if stem.startswith("token_embd."):
            raise not_applied(path, info.name, "is for the embedding, which cannot have an adapter")
    for name, mapped in _mapped(path, file, config).items():
        yield _update(path, name, mapped, alpha, file)


def _alpha(path: Path, file: GGUFFile) -> float:
    metadata = file.metadata
    if metadata.get("adapter.type", "lora") != "lora":
        raise AdapterError(f"{path}: an adapter of type {metadata['adapter.type']!r}: only lora is understood")
    if "adapter.alora.invocation_tokens" in metadata:
        raise AdapterError(f"{path}: its updates begin at certain tokens (aLoRA), which is not understood")
    alpha = metadata.get("adapter.lora.alpha", 0.0)
    if not is_number(alpha):
        raise AdapterError(f"{path}: adapter.lora.alpha must be a number")
    return float(alpha)


def _mapped(path: Path, file: GGUFFile, config: Mapping[str, Any]) -> dict[str, MappedTensor]:
    """Return the `b` of each update by the model's tensor, built from the file's tensors."""
    outputs = {name[: -len(_B)]: replace(info, name=name[: -len(_B)]) for name, info in file.tensors.items() if name.endswith(_B)}
    architecture = file.metadata.get("general.architecture")
    known = {"num_key_value_heads": config.get("num_attention_heads"), **config}
    try:
        return map_tensors(outputs, str(architecture), known, known["num_hidden_layers"])
    except (KeyError, ValueError) as error:
        raise AdapterError(f"{path}: it is for an architecture {architecture!r}, and not for this model ({error})") from None


def _update(path: Path, name: str, mapped: MappedTensor, alpha: float, file: GGUFFile) -> Update:
    """Join the parts of a projection's update: `a` stacked, `b` block-diagonal."""
    parts = [(file.tensors[stem + _A], file.tensors[stem + _B]) for stem in mapped.sources]
    first, out = parts[0][0], [b.shape[0] for _, b in parts]
    for (a, b), stem in zip(parts, mapped.sources, strict=True):
        check_factors(path, stem, a.shape, (mapped.shape[0] if len(parts) == 1 else b.shape[0], *b.shape[1:]), None)
        if a.shape != first.shape or (len(parts) > 1 and sum(out) != mapped.shape[0]):
            raise not_applied(path, a.name, f"is for a part of {name!r}, of which the other parts have other shapes")
    rank, into = first.shape

    def read() -> Factors:
        a = mx.concatenate([_read(file, a) for a, _ in parts])
        blocks = [mx.pad(_read(file, b), [(0, 0), (rank * i, rank * (len(parts) - 1 - i))]) for i, (_, b) in enumerate(parts)]
        return finite_factors(path, first.name, a, numbers(mapped.make([Dense(block) for block in blocks])), None)

    key, scale = key_of(name.removesuffix(".weight")), alpha / rank if alpha else 1.0
    return Update(key, first.name, rank * len(parts), (mapped.shape[0], into), scale, False, read)


def _read(file: GGUFFile, info: TensorInfo) -> mx.array:
    try:
        return numbers(decode(info, file.pieces(info, rows_at_a_time(info))))
    except UnsupportedModelError as error:
        raise AdapterError(f"{file.path}: {error}") from None
