"""Block types in MLX's formats have the same codes, and numbers as close to the file's as promised."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from support.formats.tiny_kquants import random_blocks

from mlxinfer.loading.gguf import kquants
from mlxinfer.loading.gguf.bitstream import squeeze, words
from mlxinfer.loading.gguf.files import marked_to_pack
from mlxinfer.loading.gguf.kquants import share
from mlxinfer.loading.gguf.mlx_formats import PACKINGS, SHARED
from mlxinfer.loading.gguf.reader import TensorInfo
from mlxinfer.loading.gguf.tensors import decode, stored, widened
from mlxinfer.loading.gguf.transforms import columns, joined_rows
from mlxinfer.loading.gguf.types import TENSOR_TYPES, TensorType
from mlxinfer.nn.weights import Format, Quantized, numbers

KINDS = {kind.name: kind for kind in TENSOR_TYPES.values()}
AFFINE = sorted(kind for kind, packing in PACKINGS.items() if packing.format.mode == "affine")
EXACT = sorted(kind for kind in AFFINE if not PACKINGS[kind].loss)
ROWS, COLUMNS = 7, 768


def info_of(kind: TensorType, *shape: int, name: str = "blk.0.ffn_up.weight") -> TensorInfo:
    return TensorInfo(name, shape, kind, 0, int(np.prod(shape)) // kind.block * kind.block_bytes)


def packed(kind: str, data: np.ndarray) -> Quantized:
    info = marked_to_pack(info_of(KINDS[kind], len(data), COLUMNS), PACKINGS.keys())
    matrix = decode(info, [data[:3], data[3:]])
    assert isinstance(matrix, Quantized)
    assert matrix.format == PACKINGS[kind].format == stored(info)
    return matrix


def halved(matrix: Quantized) -> np.ndarray:
    """The numbers with float16 scales, as stored."""
    kept = Quantized(matrix.weight, matrix.scales.astype(mx.float16), matrix.biases.astype(mx.float16), matrix.format)  # type: ignore[union-attr]
    return np.array(kept.dequantize(mx.float32))


def file_numbers(kind: str, data: np.ndarray) -> np.ndarray:
    return np.asarray(dequantize(data, GGMLQuantizationType[kind]))


def blocks(kind: str) -> np.ndarray:
    return random_blocks(kind, ROWS, COLUMNS, np.random.default_rng(0))


@pytest.mark.parametrize("bits", [3, 4, 5, 6, 8])
def test_codes_are_packed_as_mlx_packs_them(bits: int) -> None:
    codes = np.random.default_rng(bits).integers(0, 2**bits, (5, 3, 64), dtype=np.uint8)
    weight = mx.array(words(squeeze(codes, bits)))
    ones = mx.ones((5, 6))
    assert np.array_equal(np.array(mx.dequantize(weight, ones, mx.zeros_like(ones), 32, bits)).reshape(codes.shape), codes)


@pytest.mark.parametrize("name", ["Q2_K", "Q3_K", "Q5_K", "Q6_K"])
def test_k_quants_taken_apart_are_the_numbers_of_the_gguf_package(name: str) -> None:
    data = blocks(name)
    groups = getattr(kquants, name.lower())(data.reshape(ROWS, -1, KINDS[name].block_bytes))
    found = groups.scales[..., None] * groups.codes + groups.offsets[..., None]
    assert np.array_equal(found.reshape(ROWS, -1), file_numbers(name, data))


@pytest.mark.parametrize("kind", EXACT)
def test_types_without_a_loss_are_exact_with_scales_in_float16(kind: str) -> None:
    data = blocks(kind)
    assert np.array_equal(halved(packed(kind, data)), file_numbers(kind, data))


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K"])
def test_k_quants_with_groups_of_32_keep_their_codes(kind: str) -> None:
    data = blocks(kind)
    matrix, expected = packed(kind, data), file_numbers(kind, data)
    assert np.array_equal(np.array(numbers(matrix)), expected)  # before scales are rounded
    spread = np.repeat(np.abs(np.array(matrix.scales)) * 2**matrix.format.bits - np.array(matrix.biases), 32, axis=1)
    error = np.abs(halved(matrix) - expected)
    assert error.max() > 0
    assert (error <= 2.0**-11 * spread + 2.0**-24).all()


def test_iq4_xs_keeps_its_levels() -> None:
    data = blocks("IQ4_XS")
    matrix, expected = packed("IQ4_XS", data), file_numbers("IQ4_XS", data)
    scales = np.repeat(np.array(matrix.scales), 32, axis=1)
    levels = np.rint(halved(matrix) / np.where(scales == 0, 1, scales))
    assert set(np.unique(levels).tolist()) <= {-127, -104, -83, -65, -49, -35, -22, -10, 0, 1, 13, 25, 38, 53, 69, 89, 113}
    assert np.abs(halved(matrix) - expected).max() <= 2.0**-11 * np.abs(expected).max()


@pytest.mark.parametrize("kind", sorted(SHARED))
def test_two_groups_under_one_scale_lose_half_of_what_rounding_both_loses(kind: str) -> None:
    data = blocks(kind)
    expected, form = file_numbers(kind, data), PACKINGS[kind].format
    weight, scales, biases = mx.quantize(mx.array(expected), group_size=32, bits=form.bits)
    rounded = np.array(Quantized(weight, scales.astype(mx.float16), biases.astype(mx.float16), form).dequantize(mx.float32))

    def errors(found: np.ndarray) -> np.ndarray:
        return np.square((found - expected).reshape(-1, 32)).sum(axis=1)

    ours = errors(halved(packed(kind, data)))
    assert ours.sum() < 0.6 * errors(rounded).sum()
    halves = np.square((halved(packed(kind, data)) - expected).reshape(-1, 2, 16)).sum(axis=-1)
    assert np.mean(halves.min(axis=1) < 0.02 * halves.max(axis=1) + 1e-16) > 0.6  # most keep one half, except for float16


def test_groups_of_one_number_and_of_zeros_are_kept() -> None:
    groups = kquants.Groups(np.zeros((1, 4, 16), np.uint8), np.float32([[0, 0, 0.5, 0]]), np.float32([[0, 0, 0.25, 0.25]]))
    shared = share(groups, 8)
    found = shared.scales[..., None] * shared.codes + shared.offsets[..., None]
    assert np.array_equal(found.reshape(4, 16), np.repeat(np.float32([0, 0, 0.25, 0.25]), 16).reshape(4, 16))


def test_a_scale_that_is_no_number_stays_none() -> None:
    """The loader refuses such a scale: see `is_finite`."""
    for kind in AFFINE:
        data = blocks(kind)
        at = {"Q6_K": 208, "Q3_K": 108, "Q2_K": 80}.get(kind, 0)
        data[0, at : at + 2] = np.array([np.nan], "<f2").view(np.uint8)
        matrix = packed(kind, data)
        assert np.isnan(np.array(matrix.scales)).any() or np.isnan(np.array(matrix.biases)).any(), kind


def test_wider_codes_are_the_same_numbers() -> None:
    matrix = packed("Q4_K", blocks("Q4_K"))
    for bits in (5, 6, 8):
        wide = widened(matrix, bits)
        assert wide.format == Format(bits, 32)
        assert np.array_equal(np.array(numbers(wide)), np.array(numbers(matrix)))


@pytest.mark.parametrize(
    ("shape", "name", "stays"),
    [((8, 256), "blk.0.ffn_up.weight", True), ((2, 8, 256), "blk.0.ffn_up_exps.weight", False), ((8, 256), "blk.0.ffn_up.3.weight", False)],
    ids=["matrix", "experts", "one expert"],
)
def test_only_plain_matrices_stay_in_blocks(shape: tuple[int, ...], name: str, stays: bool) -> None:
    """Products of experts support MLX's formats only."""
    info = marked_to_pack(info_of(KINDS["Q6_K"], *shape, name=name), PACKINGS.keys(), {"Q6_K"})
    assert stored(info) == (Format(6, 16, "Q6_K") if stays else Format(8, 32))
    vector = marked_to_pack(info_of(KINDS["Q6_K"], 256), PACKINGS.keys(), {"Q6_K"})
    assert stored(vector) == mx.float32
    assert stored(marked_to_pack(info, {"Q4_K"})) == mx.float32  # not one of the kinds to pack


