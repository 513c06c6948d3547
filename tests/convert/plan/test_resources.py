from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import pytest
from support.models.checkpoints import config_of, random_checkpoint
from support.processes.peak_rss import peak_rss

from mlxinfer.cli.convert import _announce
from mlxinfer.convert import convert
from mlxinfer.convert.calibrate.importance import measure
from mlxinfer.convert.encode import quantizer
from mlxinfer.convert.plan.resources import ConversionEstimate, pieces
from mlxinfer.convert.plan.weight_map import plan
from mlxinfer.convert.write import reader
from mlxinfer.errors import ConversionError
from mlxinfer.loading.directory import SafetensorsCheckpoint
from mlxinfer.loading.load import open_checkpoint
from mlxinfer.nn.weights import Format
from mlxinfer.util.device import default_dtype

WIDE: dict[str, Any] = {"num_hidden_layers": 1, "hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8, "head_dim": 64}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint(tmp_path_factory.mktemp("resources") / "source", config_of("llama", **WIDE), dtype=mx.bfloat16)


@pytest.mark.long
def test_an_estimate_comes_before_a_weight_is_written(source: Path, tmp_path: Path) -> None:
    said: list[ConversionEstimate] = []

    def note(estimate: ConversionEstimate) -> None:
        assert list(tmp_path.iterdir()) == []
        said.append(estimate)

    report = convert(source, tmp_path / "out", bits=4, measure=False, estimated=note)
    (estimate,) = said
    assert estimate.nbytes == report.nbytes
    assert estimate.bits_per_weight == pytest.approx(report.bits_per_weight)
    assert estimate.peak > 100e6


def test_less_memory_means_smaller_pieces_and_the_same_bytes(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    largest: list[int] = []
    original = quantizer.Quantizer.__call__

    def call(self: quantizer.Quantizer, block: Any) -> Any:
        largest.append(int(mx.array(block.shape).prod().item()))
        return original(self, block)

    monkeypatch.setattr(quantizer.Quantizer, "__call__", call)
    convert(source, tmp_path / "all", bits=4, measure=False, encoder="minmax")
    whole, largest = max(largest), []
    checkpoint = SafetensorsCheckpoint(source)
    planned = plan(checkpoint, Format(4, 64), True, None)
    sizes = pieces(checkpoint, planned, tokens=0, batch=0, max_memory=0.17)
    assert sizes.block < whole < reader.BLOCK
    largest.clear()
    monkeypatch.setattr(quantizer.Quantizer, "__call__", call)
    convert(source, tmp_path / "less", bits=4, measure=False, encoder="minmax", max_memory=0.17)
    assert (tmp_path / "all" / "model.safetensors").read_bytes() == (tmp_path / "less" / "model.safetensors").read_bytes()


def test_too_little_memory_is_refused_with_what_would_do(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match=r"0\.1 GB are too little for .*: give at least 0\.\d\d GB"):
        convert(source, tmp_path / "out", bits=4, max_memory=0.1)
    assert list(tmp_path.iterdir()) == []


def test_what_the_command_line_says(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("mlxinfer.cli.convert.tell", said.append)
    out = Path("models/out")
    _announce(ConversionEstimate(nbytes=10**7, peak=10**9, bits_per_weight=4.5), out)
    assert said == []
    _announce(ConversionEstimate(nbytes=10**9, peak=2 * 10**9, bits_per_weight=4.5), out)
    assert "GB of memory. out appears at the end" in said[0]
    assert "4.50 bits per weight" in said[0]


@pytest.mark.long
def test_the_peak_that_is_computed_holds(tmp_path: Path) -> None:
    """Converts a matrix of 67 MB within 0.2 GB."""
    wide = config_of("llama", **WIDE | {"vocab_size": 65536, "tie_word_embeddings": True})
    source = random_checkpoint(tmp_path / "source", wide, dtype=mx.bfloat16)
    script = (
        "from mlxinfer.convert import convert\nconvert(sys.argv[1], sys.argv[2], bits=4, measure=False, max_memory=0.2, encoder='minmax')"
    )
    peak, _ = peak_rss(script, str(source), str(tmp_path / "out"))
    assert peak < 0.2e9


def test_inputs_of_every_layer_are_counted_and_their_table_is_not_read_whole(tmp_path: Path) -> None:
    """Of Gemma 4's table for the layers, only the rows of the texts are read into memory."""
    config = config_of("gemma4_text_shared", vocab_size_per_layer_input=40_000, hidden_size_per_layer_input=64)
    with closing(open_checkpoint(random_checkpoint(tmp_path / "source", config))) as checkpoint:
        name = "model.embed_tokens_per_layer.weight"
        width, before = checkpoint.shape(name)[-1], mx.get_active_memory()
        with patch.object(reader, "BLOCK", 1 << 16):
            mx.reset_peak_memory()
            measure(checkpoint, [list(range(3, 90))])
        assert mx.get_peak_memory() - before < checkpoint.nbytes(name) / 8
        planned = plan(checkpoint, Format(8, 32), True, None)
        few, many = (pieces(checkpoint, planned, tokens=tokens, batch=64).peak for tokens in (1_000_000, 2_000_000))
        hidden = config["hidden_size"]
    assert many - few == 1_000_000 * (width + 2 * hidden) * default_dtype().size


def test_the_states_of_texts_are_as_wide_as_the_stream(tmp_path: Path) -> None:
    """The narrowest matrix, which may be an expert's, does not count."""
    config = config_of("qwen3_moe", moe_intermediate_size=32, hidden_size=256)
    with closing(open_checkpoint(random_checkpoint(tmp_path / "source", config))) as checkpoint:
        planned = plan(checkpoint, Format(8, 32), True, None)
        few, many = (pieces(checkpoint, planned, tokens=tokens, batch=64).peak for tokens in (1_000_000, 2_000_000))
    assert many - few == 1_000_000 * 2 * 256 * default_dtype().size
