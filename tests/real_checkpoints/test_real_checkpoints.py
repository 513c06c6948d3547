"""Popular published checkpoints: config, names, dtypes and shapes of all tensors, in files without data.

Configs are those of the repositories. Names and shapes are those that transformers 5.24 writes: its graphs on the meta device, renamed
by its own table. Publishers add draft heads, scales, MXFP4 blocks, and keys and values that no layer reads. Sums of bytes are those of
the published indices.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from support.models.sparse_checkpoints import tensors, write_sparse

from mlxinfer import kernels_cpu
from mlxinfer.cli.health.diagnosis import ModelDiagnosis, diagnose_model
from mlxinfer.errors import WeightsError
from mlxinfer.loading.load import meta_model, prepare
from mlxinfer.nn.weights import FLOAT8

DATA = Path(__file__).parent / "data"

TOWERS = r"files are not read: only the text model is used"
AUDIO = r"files are not read: audio is not understood"
HEADS = r"files are not read: head that predicts several tokens, not used"
ROWS = r"F8_E4M3, a scale for 128 x 128 become .* GB: the same codes, with a scale for each row"

CHECKPOINTS: dict[str, tuple[float, tuple[str, ...]]] = {
    "deepseek-v3": (688.57, (r"15.4 GB .* layer that predicts several tokens, not used", ROWS)),
    "devstral-2": (128.25, ()),
    "gemma-4-26b-a4b": (51.61, (TOWERS,)),
    "gemma-4-e4b": (15.99, (TOWERS, AUDIO, r"keys and values of layers that read those of an earlier layer")),
    "gpt-oss-20b": (13.76, ()),
    "kimi-linear": (98.25, ()),
    "lfm2.5-1.2b": (2.34, ()),
    "minimax-m2.5": (230.12, (ROWS,)),
    "nemotron-3-nano": (63.16, ()),
    "phi-4-mini": (7.67, ()),
    "qwen3-coder-30b-a3b": (61.06, ()),
    "qwen3.6-35b-a3b": (71.90, (HEADS, TOWERS)),
}
"""GB of all tensors, and lines of `doctor` about the difference to the weights in memory with the CPU kernels."""


MANY_TENSORS = ("deepseek-v3", "minimax-m2.5")


def written(target: Path, name: str) -> Path:
    return write_sparse(target / name, config(name), tensors((DATA / f"{name}.tensors").read_text(encoding="utf-8")))


def config(name: str) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))
    return read


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.long if name in MANY_TENSORS else ()) for name in CHECKPOINTS])
def test_the_plan_is_the_files_size_or_says_why_not(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, (file_gb, said) = written(tmp_path, name), CHECKPOINTS[name]
    stored = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    assert stored == pytest.approx(file_gb * 1e9, rel=2e-3)
    opened = meta_model(path)
    assert isinstance(opened.vision, str)
    assert ("preprocessor_config.json" in opened.vision) == (TOWERS in said)
    monkeypatch.setattr("mlxinfer.cli.health.diagnosis.meta_model", lambda model, **options: opened)
    found, planned = diagnose_model(str(path), "16", first16=False), opened.weight_bytes
    assert planned == pytest.approx(stored, rel=0.01) or found.sizes, f"{planned} of {stored}"
    lines = [line for line in text(found).splitlines() if line.startswith("weights: ")]
    assert len(lines) == len(found.sizes)
    if kernels_cpu.packs_float8():
        assert [pattern for pattern in said if not any(re.search(pattern, line) for line in lines)] == []
        assert len(lines) == len(said)
        assert planned < stored * 1.032


def text(found: ModelDiagnosis) -> str:
    return "\n".join(line for _, lines in found.sections() for line in lines)


@pytest.mark.parametrize(("name", "left"), [("qwen3.6-35b-a3b", 0), pytest.param("deepseek-v3", 2, marks=pytest.mark.long)])
def test_heads_that_predict_several_tokens_are_found(name: str, left: int, tmp_path: Path) -> None:
    path, text = written(tmp_path, name), config(name).get("text_config", config(name))
    with prepare(path, mtp=True) as drafting, prepare(path) as plain:
        assert drafting.weight_bytes > plain.weight_bytes
        unread = [change.stored for change in drafting.size_changes if "predicts several tokens" in change.reason]
    copies = left * text["vocab_size"] * text["hidden_size"] * 2  # of the embedding and of the output matrix
    assert sum(unread) == copies


def test_fp8_stays_at_its_bytes_for_the_cpu_kernels(tmp_path: Path) -> None:
    with prepare(written(tmp_path, "devstral-2")) as prepared:
        stored = prepared.checkpoint.stored("model.layers.0.mlp.up_proj.weight")
    assert stored == mx.float32 if not kernels_cpu.packs_float8() else getattr(stored, "mode", "") == FLOAT8


@pytest.mark.parametrize(
    ("name", "without", "problem"),
    [
        ("gemma-4-e4b", "model.language_model.layers.23.self_attn.k_proj.weight", "k_proj.weight is missing"),
        ("gpt-oss-20b", "model.layers.5.mlp.experts.down_proj_scales", "layers.5.mlp.experts.down_proj.* is missing"),
        ("kimi-linear", "model.layers.26.block_sparse_moe.experts.255.w3.weight", "experts.255.w3.weight is missing"),
    ],
)
def test_a_tensor_that_is_missing_is_named(name: str, without: str, problem: str, tmp_path: Path) -> None:
    entries = tensors((DATA / f"{name}.tensors").read_text(encoding="utf-8"))
    del entries[without]
    path = write_sparse(tmp_path / name, config(name), entries)
    with pytest.raises(WeightsError, match=problem), prepare(path):
        pass
