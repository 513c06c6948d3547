"""Golden GGUF files written again with other keys and tensors, and what the model in a file computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlxinfer.loading.gguf import GGUFCheckpoint
from mlxinfer.loading.gguf.files import GGUFFiles
from mlxinfer.models import build
from mlxinfer.nn.weights import numbers
from tests.support.formats.gguf_file import Tensor, Typed, array_tensor, write
from tests.support.models.plain_weights import PlainWeights
from tests.support.oracles.plain_step import PlainCache

GOLDEN = Path(__file__).parents[2] / "golden" / "gguf"

Arrays = dict[str, np.ndarray]


def golden(name: str) -> tuple[str, dict[str, Any], Arrays]:
    """The architecture of a golden file, its hyperparameters without the architecture's name, and its tensors."""
    files = GGUFFiles(GOLDEN / f"{name}.gguf")
    architecture = files.metadata["general.architecture"]
    prefix = f"{architecture}."
    hyper = {key.removeprefix(prefix): value for key, value in files.metadata.items() if key.startswith(prefix)}
    arrays = {tensor: np.array(numbers(files.read(tensor))) for tensor in files.tensors}
    files.close()
    return architecture, hyper, arrays


def write_model(
    path: Path,
    architecture: str,
    hyper: Mapping[str, Any],
    arrays: Arrays,
    others: Mapping[str, Any] | None = None,
    tensors: list[Tensor] | None = None,
) -> Path:
    """A file with these hyperparameters and tensors. None leaves a key out; `others` is further metadata, `tensors` further tensors."""
    metadata = (
        {"general.architecture": architecture} | {f"{architecture}.{key}": value for key, value in hyper.items()} | dict(others or {})
    )
    written = [array_tensor(tensor, values) for tensor, values in arrays.items()] + (tensors or [])
    return write(path, {key: _plain(value) for key, value in metadata.items() if value is not None}, written)


def rewritten(name: str, path: Path, changes: Mapping[str, Any], edit: Callable[[Arrays], object] | None = None) -> Path:
    """A golden file with other hyperparameters (None leaves one out) and with tensors that `edit` changed in place."""
    architecture, hyper, arrays = golden(name)
    if edit:
        edit(arrays)
    return write_model(path, architecture, hyper | dict(changes), arrays)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return Typed("array", value.tolist(), of="bool" if value.dtype == bool else "i32")
    return value


def reference(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Token ids and the logits that transformers computes for them from the checkpoint of a golden file."""
    data = np.load(GOLDEN / f"{name}.npz")
    return data["ids"], data["logits"]


def logits(path: Path, ids: np.ndarray) -> np.ndarray:
    """The logits of all tokens, from a file whose tensors are all used."""
    checkpoint = GGUFCheckpoint(path)
    weights = PlainWeights({tensor: checkpoint.read(tensor) for tensor in checkpoint.names()})
    model = build(checkpoint.config, weights)
    checkpoint.close()
    assert set(weights.tensors) == weights.used
    return np.array(model.logits(model.hidden(mx.array(ids), PlainCache(model.layers).step([(0, ids.size)]))))
