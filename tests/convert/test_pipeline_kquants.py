"""Conversions of GGUF block types: kept codes, wider formats, and refusals of results that would grow."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from support.formats.tiny_kquants import write_tiny_kquants
from support.oracles.plain_step import PlainCache

from mlxinfer.convert import Report, convert
from mlxinfer.errors import ConversionError
from mlxinfer.loading.directory import SafetensorsCheckpoint
from mlxinfer.loading.gguf import GGUFCheckpoint
from mlxinfer.loading.load import load
from mlxinfer.nn.weights import Format, Quantized, numbers

Q4_K, Q6_K = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.down_proj.weight"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_tiny_kquants(tmp_path / "k.gguf")


def formats(directory: Path) -> dict[str, object]:
    stored = SafetensorsCheckpoint(directory)
    return {name: stored.stored(name) for name in (Q4_K, Q6_K)}


def logits(path: Path) -> np.ndarray:
    model, ids = load(path, dtype="float32").model, mx.arange(3, 40)
    return np.array(model.logits(model.hidden(ids, PlainCache(model.layers).step([(0, ids.size)]))))


def error(report: Report, name: str) -> float:
    return next(tensor.error for tensor in report.tensors if tensor.name == name)


@pytest.mark.parametrize("bits", [None, 3])
def test_a_text_is_read_only_where_something_is_quantized(source: Path, tmp_path: Path, bits: int | None) -> None:
    read: list[int] = []
    convert(source, tmp_path / "out", bits=bits, group_size=32 if bits else None, measure=False, weighing=lambda done, _: read.append(done))
    assert bool(read) == (bits is not None)


def test_a_k_quant_keeps_its_codes(source: Path, tmp_path: Path) -> None:
    report = convert(source, tmp_path / "out", measure=False)
    assert formats(tmp_path / "out") == {Q4_K: Format(4, 32), Q6_K: Format(8, 32)}
    assert report.nbytes < 1.25 * report.source_nbytes
    assert 0 < error(report, Q4_K) < 2e-3
    assert 1e-3 < error(report, Q6_K) < 1e-2
    assert any("12 matrices of Q4_K, written as 4-bit affine in groups of 32: the same codes" in note for note in report.notes)
    assert any("3 matrices of Q6_K, written as 8-bit affine in groups of 32, as MLX has no groups of 16" in note for note in report.notes)
    packed = GGUFCheckpoint(source)
    packed.pack({"Q4_K"})
    written, codes = SafetensorsCheckpoint(tmp_path / "out").read(Q4_K), packed.read(Q4_K)
    assert isinstance(written, Quantized)
    assert isinstance(codes, Quantized)
    assert written.scales.dtype == mx.float16
    assert mx.array_equal(written.weight, codes.weight)
    expected, found = logits(source), logits(tmp_path / "out")
    assert np.abs(found - expected).max() < 0.05 * np.abs(expected).max()


def test_more_bits_than_are_stored_change_nothing(source: Path, tmp_path: Path) -> None:
    report = convert(source, tmp_path / "out", bits=8, measure=False)
    assert formats(tmp_path / "out") == {Q4_K: Format(4, 32), Q6_K: Format(8, 64)}
    assert error(report, Q4_K) < 2e-3


@pytest.mark.long
def test_fewer_bits_quantize_again_and_say_so(source: Path, tmp_path: Path) -> None:
    report = convert(source, tmp_path / "out", bits=4, measure=False)
    assert formats(tmp_path / "out") == {Q4_K: Format(4, 32), Q6_K: Format(4, 64)}
    assert "3 matrices requantized, which loses more than quantizing once: from Q6_K" in report.notes
    report = convert(source, tmp_path / "two", bits=2, measure=False)
    assert set(formats(tmp_path / "two").values()) == {Format(2, 64)}
    assert report.actions["requantized"] == 15


def test_a_dtype_unpacks(source: Path, tmp_path: Path) -> None:
    report = convert(source, tmp_path / "out", dtype="float32", measure=False)
    assert set(formats(tmp_path / "out").values()) == {mx.float32}
    assert report.nbytes > 5 * report.source_nbytes
    assert np.array_equal(
        np.array(numbers(SafetensorsCheckpoint(tmp_path / "out").read(Q6_K))), np.array(numbers(GGUFCheckpoint(source).read(Q6_K)))
    )


@pytest.mark.long
@pytest.mark.parametrize("kind", ["IQ3_XXS", "Q3_K", "IQ4_NL"])
def test_what_would_grow_manifold_is_refused_before_it_is_written(tmp_path: Path, kind: str) -> None:
    source = write_tiny_kquants(tmp_path / "k.gguf", lambda name, layer: kind)
    with pytest.raises(
        ConversionError, match=rf"formats that MLX does not have \({kind}\).* would become .*Give bits .* or dtype float16"
    ) as error:
        convert(source, tmp_path / "out")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()
    assert convert(source, tmp_path / "four", bits=4, measure=False).nbytes < 1.5 * source.stat().st_size
    assert convert(source, tmp_path / "plain", dtype="float16", measure=False).nbytes > 3 * source.stat().st_size


@pytest.mark.parametrize("kind", ["Q5_0", "Q5_1"])
def test_types_of_32_with_exact_scales_are_exact(tmp_path: Path, kind: str) -> None:
    source = write_tiny_kquants(tmp_path / "k.gguf", lambda name, layer: kind)
    report = convert(source, tmp_path / "out", measure=False)
    assert set(formats(tmp_path / "out").values()) == {Format(5, 32)}
    assert error(report, Q4_K) == 0
