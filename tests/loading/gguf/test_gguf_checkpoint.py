from __future__ import annotations

from pathlib import Path

import gguf
import mlx.core as mx
import numpy as np
import pytest

from mlxinfer.errors import MLXInferError
from mlxinfer.loading.checkpoint import Checkpoint
from mlxinfer.loading.find.resolve import ALIASES
from mlxinfer.loading.gguf import GGUFCheckpoint
from mlxinfer.loading.gguf.families import FAMILIES, find_architecture
from mlxinfer.loading.gguf.reader import GGUFFile
from mlxinfer.models import build
from mlxinfer.models.config_reader import IGNORED_KEYS
from mlxinfer.nn.weights import Quantized, map_rows
from tests.support.formats.gguf_golden import rewritten
from tests.support.models.plain_weights import PlainWeights
from tests.support.oracles.plain_step import PlainCache

GOLDEN = Path(__file__).parents[2] / "golden" / "gguf"
NAMES = sorted(path.stem for path in GOLDEN.glob("*.gguf"))
TOLERANCE = 2e-4
ROWS = 2048
"""Rows that are compared of real vocabularies."""


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_files_of_llama_cpps_converter_give_the_logits_of_transformers(name: str) -> None:
    checkpoint: Checkpoint = GGUFCheckpoint(GOLDEN / f"{name}.gguf")
    weights = PlainWeights({name: checkpoint.read(name) for name in checkpoint.names()})
    model = build(checkpoint.config, weights)
    checkpoint.close()
    reference = np.load(GOLDEN / f"{name}.npz")
    ids = mx.array(reference["ids"])
    logits = model.logits(model.hidden(ids, PlainCache(model.layers).step([(0, ids.size)])))
    assert np.abs(np.array(logits) - reference["logits"]).max() < TOLERANCE
    assert set(weights.tensors) == weights.used


def test_there_is_a_file_for_every_architecture() -> None:
    assert {*FAMILIES, *(kind for name in FAMILIES for kind in find_architecture(name).tables)} <= set(NAMES)


@pytest.mark.smoke
@pytest.mark.parametrize("name", ["llama", "qwen3next"])
def test_a_cut_file_is_refused_when_it_is_opened(tmp_path: Path, name: str) -> None:
    whole = (GOLDEN / f"{name}.gguf").read_bytes()
    path = tmp_path / "x.gguf"
    for size in [0, 3, 4, 10, *range(24, len(whole) - 32, len(whole) // 150)]:
        path.write_bytes(whole[:size])
        with pytest.raises(MLXInferError, match=r"^[^\n]+$"):
            GGUFCheckpoint(path)


def test_metadata_for_the_tokenizer() -> None:
    metadata = GGUFCheckpoint(str(GOLDEN / "qwen2.gguf")).metadata
    assert metadata["tokenizer.ggml.tokens"][:3] == ["!", '"', "#"]
    assert metadata["tokenizer.ggml.token_type"].tolist() == [1] * 96
    assert metadata["tokenizer.ggml.bos_token_id"] == 1


def test_bytes_add_up_to_the_file() -> None:
    path = GOLDEN / "qwen35.gguf"
    checkpoint = GGUFCheckpoint(path)
    total = sum(checkpoint.nbytes(name) for name in checkpoint.names())
    header = gguf.GGUFReader(path).data_offset
    assert 0.99 * (path.stat().st_size - header) < total <= path.stat().st_size - header


def _source_rows(name: str, rows: np.ndarray, heads: dict[str, int]) -> np.ndarray:
    """Undo the rotation of llama's q and k by index arithmetic, row by row."""
    for part, count in heads.items():
        if part in name:
            half = len(rows) // count // 2
            order = [head * 2 * half + 2 * i + s for head in range(count) for s in range(2) for i in range(half)]
            return rows[order]
    return rows


@pytest.fixture(params=["smollm2", "gemma3-270m"])
def real(request: pytest.FixtureRequest) -> tuple[str, Path]:
    path = ALIASES[request.param].find()
    if path is None:
        pytest.skip(f"{request.param} is not installed")
    return request.param, path


@pytest.mark.model(computes=False)
def test_numbers_of_a_real_file_are_those_of_the_gguf_package(real: tuple[str, Path]) -> None:
    model, path = real
    checkpoint = GGUFCheckpoint(path)
    heads = {"attn_q.": 9, "attn_k.": 3} if model == "smollm2" else {}
    shift = 1 if model == "gemma3-270m" else 0
    places = {checkpoint._tensors[name].sources[0]: name for name in checkpoint.names()}
    file = GGUFFile(path)
    assert file.tensors.keys() == places.keys()
    for tensor in file.tensors.values():
        if not tensor.name.startswith(("blk.0.", "blk.7.", "output", "token_embd")):
            continue
        stored = gguf.quants.dequantize(next(file.pieces(tensor, ROWS)), gguf.GGMLQuantizationType(tensor.type.id))
        expected = _source_rows(tensor.name, stored.reshape(-1, *tensor.shape[1:]), heads)
        matrix = map_rows(checkpoint.read(places[tensor.name]), lambda rows: rows[:ROWS])
        ours = np.array(matrix.dequantize(mx.float32) if isinstance(matrix, Quantized) else matrix.weight)
        expected = expected - np.float32(shift) if "norm" in tensor.name else expected
        assert ours.dtype == np.float32
        assert np.array_equal(ours, expected), tensor.name


@pytest.mark.parametrize("name", ["llama.attention.secret", "attention.secret"])
def test_a_key_that_is_ignored_is_read_as_if_the_file_did_not_have_it(name: str, tmp_path: Path) -> None:
    path = rewritten("llama", tmp_path / "x.gguf", {"attention.secret": 1})
    with pytest.raises(MLXInferError, match=r"--ignore-config-key llama\.attention\.secret"):
        GGUFCheckpoint(path)
    checkpoint = GGUFCheckpoint(path, ignore_config_keys={name, "llama.not_there"})
    assert checkpoint.ignored_keys == ("llama.attention.secret",)
    golden = GGUFCheckpoint(GOLDEN / "llama.gguf")
    assert checkpoint.config.pop(IGNORED_KEYS) == ["llama.attention.secret"]
    assert checkpoint.config.items() <= golden.config.items()
    checkpoint.close()
    golden.close()
