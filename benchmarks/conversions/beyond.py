"""What formats could hold that MLX does not have: Q4_K's blocks with codes by error feedback, and a trellis code, emulated."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import mlx.core as mx
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import Q4_K

from mlxinfer.convert.calibrate.blockwise import Place, read_through
from mlxinfer.convert.calibrate.products import add_gram, to_numpy
from mlxinfer.convert.encode.gptq import Factor, encode, factorize
from mlxinfer.loading.directory import SafetensorsCheckpoint
from mlxinfer.models.blockwise import batches
from mlxinfer.nn.weights import Format, numbers

from ..ggml_quantizers import quantize
from .source import samples

_ABOVE_BOUND = 1.12
"""How much more a trellis code of 16 bits of state loses than the least that is possible for Gaussian numbers (QTIP, arXiv:2406.11235)."""


class _Sums:
    """H of one place."""

    def __init__(self) -> None:
        self.sums: np.ndarray | None = None
        self.count = 0

    def add(self, x: mx.array, experts: mx.array | None, expert_count: int, held_out: bool) -> None:
        rows = x.reshape(-1, x.shape[-1])
        self.sums = np.zeros((x.shape[-1],) * 2, np.float32) if self.sums is None else self.sums
        add_gram(self.sums, rows)
        self.count += rows.shape[0]


class _Keeper:
    """Writes them to a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.places = folder, dict[str, str]()

    def place(self, names: list[str]) -> _Sums:
        return _Sums()

    def done(self, places: list[tuple[list[str], Place]]) -> None:
        for names, place in places:
            assert isinstance(place, _Sums)
            assert place.sums is not None
            np.save(self.folder / f"{names[0]}.npy", place.sums / place.count)
            self.places.update(dict.fromkeys(names, names[0]))


def keep_hessians(model: Path) -> Path:
    """The mean of `x x^T` of every matrix's inputs while the source reads its samples, in a folder next to it."""
    kept = model.with_name(f"{model.name}.hessians")
    if not kept.exists():
        made = kept.with_suffix(".making")
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir()
        keeper = _Keeper(made)
        with closing(SafetensorsCheckpoint(model)) as checkpoint:
            read_through(checkpoint, batches(samples(model)), keeper)
        (made / "places.json").write_text(json.dumps(keeper.places), encoding="utf-8")
        made.rename(kept)
    return kept


def q4_k_by_feedback(source: Path, target: Path) -> float:
    """llama.cpp's Q4_K with an importance matrix, its codes found again by error feedback. Returns its bits per weight."""
    size, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType.Q4_K]

    def rounded(plain: np.ndarray, hessian: np.ndarray, factor: Factor) -> np.ndarray:
        columns = int(np.lcm(plain.shape[1], size))
        weighing = np.tile(hessian.diagonal(), columns // plain.shape[1])
        scales, biases = _scales_of_q4_k(quantize(plain, "Q4_K", columns, weighing), plain.shape)
        start = mx.zeros(plain.shape, mx.uint8), mx.array(scales), mx.array(biases)
        codes = to_numpy(encode(mx.array(plain), Format(4, 32), factor, start)[0])
        return np.asarray(codes * np.repeat(scales, 32, -1) + np.repeat(biases, 32, -1))

    return _written(source, target, rounded, nbytes * 8 / size)


def _scales_of_q4_k(blocks: np.ndarray, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Scales and biases of groups of 32, float32 `[rows, in / 32]`, of blocks uint8 `[blocks, 144]`: 6 bits each, of two 16-bit floats."""
    both = blocks[:, :4].copy().view("<f2").astype(np.float32)
    scales, biases = Q4_K.get_scale_min(blocks[:, 4:16].copy())
    groups = (shape[0], shape[1] // 32)
    return (scales * both[:, :1]).reshape(groups), (biases * -both[:, 1:]).reshape(groups)


def emulated_trellis(bits: float) -> Callable[[Path, Path], float]:
    """As EXL3 and QTIP do it, without the code itself: inputs are rotated, and errors fed back, of columns that lose as much as a trellis
    code of so many bits does, drawn at random."""

    def rounded(plain: np.ndarray, hessian: np.ndarray, factor: Factor) -> np.ndarray:
        rng = np.random.default_rng(plain.shape[1])
        turn = np.linalg.qr(rng.normal(size=hessian.shape))[0]
        turned = factorize((turn.T @ hessian @ turn).astype(np.float32), "a rotated matrix")
        upper = np.triu(turned.upper, 1) + np.eye(len(turned.order))
        deviations = np.sqrt(_ABOVE_BOUND * 4.0**-bits * np.square(plain).mean(-1))
        steps = (
            rng.normal(size=plain.shape) * deviations[:, None]
        )  # what each column is rounded by, once those before it have been fed back
        errors = np.linalg.solve(upper.T, steps.T).T
        return np.asarray(plain + errors @ turn.T[turned.order], np.float32)

    return lambda source, target: _written(source, target, rounded, bits)


def _written(source: Path, target: Path, rounded: Callable[[np.ndarray, np.ndarray, Factor], np.ndarray], bits: float) -> float:
    """A copy of the source in which every matrix of the layers has been rounded."""
    kept = keep_hessians(source)
    places, tensors, factors = json.loads((kept / "places.json").read_text(encoding="utf-8")), {}, dict[str, Factor]()
    with closing(SafetensorsCheckpoint(source)) as checkpoint:
        for name in checkpoint.names():
            plain = np.array(numbers(checkpoint.read(name)), np.float32)
            if plain.ndim == 2 and ".layers." in name:
                hessian = np.load(kept / f"{places[name]}.npy")
                if places[name] not in factors:
                    factors = {places[name]: factorize(hessian, name)}
                plain = rounded(plain, hessian, factors[places[name]])
            tensors[name] = mx.array(plain)
        config = checkpoint.config
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors*"))
    mx.save_safetensors(str(target / "model.safetensors"), tensors, {"format": "mlx"})
    (target / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return bits
