"""The recipe by which a checkpoint makes vectors of texts: files of sentence-transformers, or the metadata of a GGUF file.

Nothing is guessed: with the wrong pooling, vectors look right and find the wrong texts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import field
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import numpy as np

from ...errors import CheckpointError, SamplingError, UnsupportedModelError
from ...util.dataclass import dataclass
from ...util.plain_file import read_plain
from ..checkpoint import Checkpoint
from ..files import read_json, read_json_if_there
from ..gguf import GGUFCheckpoint
from ..safetensors import SafetensorsFile

PoolingKind = Literal["last", "mean", "first"]
"""Pooling of a text's states: that of the last token, the mean of all, or that of the first."""

_MODES: Mapping[str, PoolingKind] = {"lasttoken": "last", "mean": "mean", "cls": "first"}
_OLD_KEYS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Keys of sentence-transformers before version 6, each a flag."""
_GGUF_KINDS: tuple[str, ...] = ("none", "mean", "cls", "lasttoken", "rank")
"""llama.cpp's `enum llama_pooling_type`, from 0 on."""
_ACTIVATIONS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "Identity": lambda x: x,
    "Tanh": np.tanh,
    "ReLU": lambda x: np.maximum(x, 0),
}


NO_EMBEDDING_MODEL = "not an embedding model"
_NO_RECIPE = (
    f"{NO_EMBEDDING_MODEL} (if it is one, copy modules.json and the folders that it names (1_Pooling, ...) from its original repository "
    "to the weights)"
)


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """A layer after pooling: `activation(x @ weight.T + bias)`."""

    weight: np.ndarray
    """Float64 `[out, in]`."""
    bias: np.ndarray | None
    """Float64 `[out]`, or None."""
    activation: str
    """A key of `_ACTIVATIONS`."""

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Map `[n, in]` to `[n, out]`."""
        y = x @ self.weight.T
        return _ACTIVATIONS[self.activation](y if self.bias is None else y + self.bias)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingRecipe:
    """Recipe for the vector of a text."""

    pooling: PoolingKind
    dense: tuple[DenseLayer, ...] = ()
    normalized: bool = False
    """True if vectors have length 1."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    """Prompts before a text, by name: usually "query" and "document"."""
    default_prompt: str | None = None
    max_tokens: int | None = None
    """Maximum length of a text, in tokens; None for the model's."""

    def finish(self, pooled: np.ndarray, dimensions: int | None) -> np.ndarray:
        """Finish pooled states, float32 `[n, hidden]` to `[n, d]`: apply the layers, keep the first `dimensions` numbers, and normalize.

        Raises `SamplingError` for more dimensions than the vectors have.
        """
        x = pooled.astype(np.float64)  # so that a text's numbers hardly depend on the number of texts in a product
        for layer in self.dense:
            x = layer(x)
        if dimensions is not None:
            if not 1 <= dimensions <= x.shape[1]:
                raise SamplingError(f"dimensions must be 1 to {x.shape[1]} for this model, not {dimensions}")
            x = x[:, :dimensions]
        if self.normalized:
            x = x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)
        return x.astype(np.float32)


def read_recipe(checkpoint: Checkpoint) -> EmbeddingRecipe | str:
    """Read the recipe, or the reason for none: a sentence, or `NO_EMBEDDING_MODEL` with advice. Raises `CheckpointError` for corrupt
    files."""
    try:
        if isinstance(checkpoint, GGUFCheckpoint):
            return _from_metadata(checkpoint)
        return _from_modules(checkpoint.path) if (checkpoint.path / "modules.json").exists() else _NO_RECIPE
    except UnsupportedModelError as error:
        return str(error)


def _from_metadata(checkpoint: GGUFCheckpoint) -> EmbeddingRecipe | str:
    name = checkpoint.metadata.get("general.architecture")
    number = checkpoint.metadata.get(f"{name}.pooling_type")
    if number is None:
        return NO_EMBEDDING_MODEL
    kind = _GGUF_KINDS[number] if isinstance(number, int) and 0 <= number < len(_GGUF_KINDS) else str(number)
    if kind not in _MODES:
        return f"{name}.pooling_type is {kind}, which is not supported: only mean, cls and last are"
    return EmbeddingRecipe(pooling=_MODES[kind], normalized=True)


