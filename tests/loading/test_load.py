from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from support.formats.tiny_gguf import write_tiny_gguf
from support.models.checkpoints import GOLDEN, config_of, grow, random_checkpoint
from support.models.tiny_directory import tiny_directory
from support.oracles.plain_step import PlainCache
from support.processes.peak_rss import peak_rss

from mlxinfer.cache.kv_format import KVFormat
from mlxinfer.convert import convert
from mlxinfer.errors import (
    CheckpointError,
    MemoryPlanError,
    MLXInferError,
    ModelNotFoundError,
    TokenizerError,
    UnsupportedModelError,
    WeightsError,
)
from mlxinfer.kernels_cpu import Packed
from mlxinfer.loading.load import LoadedModel, load
from mlxinfer.nn.packing import arrays
from mlxinfer.nn.weights import Quantized
from mlxinfer.util.device import default_dtype


def logits(loaded: LoadedModel, ids: np.ndarray) -> np.ndarray:
    step = PlainCache(loaded.model.layers).step([(0, len(ids))])
    return np.array(loaded.model.logits(loaded.model.hidden(mx.array(ids.astype(np.int32)), step)))


@pytest.mark.parametrize("name", sorted(p.name for p in GOLDEN.iterdir()))
def test_every_golden_checkpoint(name: str) -> None:
    reference = np.load(GOLDEN / name / "reference.npz")
    assert np.abs(logits(load(GOLDEN / name, dtype="float32"), reference["ids"]) - reference["logits"]).max() < 1e-3


@pytest.mark.smoke
def test_what_is_loaded(tmp_path: Path) -> None:
    directory = tiny_directory(tmp_path / "tiny")
    (directory / "generation_config.json").write_text('{"temperature": 0.5}')
    told: list[tuple[int, int]] = []
    loaded = load(str(directory), dtype="float32", progress=lambda done, total: told.append((done, total)))
    assert (loaded.name, loaded.path) == ("tiny", directory)
    assert loaded.config["model_type"] == "llama"
    assert loaded.generation_config == {"temperature": 0.5}
    assert loaded.weight_bytes == sum(array.nbytes for array in arrays(loaded.model))
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("Hello")) == "Hello"
    assert loaded.notes == ()
    assert told[-1][0] == told[-1][1]


@pytest.mark.parametrize(("asked", "dtype"), [("float32", mx.float32), ("bf16", mx.bfloat16), (mx.float16, mx.float16)])
def test_the_compute_dtype(asked: str | mx.Dtype, dtype: mx.Dtype) -> None:
    loaded = load(GOLDEN / "llama", dtype=asked)
    assert loaded.dtype == dtype
    assert loaded.model.norm.weight.dtype == dtype  # type: ignore[attr-defined]
    rounded = any("rounded from float32" in note for note in loaded.notes)
    assert rounded == (dtype != mx.float32)


def test_quantized_while_loading(tmp_path: Path) -> None:
    directory = random_checkpoint(tmp_path / "m", config_of("llama"))
    plain, packed = load(directory, dtype="float32"), load(directory, dtype="float32", bits=8, group_size=32)
    assert packed.weight_bytes < plain.weight_bytes / 2
    assert isinstance(packed.model.embedding.matrix, (Quantized, Packed))  # type: ignore[attr-defined]
    ids = np.arange(3, 40)
    assert np.abs(logits(plain, ids) - logits(packed, ids)).max() < 1


def test_a_converted_directory_gives_the_logits_of_its_source(tmp_path: Path) -> None:
    directory = random_checkpoint(tmp_path / "m", config_of("qwen3_moe"))
    convert(directory, tmp_path / "out")
    ids = np.arange(3, 40)
    assert np.array_equal(logits(load(directory), ids), logits(load(tmp_path / "out"), ids))


def test_without_a_tokenizer_token_ids_work() -> None:
    loaded = load(GOLDEN / "llama")
    assert any("no tokenizer" in note for note in loaded.notes)
    assert loaded.tokenizer.eos_token_ids == {2}
    assert loaded.tokenizer.decode([5, 6]) == ""
    assert loaded.tokenizer.detokenizer().add(5) == ""
    for call in (lambda: loaded.tokenizer.encode("x"), lambda: loaded.tokenizer.encode_chat([])):
        with pytest.raises(TokenizerError, match="no tokenizer files"):
            call()


ZOO = {
    "starcoder2": {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
                   "norm_epsilon": 1e-5, "vocab_size": 64, "rope_theta": 1e4, "tie_word_embeddings": True},
    "stablelm": {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
                 "norm_eps": 1e-5, "layer_norm_eps": 1e-5, "vocab_size": 64, "rope_theta": 1e4, "rope_pct": 0.25, "qk_layernorm": False,
                 "use_qkv_bias": True, "partial_rotary_factor": 0.5, "max_position_embeddings": 128},
}  # fmt: skip


