"""Recipes for vectors of texts come from GGUF's metadata or the hub's files, and survive a conversion."""

from __future__ import annotations

import shutil
from fnmatch import fnmatch
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlxinfer import LLM
from mlxinfer.convert.write.sidecars import copy_sidecars, sidecars
from mlxinfer.errors import CheckpointError, UnsupportedModelError
from mlxinfer.loading.find.hub import _UNWANTED, _WANTED
from mlxinfer.models.decoder import Decoder
from tests.support.formats.tiny_gguf import write_tiny_gguf
from tests.support.oracles.plain_step import PlainCache

GOLDEN = Path(__file__).parent.parent / "golden" / "embeddings"


def states_of(llm: LLM, ids: list[int]) -> np.ndarray:
    """float32 `[T, hidden]` after the last norm, computed without the engine."""
    model = llm.loaded.model
    assert isinstance(model, Decoder)
    hidden = model.hidden(mx.array(ids, mx.int32), PlainCache(model.layers).step([(0, len(ids))], {0: len(ids)}))
    return np.array(model.normed(hidden).astype(mx.float32))


@pytest.mark.parametrize(("number", "kind"), [(1, "mean"), (2, "first"), (3, "last")])
def test_the_pooling_type_of_a_gguf_file(tmp_path: Path, number: int, kind: str) -> None:
    """Compare with the same file's own states, pooled here; the tokenizer adds its end token."""
    more = {"llama.pooling_type": number, "tokenizer.ggml.add_eos_token": True}
    with LLM(write_tiny_gguf(tmp_path / "tiny.gguf", more=more), dtype="float32") as llm:
        recipe = llm.loaded.embedding
        assert not isinstance(recipe, str)
        assert (recipe.pooling, recipe.normalized) == (kind, True)
        ids = llm.tokenizer.encode("hello!")
        assert ids[-1] == 1
        states = states_of(llm, ids)
        pooled = {"mean": states.mean(0), "first": states[0], "last": states[-1]}[kind]
        np.testing.assert_allclose(llm.embed(["bye", "hello!"])[1], pooled / np.linalg.norm(pooled), atol=1e-4)


@pytest.mark.parametrize(("number", "says"), [(0, "is none"), (4, "is rank"), (9, "is 9")])
def test_other_pooling_types_are_refused_by_name(tmp_path: Path, number: int, says: str) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", more={"llama.pooling_type": number})
    with LLM(path) as llm, pytest.raises(UnsupportedModelError, match=f"llama.pooling_type {says}"):
        llm.embed("x")


def test_a_gguf_file_without_pooling_is_refused(tmp_path: Path) -> None:
    refused = pytest.raises(UnsupportedModelError, match=r"^tiny is not an embedding model\.$")
    with LLM(write_tiny_gguf(tmp_path / "tiny.gguf")) as llm, refused:
        llm.embed("x")


def test_the_hub_is_asked_for_the_folders_of_a_recipe() -> None:
    names = ["modules.json", "1_Pooling/config.json", "2_Dense/model.safetensors", "2_Dense/pytorch_model.bin", "onnx/model.safetensors"]
    kept = [name for name in names if any(fnmatch(name, w) for w in _WANTED) and not any(fnmatch(name, u) for u in _UNWANTED)]
    assert kept == names[:3]


def test_a_conversion_keeps_the_recipe(tmp_path: Path) -> None:
    target = tmp_path / "copy"
    target.mkdir()
    files, left = sidecars(GOLDEN / "mean")
    copied = copy_sidecars(files, GOLDEN / "mean", target)
    assert {"modules.json", "1_Pooling/config.json", "2_Dense/model.safetensors", "config_sentence_transformers.json"} <= set(copied)
    assert not {name for name in left if name[0].isdigit()}
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(GOLDEN / "mean" / name, target / name)
    with LLM(GOLDEN / "mean") as original, LLM(target) as copy:
        np.testing.assert_array_equal(copy.embed("cat"), original.embed("cat"))


def test_a_product_after_pooling_that_is_cut_says_so(tmp_path: Path) -> None:
    source = next(path.parent.parent for path in sorted(GOLDEN.glob("*/2_Dense/model.safetensors")))
    shutil.copytree(source, tmp_path / "cut")
    weights = tmp_path / "cut/2_Dense/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match="2_Dense"):
        LLM(tmp_path / "cut")
