from __future__ import annotations

from pathlib import Path

import pytest
from support.formats.tiny_gguf import write_tiny_gguf
from support.models.checkpoints import GOLDEN, config_of, random_checkpoint
from support.models.tiny_directory import tiny_directory

from mlxinfer.convert import convert
from mlxinfer.loading.find.catalog import describe
from mlxinfer.loading.load import load


def test_what_is_loaded_is_what_the_headers_say(tmp_path: Path) -> None:
    loaded = load(tiny_directory(tmp_path / "tiny"))
    assert loaded.summary == describe(tmp_path / "tiny")
    summary = loaded.summary
    assert (summary.file_format, summary.architecture, summary.quantization) == ("safetensors", "llama", "F32")
    assert summary.nbytes == 4 * summary.parameters


def test_what_is_loaded_with_a_tower_is_what_the_headers_say() -> None:
    golden = Path(__file__).parents[1] / "golden" / "vision" / "smolvlm"
    loaded = load(golden, dtype="bfloat16")
    assert loaded.summary == describe(golden)
    assert loaded.summary.tower_bytes > 0
    assert loaded.summary.blind == ""


def test_quantized_files(tmp_path: Path) -> None:
    random_checkpoint(tmp_path / "plain", config_of("llama"))
    convert(tmp_path / "plain", tmp_path / "packed", bits=8, group_size=32)
    plain, packed = describe(tmp_path / "plain"), describe(tmp_path / "packed")
    assert packed.quantization == "Q8"
    assert packed.parameters == plain.parameters
    assert packed.nbytes < plain.nbytes / 2


def test_quantized_when_loaded(tmp_path: Path) -> None:
    summary = load(tiny_directory(tmp_path / "tiny"), bits=4, group_size=32).summary
    assert summary.quantization == "Q4"
    assert summary.nbytes == describe(tmp_path / "tiny").nbytes


def test_a_gguf_file(tmp_path: Path) -> None:
    summary = load(write_tiny_gguf(tmp_path / "tiny.gguf")).summary
    assert (summary.file_format, summary.architecture) == ("gguf", "llama")
    assert summary.quantization in ("Q8", "Q8_0")  # the same numbers in MLX's format, or as in the file
    assert summary.parameters == describe(tmp_path / "tiny.gguf").parameters


@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_5_text"])
def test_other_architectures(name: str) -> None:
    assert describe(GOLDEN / name).architecture == name


def test_a_gguf_file_says_what_mixture_it_is() -> None:
    assert describe(GOLDEN.parent / "gguf" / "llama.gguf").quantization == "F32"
