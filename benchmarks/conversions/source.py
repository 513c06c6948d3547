"""The models that are converted, made once: plain numbers off any lattice, and samples of their own to calibrate with."""

from __future__ import annotations

import json
from collections.abc import Collection
from contextlib import closing
from pathlib import Path

import mlx.core as mx
import numpy as np

from mlxinfer.convert import convert
from mlxinfer.convert.calibrate.texts import own_samples
from mlxinfer.loading.directory import SafetensorsCheckpoint
from mlxinfer.loading.load import load_tokenizer
from mlxinfer.nn.weights import Quantized, numbers
from mlxinfer.tokenizer.tokenizer import Tokenizer

PIECES, PIECE, LENGTH = 6, 8192, 256
"""Pieces of the model's own samples unless fewer are asked for, tokens of each, and of a text."""
_SEED = 0
_WRITER = "smollm2"
"""Whose samples the other models of a run read, as text: writing their own would take them longer than everything else."""


def source(name: str, path: Path, folder: Path) -> Path:
    """The model as a directory of float32 numbers.

    A file that is quantized already lies on a lattice of its own, which some settings hit by chance: so uniform noise is added within its
    cells first, which is what its quantization had removed. Rankings carry over to the original model; absolute figures need not. Gemma's
    file, of 5 and 8 bits, lies on none that 4-bit groups could hit, and is taken as it is.
    """
    found = folder / name
    if not (found / "config.json").exists():
        made = folder / f"{name}.making"
        convert(path, made, measure=False)
        _unpack(made, noise=not name.startswith("gemma"))
        made.rename(found)
    return found


def writer_of(name: str, names: Collection[str]) -> str:
    """The model of a run, among these `names`, that writes the samples of this one."""
    return _WRITER if _WRITER in names else name


def write_samples(model: Path, piece: int) -> None:
    """A piece of the texts that the source writes itself, or of those that SmolLM2 has written in the same folder; kept next to it."""
    kept = _piece(model, piece)
    if not kept.exists():
        theirs = _piece(model.with_name(_WRITER), piece)
        texts = _read_again(theirs, model) if theirs.exists() else own_samples(model, PIECE, length=LENGTH, seed=piece).texts
        made = kept.with_suffix(".making")
        made.write_text(json.dumps(texts), encoding="utf-8")
        made.rename(kept)


def _read_again(theirs: Path, model: Path) -> list[list[int]]:
    """The texts that another model has written, in this one's tokens, each after its token of beginning."""
    before, after = (_tokenizer(path) for path in (theirs.with_name(_WRITER), model))
    texts = [before.decode(ids) for ids in json.loads(theirs.read_text(encoding="utf-8"))]
    return [after.encode(text, add_special_tokens=True) for text in texts]


def _tokenizer(model: Path) -> Tokenizer:
    with closing(SafetensorsCheckpoint(model)) as checkpoint:
        return load_tokenizer(checkpoint)


def samples(model: Path, pieces: int = PIECES) -> list[list[int]]:
    """Texts to calibrate with, the same for every method: of so many pieces that have been written."""
    kept = [_piece(model, piece) for piece in range(written(model, pieces))]
    return [text for piece in kept for text in json.loads(piece.read_text(encoding="utf-8"))]


def written(model: Path, most: int = PIECES) -> int:
    """How many pieces there are, this many at most."""
    return next((piece for piece in range(most) if not _piece(model, piece).exists()), most)


def _piece(model: Path, piece: int) -> Path:
    return model.with_name(f"{model.name}.samples.{piece}.json")


def _unpack(directory: Path, *, noise: bool) -> None:
    """Make quantized matrices plain ones in float32."""
    rng = np.random.default_rng(_SEED)
    checkpoint = SafetensorsCheckpoint(directory)
    tensors = {}
    for name in checkpoint.names():
        matrix = checkpoint.read(name)
        plain = np.array(numbers(matrix))
        if noise and isinstance(matrix, Quantized):
            cells = np.repeat(np.abs(np.array(matrix.scales.astype(mx.float32))), matrix.format.group_size, axis=-1)
            plain += cells * (rng.random(plain.shape, dtype=np.float32) - 0.5)
        tensors[name] = mx.array(plain)
    config = {key: value for key, value in checkpoint.config.items() if not key.startswith("quantization")}
    checkpoint.close()
    for file in directory.glob("*.safetensors*"):
        file.unlink()
    mx.save_safetensors(str(directory / "model.safetensors"), tensors, {"format": "mlx"})
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