def test_reordered_columns_cannot_stay_in_blocks() -> None:
    """Blocks have 256 columns, groups 32: groups move in runs of 128."""
    data = blocks("Q6_K")
    info = marked_to_pack(info_of(KINDS["Q6_K"], ROWS, COLUMNS), PACKINGS.keys(), {"Q6_K"})
    mapped = columns(info, lambda runs: runs[:, ::-1], 128)
    assert (mapped.in_groups, mapped.stored) == (True, Format(8, 32))
    matrix = packed("Q6_K", data)
    expected = np.array(numbers(matrix)).reshape(ROWS, -1, 128)[:, ::-1].reshape(ROWS, -1)
    assert np.array_equal(np.array(numbers(mapped.make([matrix]))), expected)


def test_joined_matrices_of_two_types_have_the_wider_codes() -> None:
    infos = [marked_to_pack(info_of(KINDS[kind], ROWS, COLUMNS), PACKINGS.keys(), {"Q4_K", "Q6_K"}) for kind in ("Q4_K", "Q6_K")]
    parts = [packed(info.type.name, blocks(info.type.name)) for info in infos]
    mapped = joined_rows(infos, lambda rows: rows[::-1])
    assert (mapped.in_groups, mapped.stored) == (True, Format(8, 32))
    expected = np.concatenate([np.array(numbers(part)) for part in parts])[::-1]
    assert np.array_equal(np.array(numbers(mapped.make(list(parts)))), expected)
    same = joined_rows([infos[0], infos[0]], lambda rows: rows)
    assert (same.in_groups, same.stored) == (False, Format(4, 32, "Q4_K"))