def zoo_checkpoint(directory: Path, name: str) -> Any:
    """Random weights for one of mlx-lm's models. Returns that model."""
    from mlx_lm.utils import _get_classes

    config = {"model_type": name, **ZOO[name]}
    model_class, arguments = _get_classes(config)
    model = model_class(arguments.from_dict(config))
    mx.eval(model.parameters())
    directory.mkdir()
    mx.save_safetensors(str(directory / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (directory / "config.json").write_text(json.dumps(config))
    return model


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(ZOO))
def test_architectures_of_mlx_lm(tmp_path: Path, name: str) -> None:
    model = zoo_checkpoint(tmp_path / "m", name)
    loaded = load(tmp_path / "m", dtype="float32")
    assert any("mlx-lm" in note for note in loaded.notes)
    ids = np.arange(3, 30)
    assert np.abs(logits(loaded, ids) - np.array(model(mx.array(ids)[None])[0])).max() < 1e-5
    with pytest.raises(UnsupportedModelError, match=r"mlx_lm\.convert"):
        load(tmp_path / "m", bits=4)


class TestRefusals:
    @staticmethod
    def refused(source: str | Path, kind: type[MLXInferError], **options: Any) -> str:
        with pytest.raises(kind) as caught:
            load(source, **options)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    @staticmethod
    def edited(directory: Path, **changes: Any) -> Path:
        tiny_directory(directory)
        path = directory / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
        return directory

    def test_no_such_path(self, tmp_path: Path) -> None:
        self.refused(tmp_path / "nothing", ModelNotFoundError)

    def test_no_config(self, tmp_path: Path) -> None:
        assert "config.json" in self.refused(tmp_path, ModelNotFoundError)

    @pytest.mark.parametrize("model_type", ["telepathy", "../llama", "os", None, 3, ["llama"], ""])
    def test_an_unknown_architecture(self, tmp_path: Path, model_type: object) -> None:
        self.refused(self.edited(tmp_path / "m", model_type=model_type), UnsupportedModelError)

    def test_a_key_that_changes_the_maths(self, tmp_path: Path) -> None:
        assert "wormhole" in self.refused(self.edited(tmp_path / "m", wormhole=1.5), UnsupportedModelError)

    @pytest.mark.parametrize("name", sorted(ZOO))
    def test_a_quantized_cache_is_refused_where_mlx_lm_keeps_it(self, tmp_path: Path, name: str) -> None:
        zoo_checkpoint(tmp_path / "m", name)
        assert "mlx-lm's cache" in self.refused(tmp_path / "m", UnsupportedModelError, kv=KVFormat(4, 4))
        assert load(tmp_path / "m", kv=KVFormat()).model.layers

    @pytest.mark.parametrize("name", sorted(ZOO))
    def test_borrowed_weights_are_checked_too(self, tmp_path: Path, name: str) -> None:
        zoo_checkpoint(tmp_path / "m", name)
        file = tmp_path / "m" / "model.safetensors"
        tensors = dict(mx.load(str(file)))
        mx.eval(list(tensors.values()))
        first = sorted(tensors)[0]
        mx.save_safetensors(str(file), {**tensors, first: mx.full(tensors[first].shape, float("nan"))})
        assert f"{first} holds NaN" in self.refused(tmp_path / "m", WeightsError)
        mx.save_safetensors(str(file), {k: v for k, v in tensors.items() if k != first} | {"odd": mx.ones(1)})
        message = self.refused(tmp_path / "m", WeightsError)
        assert f"{first} is missing" in message
        assert "odd is unexpected" in message

    @pytest.mark.parametrize("cut", [0.0, 0.0001, 0.01, 0.5, 0.999])
    def test_a_cut_file(self, tmp_path: Path, cut: float) -> None:
        file = tiny_directory(tmp_path / "m") / "model.safetensors"
        data = file.read_bytes()
        file.write_bytes(data[: int(len(data) * cut)])
        self.refused(tmp_path / "m", CheckpointError)

    def test_a_broken_tokenizer_is_found_before_the_weights_are_read(self, tmp_path: Path) -> None:
        directory = tiny_directory(tmp_path / "m")
        (directory / "tokenizer.json").write_text("{")
        told: list[int] = []
        self.refused(directory, TokenizerError, progress=lambda done, total: told.append(done))
        assert told == []

    def test_a_bad_dtype_and_bad_bits(self) -> None:
        self.refused(GOLDEN / "llama", UnsupportedModelError, dtype="int4")
        self.refused(GOLDEN / "llama", UnsupportedModelError, bits=7)

    def test_bits_for_what_is_quantized_already(self, tmp_path: Path) -> None:
        assert "is quantized already (8-bit affine" in self.refused(write_tiny_gguf(tmp_path / "m.gguf"), UnsupportedModelError, bits=4)

    def test_a_model_larger_than_memory(self, tmp_path: Path) -> None:
        """A file with holes has any size; none of it is read."""
        rows = 1 << 28
        config = config_of("llama", vocab_size=rows, tie_word_embeddings=True, num_hidden_layers=1, hidden_size=512, num_attention_heads=8)
        directory = tmp_path / "m"
        small = config | {"vocab_size": 8}
        random_checkpoint(directory, small)
        file = directory / "model.safetensors"
        grow(file, "model.embed_tokens.weight", (rows, 512))
        (directory / "config.json").write_text(json.dumps(config))
        message = self.refused(directory, MemoryPlanError)
        assert f"(weights {275 * default_dtype().size // 2}, " in message
        assert file.stat().st_blocks * 512 < 1 << 24


@pytest.mark.model(computes=False)
@pytest.mark.parametrize(("name", "least"), [("smollm2", 80e6), ("gemma3-270m", 240e6)])
def test_loading_peaks_near_the_weights(name: str, least: float) -> None:
    script = "from mlxinfer.loading.load import load\nprint(load(sys.argv[1]).weight_bytes)"
    peak, printed = peak_rss(script, name)
    weights = int(printed)
    assert least < weights < peak < weights + 300e6