def _from_modules(path: Path) -> EmbeddingRecipe:
    pooling: PoolingKind | None = None
    dense: list[DenseLayer] = []
    normalized = False
    for module in modules_in(path):
        kind, folder = str(module.get("type", "")).rpartition(".")[2], path / str(module.get("path", ""))
        if not folder.resolve().is_relative_to(path.resolve()):
            raise CheckpointError(f"{path / 'modules.json'} names a folder outside the model: {module.get('path')!r}")
        if kind == "Transformer" and pooling is None:
            continue
        if kind == "Pooling" and pooling is None:
            pooling = _pooling(folder)
        elif kind == "Dense" and pooling is not None and not normalized:
            dense.append(_dense(folder))
        elif kind == "Normalize" and pooling is not None:
            normalized = True
        else:
            raise UnsupportedModelError(f"modules.json has a module {kind!r} at this place, which is not supported")
    if pooling is None:
        raise UnsupportedModelError("modules.json names no Pooling: the model makes no vectors of texts")
    settings = read_json_if_there(path / "config_sentence_transformers.json")
    prompts = settings.get("prompts") or {}
    return EmbeddingRecipe(
        pooling=pooling,
        dense=tuple(dense),
        normalized=normalized,
        prompts={name: text for name, text in prompts.items() if isinstance(text, str)},
        default_prompt=settings.get("default_prompt_name"),
        max_tokens=_limit(path),
    )


def modules_in(path: Path) -> list[dict[str, Any]]:
    """Read the list in modules.json. Raises `CheckpointError` for a corrupt file."""
    file = path / "modules.json"
    try:
        modules = json.loads(read_plain(file))
    except (OSError, ValueError, RecursionError):
        raise CheckpointError(f"{file} cannot be read: download or copy it again") from None
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise CheckpointError(f"{file} holds no list of modules")
    return modules


def _pooling(folder: Path) -> PoolingKind:
    config = read_json(folder / "config.json")
    modes = config.get("pooling_mode") or [mode for key, mode in _OLD_KEYS.items() if config.get(key)]
    found = [modes] if isinstance(modes, str) else list(modes)
    if len(found) != 1 or found[0] not in _MODES:
        raise UnsupportedModelError(
            f"{folder.name}/config.json: pooling {' and '.join(found) or '?'} is not supported: only {', '.join(_MODES)} are"
        )
    if config.get("include_prompt", True) is not True:
        raise UnsupportedModelError(f"{folder.name}/config.json: include_prompt = false is not supported")
    return _MODES[found[0]]


def _dense(folder: Path) -> DenseLayer:
    config = read_json(folder / "config.json")
    activation = str(config.get("activation_function", "Tanh")).rpartition(".")[2]
    if activation not in _ACTIVATIONS:
        raise UnsupportedModelError(
            f"{folder.name}/config.json: activation {activation} is not supported: only {', '.join(_ACTIVATIONS)} are"
        )
    for key in ("module_input_name", "module_output_name"):
        if config.get(key, "sentence_embedding") != "sentence_embedding":
            raise UnsupportedModelError(f"{folder.name}/config.json: {key} = {config[key]!r} is not supported")
    file = folder / "model.safetensors"
    if not file.exists():
        raise UnsupportedModelError(f"{folder.name} has no model.safetensors (pickled weights are never read)")
    with closing(SafetensorsFile(file)) as stored:
        weight, bias = (stored.read(name) if name in stored.tensors else None for name in ("linear.weight", "linear.bias"))
    expected = config.get("out_features"), config.get("in_features")
    if weight is None or weight.shape != expected or (bias is not None and bias.shape != expected[:1]):
        raise CheckpointError(f"{file} does not hold a product of the shape {list(expected)} that its config.json says")
    return DenseLayer(_plain(weight), None if bias is None else _plain(bias), activation)


def _plain(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32)).astype(np.float64)


def _limit(path: Path) -> int | None:
    limit = read_json_if_there(path / "sentence_bert_config.json").get("max_seq_length")
    return limit if isinstance(limit, int) and limit > 0 else None
