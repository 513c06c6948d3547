"""Reading undoes the converter's reorderings, which are done here in numpy on rows that contain their own number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as Kind
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.processes.examples import examples

from mlxinfer.errors import CheckpointError, WeightsError
from mlxinfer.loading.gguf import GGUFCheckpoint
from mlxinfer.loading.gguf.mlx_formats import PACKINGS
from mlxinfer.nn.linear import Embedding
from mlxinfer.nn.packing import settle
from mlxinfer.nn.weights import Dense, Format, Quantized, RawBlocks, numbers
from tests.support.formats.gguf_file import Tensor, array_tensor, write

HIDDEN, HEADS, KV, DIM = 64, 4, 2, 32
KEYS, PER_KEY = 2, 3
VALUES = KEYS * PER_KEY
HYPER = {
    "block_count": 2,
    "embedding_length": HIDDEN,
    "context_length": 512,
    "attention.head_count": HEADS,
    "attention.head_count_kv": KV,
    "attention.key_length": DIM,
    "attention.value_length": DIM,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "feed_forward_length": 64,
}
DELTA = {
    "ssm.conv_kernel": 4,
    "ssm.state_size": 16,
    "ssm.group_count": KEYS,
    "ssm.time_step_rank": VALUES,
    "ssm.inner_size": VALUES * DIM,
    "attention.recurrent_layers": [True, False],
}
EXPERTS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32}
NEXT = DELTA | EXPERTS | {"expert_shared_feed_forward_length": 32}
PACKED = [Kind.F32, Kind.F16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0]


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def quantized(name: str, values: np.ndarray, kind: Kind) -> Tensor:
    return Tensor(name, values.shape, gguf.quants.quantize(values, kind).tobytes(), int(kind))


def exact(values: np.ndarray, kind: Kind) -> np.ndarray:
    return gguf.quants.dequantize(gguf.quants.quantize(values, kind).view(np.uint8), kind)


def checkpoint(path: Path, architecture: str, tensors: list[Tensor], hyper: dict[str, Any] | None = None) -> GGUFCheckpoint:
    metadata = {"general.architecture": architecture} | {f"{architecture}.{key}": value for key, value in (HYPER | (hyper or {})).items()}
    if architecture == "granite":
        metadata["granite.logit_scale"] = 1.0
    embedding = array_tensor("token_embd.weight", random(7, HIDDEN))
    return GGUFCheckpoint(write(path / "x.gguf", metadata, [embedding, array_tensor("output_norm.weight", np.ones(HIDDEN)), *tensors]))


def read(opened: GGUFCheckpoint, name: str) -> np.ndarray:
    """Read, and check that the announced shapes and forms are right. Checkpoints that pack for a GPU, or leave matrices in the file,
    must give the same numbers."""
    values = read_once(opened, name)
    packed = GGUFCheckpoint(opened.path)
    packed.pack(PACKINGS.keys())
    assert np.array_equal(read_once(packed, name), values, equal_nan=True)
    again = GGUFCheckpoint(opened.path, raw_blocks=True)
    assert np.array_equal(read_once(again, name), values, equal_nan=True)
    matrix = again.read(name)
    if isinstance(matrix, RawBlocks):
        embedding = Embedding(matrix, mx.float32)
        settle(embedding)
        rows = values.reshape(-1, values.shape[-1])
        assert values.ndim > 2 or np.array_equal(np.array(embedding(mx.arange(len(rows)))), rows)
    return values


def read_once(opened: GGUFCheckpoint, name: str) -> np.ndarray:
    matrix = opened.read(name)
    assert matrix.shape == opened.shape(name)
    assert opened.stored(name) == (matrix.weight.dtype if isinstance(matrix, Dense) else matrix.format)
    return np.array(numbers(matrix))


def rotated_in_pairs(rows: np.ndarray, heads: int) -> np.ndarray:
    """The converter's reordering of llama's q and k."""
    split = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return split.swapaxes(1, 2).reshape(rows.shape)


def tiled(rows: np.ndarray, width: int) -> np.ndarray:
    """The converter's order of qwen3.5's value heads: the first of every key head, then the second, ..."""
    split = rows.reshape(KEYS, PER_KEY, width, *rows.shape[1:])
    return split.swapaxes(0, 1).reshape(rows.shape)


@pytest.mark.parametrize("kind", PACKED, ids=lambda kind: kind.name)
@pytest.mark.parametrize("architecture", ["llama", "granite", "smollm3"])
def test_rotated_heads(tmp_path: Path, architecture: str, kind: Kind) -> None:
    hyper = {"attention.head_count": 2, "attention.head_count_kv": 1}
    q, k = random(2 * DIM, HIDDEN), random(DIM, HIDDEN)
    tensors = [
        quantized(f"blk.1.{name}.weight", rotated_in_pairs(rows, heads), kind) for name, rows, heads in (("attn_q", q, 2), ("attn_k", k, 1))
    ]
    tensors.append(array_tensor("blk.1.attn_q.bias", rotated_in_pairs(q[:, 0], 2)))
    opened = checkpoint(tmp_path, architecture, tensors, hyper)
    prefix = "model.layers.1.self_attn"
    assert np.array_equal(read(opened, f"{prefix}.q_proj.weight"), exact(q, kind))
    assert np.array_equal(read(opened, f"{prefix}.k_proj.weight"), exact(k, kind))
    assert np.array_equal(read(opened, f"{prefix}.q_proj.bias"), q[:, 0])
    packed = kind in (Kind.Q8_0, Kind.Q4_0, Kind.Q4_1)
    assert isinstance(opened.read(f"{prefix}.q_proj.weight"), Quantized if packed else Dense)


@pytest.mark.parametrize("architecture", ["qwen2", "olmo2", "gpt-oss"])
def test_heads_that_are_not_rotated(tmp_path: Path, architecture: str) -> None:
    q = random(HEADS * DIM, HIDDEN)
    hyper = EXPERTS | {"attention.sliding_window": 8} if architecture == "gpt-oss" else {}
    opened = checkpoint(tmp_path, architecture, [array_tensor("blk.0.attn_q.weight", q)], hyper)
    assert np.array_equal(read(opened, "model.layers.0.self_attn.q_proj.weight"), q)


@pytest.mark.parametrize("architecture", ["gemma2", "gemma3"])
def test_norms_of_gemma(tmp_path: Path, architecture: str) -> None:
    norm = random(HIDDEN)
    opened = checkpoint(tmp_path, architecture, [array_tensor("blk.0.post_ffw_norm.weight", norm + 1)])
    assert np.abs(read(opened, "model.layers.0.post_feedforward_layernorm.weight") - norm).max() < 1e-6
    assert not read(opened, "model.norm.weight").any()


@pytest.mark.parametrize("kind", PACKED, ids=lambda kind: kind.name)
def test_fused_projections_are_taken_apart(tmp_path: Path, kind: Kind) -> None:
    q, k, v = random(HEADS * DIM, HIDDEN), random(KV * DIM, HIDDEN, seed=1), random(KV * DIM, HIDDEN, seed=2)
    gate, up = random(4, 32, HIDDEN), random(4, 32, HIDDEN, seed=1)
    fused = [
        quantized("blk.0.attn_qkv.weight", np.concatenate([rotated_in_pairs(q, HEADS), rotated_in_pairs(k, KV), v]), kind),
        array_tensor("blk.0.attn_qkv.bias", np.concatenate([rotated_in_pairs(q, HEADS), rotated_in_pairs(k, KV), v])[:, 0]),
        quantized("blk.0.ffn_gate_up_exps.weight", np.concatenate([gate, up], axis=1), kind),
    ]
    opened = checkpoint(tmp_path, "llama", fused, EXPERTS)
    for name, rows in {"q_proj": q, "k_proj": k, "v_proj": v}.items():
        assert np.array_equal(read(opened, f"model.layers.0.self_attn.{name}.weight"), exact(rows, kind))
        assert np.array_equal(read(opened, f"model.layers.0.self_attn.{name}.bias"), rows[:, 0])
    for name, rows in {"gate_proj": gate, "up_proj": up}.items():
        assert np.array_equal(read(opened, f"model.layers.0.block_sparse_moe.switch_mlp.{name}.weight"), exact(rows, kind))
    whole = sum(opened.nbytes(f"model.layers.0.self_attn.{name}.weight") for name in ("q_proj", "k_proj", "v_proj"))
    assert whole == len(fused[0].data)


@pytest.mark.parametrize("kind", PACKED, ids=lambda kind: kind.name)
def test_value_heads_of_qwen35(tmp_path: Path, kind: Kind) -> None:
    above, value_dim = 2 * KEYS * 16, VALUES * DIM
    qkv, z, out = random(above + value_dim, HIDDEN), random(value_dim, HIDDEN), random(HIDDEN, value_dim)
    alpha, decay, conv = random(VALUES, HIDDEN), random(VALUES), random(above + value_dim, 1, 4)
    conv_rows = conv[:, 0]
    opened = checkpoint(
        tmp_path,
        "qwen35",
        [
            quantized("blk.0.attn_qkv.weight", np.concatenate([qkv[:above], tiled(qkv[above:], DIM)]), kind),
            quantized("blk.0.attn_gate.weight", tiled(z, DIM), kind),
            quantized("blk.0.ssm_out.weight", np.ascontiguousarray(tiled(out.T, DIM).T), kind),
            quantized("blk.0.ssm_alpha.weight", tiled(alpha, 1), kind),
            array_tensor("blk.0.ssm_a", -np.exp(tiled(decay, 1))),
            array_tensor("blk.0.ssm_dt.bias", tiled(decay, 1)),
            array_tensor("blk.0.ssm_conv1d.weight", np.concatenate([conv_rows[:above], tiled(conv_rows[above:], DIM)])),
        ],
        DELTA,
    )
    prefix = "model.layers.0.linear_attn"
    for name, values in {"in_proj_qkv": qkv, "in_proj_z": z, "out_proj": out, "in_proj_a": alpha}.items():
        assert np.array_equal(read(opened, f"{prefix}.{name}.weight"), exact(values, kind)), name
    assert np.abs(read(opened, f"{prefix}.A_log") - decay).max() < 1e-6
    assert np.array_equal(read(opened, f"{prefix}.dt_bias"), decay)
    assert np.array_equal(read(opened, f"{prefix}.conv1d.weight"), conv.transpose(0, 2, 1))
    if kind == Kind.Q8_0:
        assert opened.stored(f"{prefix}.out_proj.weight") == Format(8, 32)


def test_columns_in_runs_shorter_than_a_group_are_unpacked(tmp_path: Path) -> None:
    out = random(HIDDEN, VALUES * 16)
    tensor = quantized("blk.0.ssm_out.weight", np.ascontiguousarray(tiled(out.T, 16).T), Kind.Q8_0)
    opened = checkpoint(tmp_path, "qwen35", [tensor], DELTA | {"ssm.inner_size": VALUES * 16})
    stored = gguf.quants.dequantize(np.frombuffer(tensor.data, np.uint8).reshape(HIDDEN, -1), Kind.Q8_0)
    untiled = stored.reshape(HIDDEN, PER_KEY, KEYS, 16).swapaxes(1, 2).reshape(out.shape)
    assert np.array_equal(read(opened, "model.layers.0.linear_attn.out_proj.weight"), untiled)


@pytest.mark.parametrize(
    "kinds", [(Kind.Q8_0, Kind.Q8_0), (Kind.Q8_0, Kind.Q4_0), (Kind.F32, Kind.Q4_0)], ids=["alike", "packed", "one plain"]
)
def test_the_joint_projection_of_qwen3next(tmp_path: Path, kinds: tuple[Kind, Kind]) -> None:
    """Group rows by key head: its query, key, values and their gates."""
    parts = {"q": random(KEYS, 16, HIDDEN), "k": random(KEYS, 16, HIDDEN, seed=1)}
    parts |= {"v": random(KEYS, PER_KEY * DIM, HIDDEN, seed=2), "z": random(KEYS, PER_KEY * DIM, HIDDEN, seed=3)}
    qkv = np.concatenate([parts[name].reshape(-1, HIDDEN) for name in "qkv"])
    tensors = [
        quantized("blk.0.attn_qkv.weight", qkv, kinds[0]),
        quantized("blk.0.attn_gate.weight", parts["z"].reshape(-1, HIDDEN), kinds[1]),
    ]
    opened = checkpoint(tmp_path, "qwen3next", tensors, NEXT)
    rounded = {name: exact(values, kinds[name == "z"]) for name, values in parts.items()}
    expected = np.concatenate([rounded[name] for name in "qkvz"], axis=1).reshape(-1, HIDDEN)
    name = "model.layers.0.linear_attn.in_proj_qkvz.weight"
    assert np.array_equal(read(opened, name), expected)
    assert opened.nbytes(name) == sum(len(tensor.data) for tensor in tensors)
    assert not any("attn_gate" in name for name in opened.names())


def test_scales_of_the_joint_projection_are_not_overlooked(tmp_path: Path) -> None:
    shapes = {
        "attn_qkv.weight": (2 * KEYS * 16 + VALUES * DIM, HIDDEN),
        "attn_gate.weight": (VALUES * DIM, HIDDEN),
        "attn_gate.scale": (1,),
    }
    opened = checkpoint(tmp_path, "qwen3next", [array_tensor(f"blk.0.{name}", random(*shape)) for name, shape in shapes.items()], NEXT)
    assert {"blk.0.attn_qkv.weight", "blk.0.attn_gate.weight"} < set(opened.names())


def test_weight_scales_are_multiplied_in(tmp_path: Path) -> None:
    up, experts = random(64, HIDDEN), random(4, 32, HIDDEN)
    q = random(HEADS * DIM, HIDDEN)
    tensors = [
        array_tensor("blk.0.ffn_up.weight", up),
        array_tensor("blk.0.ffn_up.scale", np.array([0.5])),
        array_tensor("blk.0.ffn_up.input_scale", np.array([9.0])),
        quantized("blk.0.ffn_up_exps.weight", experts, Kind.Q8_0),
        array_tensor("blk.0.ffn_up_exps.scale", np.array([1.0, 2.0, 4.0, 8.0])),
        array_tensor("blk.0.attn_q.weight", rotated_in_pairs(q, HEADS)),
        array_tensor("blk.0.attn_q.scale", np.array([2.0])),
    ]
    opened = checkpoint(tmp_path, "llama", tensors, EXPERTS)
    prefix = "model.layers.0"
    assert np.array_equal(read(opened, f"{prefix}.mlp.up_proj.weight"), up * 0.5)
    assert np.array_equal(read(opened, f"{prefix}.self_attn.q_proj.weight"), q * 2)
    factors = np.array([1, 2, 4, 8], np.float32)[:, None, None]
    assert np.array_equal(read(opened, f"{prefix}.block_sparse_moe.switch_mlp.up_proj.weight"), exact(experts, Kind.Q8_0) * factors)
    assert not any(name.endswith("scale") for name in opened.names())


def test_a_damaged_tensor_is_named_and_the_file_closes(tmp_path: Path) -> None:
    data = bytearray(64 * 17)
    data[17 * 5] = 255
    opened = checkpoint(tmp_path, "llama", [Tensor("blk.0.attn_v.weight", (32, 64), bytes(data), int(Kind.MXFP4))])
    with pytest.raises(WeightsError, match=r"tensor blk\.0\.attn_v\.weight: a scale is not a number") as caught:
        opened.read("model.layers.0.self_attn.v_proj.weight")
    assert caught.traceback
    opened.close()


def test_experts_of_early_mixtral_files(tmp_path: Path) -> None:
    tensors = [array_tensor(f"blk.0.ffn_{part}.3.weight", random(2, 2)) for part in ("gate", "down", "up")]
    names = checkpoint(tmp_path, "llama", tensors, EXPERTS).names()
    assert {f"model.layers.0.block_sparse_moe.experts.3.{part}.weight" for part in ("w1", "w2", "w3")} <= set(names)


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    tensors = [array_tensor(f"blk.{layer}.attn_norm.weight", np.ones(HIDDEN)) for layer in range(3)]
    names = checkpoint(tmp_path, "qwen35", tensors, DELTA | {"block_count": 3, "nextn_predict_layers": 1}).names()
    assert {"model.layers.0.input_layernorm.weight", "model.layers.1.input_layernorm.weight"} <= set(names)
    assert len(names) == 4


@pytest.mark.parametrize(
    ("architecture", "hyper", "tensor"),
    [
        ("llama", {}, "blk.0.ssm_a"),
        ("llama", {}, "blk.0.attn_gate.weight"),
        ("llama", {}, "blk.0.attn_rel_b.weight"),
        ("llama", {}, "blk.0.ffn_gate_up_exps.weight"),
        ("llama", {}, "rope.weight"),
        ("llama", {}, "blk.0.attn_qkv.weight"),
        ("qwen2", {}, "blk.0.attn_q_norm.weight"),
        ("gemma2", {}, "blk.0.attn_sinks.weight"),
    ],
)
def test_a_tensor_without_a_place_keeps_its_name(tmp_path: Path, architecture: str, hyper: dict[str, Any], tensor: str) -> None:
    opened = checkpoint(tmp_path, architecture, [array_tensor(tensor, np.ones((3, 5)))], hyper)
    assert tensor in opened.names()
    assert opened.shape(tensor) == (3, 5)


@pytest.mark.parametrize(
    ("architecture", "hyper", "name", "shape"),
    [
        ("llama", {}, "attn_q.weight", (9, 7)),
        ("qwen35", DELTA, "attn_qkv.weight", (9, 7)),
        ("qwen35", DELTA, "attn_gate.weight", (7, 5)),
        ("qwen35", DELTA, "ssm_a", (5,)),
        ("qwen35", DELTA, "ssm_conv1d.weight", (3,)),
        ("qwen35", DELTA, "ssm_out.weight", (3, 7)),
        ("qwen3next", NEXT, "ssm_conv1d.weight", (3,)),
    ],
)
def test_a_tensor_of_the_wrong_shape_is_left_for_the_loader(
    tmp_path: Path, architecture: str, hyper: dict[str, Any], name: str, shape: tuple[int, ...]
) -> None:
    opened = checkpoint(tmp_path, architecture, [array_tensor(f"blk.0.{name}", np.ones(shape))], hyper)
    (place,) = set(opened.names()) - {"model.embed_tokens.weight", "model.norm.weight"}
    assert opened.shape(place) == shape
    assert opened.read(place).shape == shape


def test_two_tensors_with_one_place(tmp_path: Path) -> None:
    tensors = [array_tensor("blk.0.attn_qkv.weight", np.ones((8, 3))), array_tensor("blk.0.attn_k.weight", np.ones((2, 3)))]
    with pytest.raises(CheckpointError, match=r"attn_k.weight and blk.0.attn_qkv.weight are both model.layers.0.self_attn.k_proj.weight"):
        checkpoint(tmp_path, "llama", tensors)


STEMS = ("attn_q", "attn_k", "attn_v", "attn_qkv", "attn_gate", "attn_output", "attn_norm", "attn_q_norm", "attn_sinks")
STEMS += ("ffn_norm", "ffn_gate", "ffn_gate_inp", "ffn_gate_exps", "ffn_gate_up_exps", "ffn_gate_inp_shexp", "post_ffw_norm")
STEMS += ("ssm_a", "ssm_dt", "ssm_conv1d", "ssm_norm", "ssm_out", "ssm_ba", "ssm_in", "ssm_alpha")
SHAPES = st.lists(st.sampled_from([1, 2, 6, 8, 32, 64, 96]), max_size=3).map(tuple)


@settings(max_examples=examples(150), deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from([("llama", {}), ("llama", EXPERTS), ("gemma3", {}), ("qwen3next", NEXT), ("qwen35", DELTA)]),
    st.dictionaries(st.tuples(st.sampled_from(STEMS), st.sampled_from([".weight", ".bias", ".scale", ""])), SHAPES, max_size=6),
)
def test_any_shapes_are_read_as_foretold(
    tmp_path: Path, architecture: tuple[str, dict[str, Any]], shapes: dict[tuple[str, str], tuple[int, ...]]
) -> None:
    kinds = {True: Kind.Q8_0, False: Kind.F32}
    tensors = [
        quantized(f"blk.0.{stem}{suffix}", random(*shape), kinds[len(shape) > 1 and shape[-1] % 32 == 0])
        for (stem, suffix), shape in shapes.items()
    ]
    try:
        opened = checkpoint(tmp_path, *architecture[:1], tensors, architecture[1])
    except CheckpointError as error:
        assert " are both " in str(error)  # noqa: PT017
        return
    for name in opened.names():
        read(opened, name)


def test_operations_are_those_of_the_converter() -> None:
    """The numpy forms above equal index arithmetic that is written out."""
    assert rotated_in_pairs(np.arange(8), 2).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert tiled(np.arange(6), 1).tolist() == [0, 3, 1, 4, 2, 5]
