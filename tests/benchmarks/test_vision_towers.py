"""The benchmark of vision towers: random towers, mmproj files and the table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import mlx.core as mx
import pytest
from click.testing import CliRunner

from benchmarks.__main__ import main
from benchmarks.vision.command import table
from benchmarks.vision.mmproj import write_mmproj
from benchmarks.vision.towers import CASES, Case, random_tower
from benchmarks.vision.worker import TowerWorker
from mlxinfer.nn.packing import settle

_SIDES = {"smolvlm-256m": 64, "qwen3-vl-2b": 64, "gemma3-4b": 56}
_SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}


def small(name: str) -> Case:
    """Return a case with the same graph and few numbers."""
    case, side = CASES[name], _SIDES[name]
    vision, config = dict(case.vision), dict(case.config)
    vision |= {key: value for key, value in _SMALL.items() if key in vision}
    if "image_size" in vision:
        vision["image_size"] = side
    else:
        vision |= {"depth": 2, "num_heads": 2, "out_hidden_size": 24, "deepstack_visual_indexes": [1]}
    if "mm_tokens_per_image" in config:
        config["mm_tokens_per_image"] = 4
    return replace(case, config=config | {"text_config": {"hidden_size": 24}, "vision_config": vision}, side=side)


@pytest.mark.parametrize(("name", "rows"), [("smolvlm-256m", 1), ("qwen3-vl-2b", 4), ("gemma3-4b", 4)])
def test_random_towers_encode_their_pixels(name: str, rows: int) -> None:
    case = small(name)
    tower, _ = random_tower(case, mx.bfloat16)
    settle(tower)
    features = tower.features(case.pixels(), [(case.side, case.side)]).features
    assert features.shape == (rows, 24)
    assert 0.01 < float(mx.abs(features).mean()) < 10


@pytest.mark.parametrize("name", list(CASES))
def test_mmproj_files_have_every_tensor(name: str, tmp_path: Path) -> None:
    case = small(name)
    write_mmproj(tmp_path / "mmproj.gguf", case)
    tensors = gguf.GGUFReader(tmp_path / "mmproj.gguf").tensors
    _, weights = random_tower(case, mx.float16)
    assert sum(int(tensor.n_elements) for tensor in tensors) == sum(tensor.size for tensor in weights.asked.values())
    assert {tensor.name.split(".")[0] for tensor in tensors} == {"v", "mm"}


def test_operations_of_a_tile() -> None:
    """12 layers of 1024 rows: products with 12 * 768^2 weights, and 2 * 1024 * 768 multiplications of each row in attention."""
    assert CASES["smolvlm-256m"].operations() == 12 * 1024 * 2 * (12 * 768**2 + 2 * 1024 * 768)


def test_the_table_has_medians_of_each_engine() -> None:
    text = table({"smolvlm-256m": {"mlxinfer": [(1.0, 2.0), (3.0, 2.5), (2.0, 2.1)], "llama.cpp": [(4.0, 8.0)]}})
    assert "| mlxinfer | 2.00 [1.00, 3.00] | 2.10 | 101 |" in text
    assert "| llama.cpp | 4.00 [4.00, 4.00] | 8.00 | 27 |" in text


def test_llama_cpp_needs_its_program() -> None:
    done = CliRunner().invoke(main, ["vision", "--engines", "llama.cpp"])
    assert done.exit_code == 2
    assert "--clip" in done.output


def test_a_worker_encodes_an_image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CASES, "tiny", small("smolvlm-256m"))
    worker = TowerWorker()
    assert worker.load("tiny") == {}
    assert worker.encode()["seconds"] > 0
