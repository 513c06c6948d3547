"""Whatever of an adapter would not be applied is an error that names it, and so is every file that cannot be read."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from support.engines.tiny_engine import tiny_model
from support.formats.gguf_file import array_tensor
from support.models.adapters import Changes, random_changes, shapes_of, write_gguf_adapter, write_mlx_lm, write_peft
from support.models.tiny_directory import tiny_directory

from mlxinfer import LLM
from mlxinfer.adapters.adapted_model import AdaptedModel
from mlxinfer.adapters.files import open_adapter
from mlxinfer.errors import AdapterError, MLXInferError, UnsupportedModelError

Q0 = "model.layers.0.self_attn.q_proj"
NEW = np.ones((4, 16), np.float32)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return tiny_directory(tmp_path_factory.mktemp("base") / "llama")


@pytest.fixture(scope="module")
def changes(base) -> Changes:
    return random_changes(shapes_of(base), projections=["q_proj", "v_proj"])


def refused(base: Path, adapter: Path) -> str:
    """Return the error text for an adapter, which comes before weights are read where possible."""
    config = json.loads((base / "config.json").read_text())
    with pytest.raises(MLXInferError) as error:
        AdaptedModel(tiny_model(), [open_adapter("it", adapter, config)], mx.float32)
    message = str(error.value)
    assert "\n" not in message
    assert str(adapter.parent) in message
    return message


def with_tensors(path: Path, file: str, more: dict[str, np.ndarray], without: str = "") -> Path:
    tensors = {name: tensor for name, tensor in mx.load(str(path / file)).items() if not without or not name.endswith(without)}
    mx.save_safetensors(str(path / file), tensors | {name: mx.array(value) for name, value in more.items()})
    return path


with_peft = partial(with_tensors, file="adapter_model.safetensors")
PEFT = "base_model.model.model."


@pytest.mark.parametrize(
    ("tensor", "why"),
    [
        ("embed_tokens.lora_embedding_A", "for the embedding"),
        ("layers.0.self_attn.q_proj.bias", "a bias"),
        ("layers.0.mlp.experts.1.up_proj.lora_A.weight", "for experts"),
        ("layers.0.mlp.switch_mlp.up_proj.lora_A.weight", "for experts"),
        ("embed_tokens.modules_to_save.weight", r"replaces one of the model's"),
        ("layers.0.self_attn.q_proj.lora_magnitude_vector", "a magnitude"),
        ("layers.0.input_layernorm.weight", "no part of a low-rank update"),
        ("layers.7.self_attn.q_proj.lora_A.weight", "layer 7, which the model does not have"),
        ("layers.0.block_sparse_moe.gate.lora_A.weight", "for no projection of attention or of a feed-forward layer"),
        ("vision_tower.encoder.layers.0.self_attn.q_proj.lora_A.weight", "for the vision tower"),
    ],
)
def test_tensors_that_would_not_be_applied(base, changes, tmp_path, tensor, why):
    more = {PEFT + tensor: NEW} | ({PEFT + tensor.replace("lora_A", "lora_B"): NEW.T} if "lora_A" in tensor else {})
    path = with_peft(write_peft(tmp_path / "a", changes, target_modules=".*"), more=more)
    message = refused(base, path)
    assert f"{PEFT + tensor!r}" in message
    assert "would not be applied" in message
    assert why in message


def test_the_head_is_refused(base, changes, tmp_path):
    more = {"base_model.model.lm_head.lora_A.weight": NEW, "base_model.model.lm_head.lora_B.weight": np.ones((96, 4), np.float32)}
    path = with_peft(write_peft(tmp_path / "a", changes, target_modules=".*"), more=more)
    assert "'base_model.model.lm_head.lora_A.weight' is for the output head" in refused(base, path)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"target_modules": ["v_proj"]}, "q_proj.lora_A.weight' is for a module that is not among target_modules"),
        ({"layers_to_transform": [1]}, "layers.0.self_attn.q_proj.lora_A.weight' is for a layer that is not among layers_to_transform"),
        ({"r": 5}, "has rank 4, and adapter_config.json says 5"),
        ({"rank_pattern": {"q_proj": 2}}, "has rank 4, and adapter_config.json says 2"),
        ({"rank_pattern": 3}, "rank_pattern is 3"),
        ({"rank_pattern": {"(": 2}}, "the pattern ( is no regular expression: a bracket is not closed: write the names of its modules"),
        ({"alpha_pattern": {r"(a)\1": 2}}, r"the pattern (a)\1 has an escape that is not understood"),
        ({"use_dora": True}, "has no lora_magnitude_vector"),
        ({"peft_type": "LOHA"}, "only LORA is understood"),
        ({"bias": "all"}, "biases of adapters are not applied"),
        ({"modules_to_save": ["lm_head"]}, "whole modules"),
        ({"lora_bias": True}, "biases of its own"),
        ({"init_lora_weights": "pissa"}, "changes the model's matrices too"),
        ({"alora_invocation_tokens": [1]}, "aLoRA"),
        ({"target_parameters": ["experts"]}, "stacked experts"),
        ({"use_something_new": True}, "it is not understood"),
        ({"lora_alpha": "8"}, "lora_alpha is '8'"),
        ({"lora_alpha": None}, "lora_alpha"),
        ({"r": 0}, "r is 0"),
    ],
)
def test_configs_of_peft(base, changes, tmp_path, config, why):
    assert why in refused(base, write_peft(tmp_path / "a", changes, **config))


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"fine_tune_type": "full"}, "only lora and dora"),
        ({"lora_parameters": {"rank": 4}}, "scale is missing"),
        ({"lora_parameters": {"rank": 3, "scale": 1.0}}, "has rank 4, and adapter_config.json says 3"),
        ({"lora_parameters": None}, "lora_parameters"),
        ({"fine_tune_type": "dora"}, "has no m"),
        ({"num_layers": 1}, "is for layer 0, and adapter_config.json says that layers from 2 on"),
        ({"lora_parameters": {"rank": 4, "scale": 1.0, "keys": ["self_attn.v_proj"]}}, "not among the keys"),
    ],
)
def test_configs_of_mlx_lm(base, changes, tmp_path, config, why):
    assert why in refused(base, write_mlx_lm(tmp_path / "a", changes, **config))


def test_tensors_of_mlx_lm(base, changes, tmp_path):
    path = with_tensors(write_mlx_lm(tmp_path / "a", changes), "adapters.safetensors", {f"{Q0}.m": np.ones(16, np.float32)})
    assert f"{Q0}.m" in refused(base, path)
    experts = {"model.layers.0.mlp.switch_mlp.up_proj.lora_a": np.ones((2, 4, 8), np.float32)}
    path = with_tensors(write_mlx_lm(tmp_path / "b", changes), "adapters.safetensors", experts)
    assert "switch_mlp" in refused(base, path)


def test_configs_and_tensors_of_gguf(base, changes, tmp_path):
    write = partial(write_gguf_adapter, tmp_path / "a.gguf")
    assert "general.type is 'model'" in refused(base, write(changes, **{"general.type": "model"}))
    assert "architecture 'nothing'" in refused(base, write(changes, **{"general.architecture": "nothing"}))
    assert "only lora" in refused(base, write(changes, **{"adapter.type": "ia3"}))
    assert "aLoRA" in refused(base, write(changes, **{"adapter.alora.invocation_tokens": "1"}))
    assert "'output_norm.weight'" in refused(base, write(changes, extra=[array_tensor("output_norm.weight", NEW[0])]))
    assert "only one of lora_a and lora_b" in refused(base, write(changes, extra=[array_tensor("blk.0.ffn_up.weight.lora_a", NEW)]))
    pair = [array_tensor(f"token_embd.weight.lora_{part}", NEW) for part in "ab"]
    assert "is for the embedding" in refused(base, write(changes, extra=pair))
    pair = [array_tensor("output.weight.lora_a", NEW), array_tensor("output.weight.lora_b", np.ones((96, 4)))]
    assert "output.weight.lora_a" in refused(base, write(changes, extra=pair))
    pair = [array_tensor("blk.9.attn_q.weight.lora_a", NEW), array_tensor("blk.9.attn_q.weight.lora_b", NEW.T)]
    assert "layer 9" in refused(base, write(changes, extra=pair))


def _shaped(change: Changes, a: tuple[int, ...], b: tuple[int, ...]) -> Changes:
    return change | {Q0: replace(change[Q0], a=np.ones(a, np.float32), b=np.ones(b, np.float32))}


@pytest.mark.parametrize(
    ("a", "b", "why"),
    [
        ((4, 16), (16, 3), "are [4, 16] and [16, 3], expected [rank, in] and [out, rank]"),
        ((4, 47), (48, 4), "belongs to a matrix of [48, 47], and the model's has [48, 48]: the adapter is for another model"),
        ((4, 48), (49, 4), "belongs to a matrix of [49, 48]"),
        ((2, 4, 16), (2, 16, 4), "stacked matrices are for experts"),
    ],
)
def test_shapes(base, changes, tmp_path, a, b, why):
    assert why in refused(base, write_peft(tmp_path / "a", _shaped(changes, a, b)))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_numbers_that_are_none(base, changes, tmp_path, value):
    broken = replace(changes[Q0], b=np.full_like(changes[Q0].b, value))
    assert f"{PEFT[len('base_model.model.') :]}" in refused(base, write_peft(tmp_path / "a", changes | {Q0: broken}))
    assert "NaN or infinite" in refused(base, write_gguf_adapter(tmp_path / "a.gguf", changes | {Q0: broken}))


def test_halves_are_missing(base, changes, tmp_path):
    assert f"{PEFT}layers.0.self_attn.q_proj".removeprefix("base_model.model.") in refused(
        base, with_peft(write_peft(tmp_path / "a", changes), more={}, without="q_proj.lora_B.weight")
    )
    assert "has no lora_b" in refused(
        base, with_tensors(write_mlx_lm(tmp_path / "b", changes), "adapters.safetensors", {}, "q_proj.lora_b")
    )


def test_what_is_no_adapter(base, changes, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.txt").write_text("no")
    pickled = write_peft(tmp_path / "pickled", changes)
    (pickled / "adapter_model.safetensors").rename(pickled / "adapter_model.bin")
    bare = write_peft(tmp_path / "bare", changes)
    (bare / "adapter_config.json").unlink()
    assert "no adapter at" in refused(base, tmp_path / "nothing")
    assert "neither adapter_model.safetensors nor adapters.safetensors" in refused(base, tmp_path / "empty")
    assert "adapter_model.bin is not read: it can run code" in refused(base, pickled)
    assert "has no adapter_config.json" in refused(base, bare)
    assert "is no adapter" in refused(base, tmp_path / "file.txt")
    nothing = with_tensors(write_peft(tmp_path / "nothing_in_it", changes), "adapter_model.safetensors", {}, "t")
    assert "has no tensors" in refused(base, nothing)


@pytest.mark.parametrize("write", [write_peft, write_mlx_lm, write_gguf_adapter])
def test_cut_and_damaged_files(base, changes, tmp_path, write: Callable[..., Path]):
    path = write(tmp_path / "a.gguf", changes)
    weights = path if path.is_file() else next(path.glob("*.safetensors"))
    whole, rng = weights.read_bytes(), np.random.default_rng(0)
    for length in [0, 3, 8, *(int(n) for n in rng.integers(9, len(whole) - 1, 12))]:
        weights.write_bytes(whole[:length])
        refused(base, path)
    for _ in range(60):
        damaged = bytearray(whole)
        damaged[int(rng.integers(0, 400))] ^= 1 << int(rng.integers(0, 8))
        weights.write_bytes(damaged)
        config = json.loads((base / "config.json").read_text())
        with suppress(MLXInferError):  # anything else is a fault of ours
            open_adapter("it", path, config).close()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"r": 4, "r"'])
def test_configs_that_are_no_json(base, changes, tmp_path, text):
    path = write_peft(tmp_path / "a", changes)
    (path / "adapter_config.json").write_text(text)
    assert "adapter_config.json" in refused(base, path)


def test_a_model_that_runs_on_mlx_lms_graph(changes, tmp_path):
    adapter = open_adapter("it", write_peft(tmp_path / "a", changes), {"num_hidden_layers": 2})

    class Borrowed:
        blocks = ()

    with pytest.raises(UnsupportedModelError, match="this model runs on mlx-lm's"):
        AdaptedModel(Borrowed(), [adapter], mx.float32)  # type: ignore[arg-type]


def test_loading_says_it_too(base, changes, tmp_path):
    path = write_peft(tmp_path / "a", changes, r=5)
    with pytest.raises(AdapterError, match="has rank 4"):
        LLM(base, memory_gb=2, adapters={"x": path})
