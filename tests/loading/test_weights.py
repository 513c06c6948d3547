from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from support.processes.active_memory import active_memory

from mlxinfer.errors import WeightsError
from mlxinfer.loading.directory import SafetensorsCheckpoint
from mlxinfer.loading.formats import loses_precision
from mlxinfer.loading.weights import CheckpointWeights, MetaWeights, is_finite
from mlxinfer.nn.weights import Dense, Format, Quantized, Recipe, stack

FOUR = Format(4, 32)


def open_checkpoint(directory: Path, tensors: dict[str, mx.array], **config: object) -> SafetensorsCheckpoint:
    mx.save_safetensors(str(directory / "model.safetensors"), tensors)
    (directory / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    return SafetensorsCheckpoint(directory)


def both(checkpoint: SafetensorsCheckpoint) -> list[CheckpointWeights | MetaWeights]:
    return [CheckpointWeights(checkpoint, mx.float32), MetaWeights(checkpoint)]


def problems(weights: CheckpointWeights | MetaWeights) -> str:
    with pytest.raises(WeightsError) as caught:
        weights.finish()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def experts(count: int) -> Recipe:
    return Recipe(tuple(f"e{i}" for i in range(count)), ((2, 32),) * count, stack)


def test_everything_asked_for_and_nothing_else(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tmp_path, {"m": mx.ones((2, 32), mx.bfloat16), "v": mx.ones(3)})
    for weights in both(checkpoint):
        assert weights.matrix("m", (2, 32)).shape == (2, 32)
        assert weights.vector("v", (3,)).dtype == mx.float32
        weights.finish()


def test_every_problem_is_listed_by_name(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tmp_path, {"m": mx.ones((2, 32)), "i": mx.ones((2,), mx.int32), "extra": mx.ones(1)})
    for weights in both(checkpoint):
        weights.matrix("m", (4, 32))
        weights.vector("gone", (3,))
        weights.vector("i", (2,))
        message = problems(weights)
        assert "m has shape [2, 32], expected [4, 32]" in message
        assert "gone is missing" in message
        assert "i is stored as int32" in message
        assert "extra is unexpected" in message
        assert str(tmp_path) in message


def test_long_lists_are_shortened(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tmp_path, {f"t{i}": mx.ones(1) for i in range(40)})
    message = problems(CheckpointWeights(checkpoint, mx.float32))
    assert "and 28 more" in message


def test_a_recipe_makes_what_is_absent(tmp_path: Path) -> None:
    tensors = {f"e{i}": mx.full((2, 32), i) for i in range(3)}
    checkpoint = open_checkpoint(tmp_path, tensors)
    loaded, planned = both(checkpoint)
    for weights in (loaded, planned):
        matrix = weights.matrix("all", (3, 2, 32), otherwise=[experts(3)])
        weights.finish()
    assert matrix.shape == (3, 2, 32)
    loaded_matrix = CheckpointWeights(checkpoint, mx.float32).matrix("all", (3, 2, 32), otherwise=[experts(3)])
    assert mx.array_equal(loaded_matrix.weight, mx.stack(list(tensors.values()))).item()
    assert planned.tensors["all"].request.sources == ("e0", "e1", "e2")


def test_a_missing_source_of_a_recipe_is_named(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tmp_path, {"e0": mx.ones((2, 32)), "e2": mx.ones((2, 16))})
    for weights in both(checkpoint):
        weights.matrix("all", (3, 2, 32), otherwise=[experts(3)])
        message = problems(weights)
        assert "e1 is missing" in message
        assert "e2 has shape [2, 16], expected [2, 32]" in message
        assert "unexpected" not in message


def test_the_tensor_itself_goes_before_a_recipe_from_others(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tmp_path, {"all": mx.zeros((1, 2, 32)), "e0": mx.ones((2, 32))})
    weights = CheckpointWeights(checkpoint, mx.float32)
    assert not mx.any(weights.matrix("all", (1, 2, 32), otherwise=[experts(1)]).weight).item()
    assert "e0 is unexpected" in problems(weights)


def test_a_recipe_that_reads_the_tensor_itself_goes_first(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tmp_path, {"v": mx.ones(3), "conv": mx.ones((4, 1, 2))})
    weights = CheckpointWeights(checkpoint, mx.float32)
    plus_one = Recipe(("v",), ((3,),), lambda sources: Dense(sources[0].weight + 1))
    moved = Recipe(("conv",), ((4, 1, 2),), lambda sources: Dense(mx.swapaxes(sources[0].weight, 1, 2)))
    assert weights.vector("v", (3,), otherwise=[plus_one]).tolist() == [2, 2, 2]
    assert weights.vector("conv", (4, 2, 1), otherwise=[moved]).shape == (4, 2, 1)
    weights.finish()


def test_recipes_that_fail(tmp_path: Path) -> None:
    packed = mx.quantize(mx.ones((2, 32)), 32, 4)
    tensors = {"e0.weight": packed[0], "e0.scales": packed[1], "e0.biases": packed[2], "e1.weight": mx.ones((2, 32))}
    checkpoint = open_checkpoint(tmp_path, tensors, quantization={"bits": 4, "group_size": 32})
    mixed = Recipe(("e0.weight", "e1.weight"), ((2, 32), (2, 32)), stack)
    wrong = Recipe(("e0.weight", "e1.weight"), ((2, 32), (2, 32)), lambda sources: sources[1])
    for weights in both(checkpoint):
        weights.matrix("mixed", (2, 2, 32), otherwise=[mixed])
        weights.matrix("wrong", (2, 2, 32), otherwise=[wrong])
        message = problems(weights)
        assert "mixed cannot be made" in message
        assert "wrong, made from e0.weight, has shape [2, 32], expected [2, 2, 32]" in message


def test_a_quantized_vector_is_a_problem(tmp_path: Path) -> None:
    packed = mx.quantize(mx.ones((2, 32)), 32, 4)
    tensors = {"v.weight": packed[0], "v.scales": packed[1], "v.biases": packed[2]}
    checkpoint = open_checkpoint(tmp_path, tensors, quantization={"bits": 4, "group_size": 32})
    for weights in both(checkpoint):
        weights.vector("v.weight", (2, 32))
        assert "v.weight is quantized" in problems(weights)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_nan_and_infinity_are_found_wherever_they_are(tmp_path: Path, value: float, dtype: mx.Dtype) -> None:
    array = mx.ones((5, 7), dtype)
    array[3, 5] = value
    weights = CheckpointWeights(open_checkpoint(tmp_path, {"m": array}), mx.float32)
    weights.matrix("m", (5, 7))
    assert "m holds NaN or infinite values" in problems(weights)


@pytest.mark.parametrize(("form", "nan"), [(FOUR, None), (Format(8, 32, "mxfp8"), 0xFF), (Format(4, 16, "nvfp4"), 0xFF)])
def test_nan_in_scales(form: Format, nan: int | None) -> None:
    parts = list(mx.quantize(mx.random.normal((2, 32)), form.group_size, form.bits, form.mode))
    biases = parts[2] if len(parts) > 2 else None
    assert is_finite(Quantized(parts[0], parts[1], biases, form))
    parts[1][1, 0] = float("nan") if nan is None else nan
    assert not is_finite(Quantized(parts[0], parts[1], biases, form))


def test_heads_and_tables_that_nobody_needs_are_skipped_with_a_reason(tmp_path: Path) -> None:
    names = ["model.layers.0.self_attn.rotary_emb.inv_freq", "lm_head.weight", "mtp.fc.weight", "model.layers.2.x", "model.visual.patch"]
    tensors = {name: mx.ones(1) for name in names}
    weights = MetaWeights(open_checkpoint(tmp_path, tensors, num_hidden_layers=2, num_nextn_predict_layers=1))
    weights.finish()
    assert weights.skipped.keys() == set(names)
    assert all(weights.skipped.values())


def test_dtypes(tmp_path: Path) -> None:
    packed = mx.quantize(mx.ones((2, 32), mx.float16), 32, 4)
    tensors = {
        "q.weight": packed[0],
        "q.scales": packed[1],
        "q.biases": packed[2],
        "v": mx.ones(2, mx.float32),
        "b": mx.ones(2, mx.bfloat16),
    }
    checkpoint = open_checkpoint(tmp_path, tensors, quantization={"bits": 4, "group_size": 32})
    weights = CheckpointWeights(checkpoint, mx.bfloat16)
    matrix = weights.matrix("q.weight", (2, 32))
    assert isinstance(matrix, Quantized)
    assert matrix.scales.dtype == mx.bfloat16
    assert weights.vector("v", (2,), dtype=mx.float32).dtype == mx.float32
    assert weights.vector("b", (2,)).dtype == mx.bfloat16
    assert weights.rounded == {"q.weight": "float16"}


def test_precision() -> None:
    assert loses_precision(mx.float32, mx.bfloat16)
    assert loses_precision(mx.float16, mx.bfloat16)
    assert loses_precision(mx.bfloat16, mx.float16)
    assert not loses_precision(mx.bfloat16, mx.float32)
    assert not loses_precision(mx.uint8, mx.float16)


def test_quantizing_on_the_way(tmp_path: Path) -> None:
    tensors = {
        "m": mx.array(np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)),
        "odd": mx.ones((4, 40)),
        "router": mx.ones((4, 64)),
    }
    weights = CheckpointWeights(open_checkpoint(tmp_path, tensors), mx.float32, quantize=FOUR)
    matrix = weights.matrix("m", (4, 64))
    assert isinstance(matrix, Quantized)
    assert matrix.format == FOUR
    assert mx.max(mx.abs(matrix.dequantize(mx.float32) - tensors["m"])).item() < mx.max(mx.abs(matrix.scales)).item()
    assert isinstance(weights.matrix("odd", (4, 40)), Dense)
    assert isinstance(weights.matrix("router", (4, 64), quantizable=False), Dense)


def test_progress_counts_every_byte(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    checkpoint = open_checkpoint(tmp_path, {"m": mx.ones((2, 32)), "v": mx.ones(3)})
    weights = CheckpointWeights(checkpoint, mx.float32, progress=lambda done, total: told.append((done, total)))
    weights.matrix("m", (2, 32))
    weights.vector("v", (3,))
    assert told == [(256, 268), (268, 268)]


def test_planning_allocates_nothing(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tmp_path, {"m": mx.ones((256, 1024))})
    before = active_memory()
    planned = MetaWeights(checkpoint)
    kept = [planned.matrix("m", (256, 1024)) for _ in range(50)]
    assert active_memory() - before < 1 << 20
    assert len(kept) == 50
