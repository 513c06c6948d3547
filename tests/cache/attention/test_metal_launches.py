"""Number of launches of attention in a decode step, in all and in sequence, counted in the graph that MLX would run."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from support.models.checkpoints import config_of, random_checkpoint
from support.models.plain_weights import pack
from support.models.tiny import open_model

from mlxinfer.cache.attention.metal import METAL
from mlxinfer.cache.base import Segment
from mlxinfer.cache.kv_format import KVFormat
from mlxinfer.cache.paged import PagedCache
from mlxinfer.kernels_metal.executors import run_with
from mlxinfer.models.decoder import Model
from mlxinfer.nn.weights import Format

VIEWS = {"Reshape", "Slice", "Split", "Broadcast", "Transpose", "ExpandDims", "Squeeze", "Flatten", "Unflatten"}
"""Primitives that launch nothing if their input is contiguous, as in all of these graphs."""
NODE, EDGE = re.compile(r'\{ (\w+) \[label ="(\w+)"'), re.compile(r'^"?(\w+)"? -> "?(\w+)"?$', re.MULTILINE)


def phantom(**names: Any) -> Callable[..., list[mx.array]]:
    """A kernel that computes nothing: one node of the graph."""

    def call(*, inputs: list[mx.array], output_shapes: Any, output_dtypes: Any, **grid: Any) -> list[mx.array]:
        outputs = [mx.zeros(shape, dtype) for shape, dtype in zip(output_shapes, output_dtypes, strict=True)]
        mx.eval(outputs)
        return list(mx.depends(outputs, inputs))

    return call


def one_node(x: mx.array, *rest: Any, **options: Any) -> mx.array:
    """Stands for an operation of MLX that is one kernel on a GPU, and several primitives on a CPU."""
    return mx.depends([mx.stop_gradient(x)], [x])[0]


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("mlxinfer.kernels_cpu.in_use", lambda: False)
    monkeypatch.setattr(mx.fast, "rms_norm", one_node)
    monkeypatch.setattr(mx.fast, "rope", one_node)
    with run_with(phantom):
        yield


def launches_of(tmp_path: Path, *outputs: mx.array) -> tuple[int, int]:
    """Launches of a graph, and the most that follow one another."""
    mx.export_to_dot(str(tmp_path / "graph.dot"), *outputs)
    text = (tmp_path / "graph.dot").read_text()
    kinds = dict(NODE.findall(text))
    before: dict[str, list[str]] = {}
    for source, target in EDGE.findall(text):
        before.setdefault(target, []).append(source)
    weight = {node: int(kind not in VIEWS | {"StopGradient"}) for node, kind in kinds.items()}
    depths: dict[str, int] = {}

    def depth(node: str) -> int:
        if node not in depths:
            depths[node] = weight.get(node, 0) + max((depth(n) for n in before.get(node, [])), default=0)
        return depths[node]

    return sum(weight.values()), max(depth(node) for node in before)


def decoded(model: Model, tmp_path: Path, pasts: list[int], warm: int = 3) -> tuple[int, int]:
    """Launches and stages of the first layer's attention, from the residual stream back to it, after some steps of these sequences."""
    cache = PagedCache(model.layers, dtype=mx.float32, kv_cache_tokens=1 << 13, chunk=2048, kv=KVFormat(), backend=lambda store: METAL)
    slots = [cache.open() for _ in pasts]
    block, rope = model.blocks[0], model.ropes["rope"]
    mixer: Any = block.mixer
    for late in range(-1, warm + 1):
        counts = [past if late < 0 else 1 for past in pasts]
        segments = [
            Segment(slot, sum(counts[:i]), counts[i], past + late if late >= 0 else 0, past + warm + 1)
            for i, (slot, past) in enumerate(zip(slots, pasts, strict=True))
        ]
        step = cache.begin(segments)
        x = mx.zeros((sum(counts), 128))
        mx.eval(x)
        y = mixer(x, step, rope.at(step), norm=block.norms.before_mixer, onto=x)
        if late == warm:
            return launches_of(tmp_path, y, *step.state)
        mx.eval(y, step.state)
        cache.commit(step)
    raise AssertionError


@pytest.fixture
def model(tmp_path: Path) -> Model:
    sizes = {"hidden_size": 128, "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1}
    return open_model(random_checkpoint(tmp_path / "llama", config_of("llama", **sizes)))


@pytest.mark.parametrize("pasts", [[5], [70], [5, 40, 130, 7]], ids=str)
def test_attention_is_five_launches_in_a_row(pasts: list[int], model: Model, tmp_path: Path) -> None:
    """Norm, projection, attention, projection, and the sum."""
    assert decoded(model, tmp_path, pasts) == (5, 5)


def test_long_sequences_are_merged_in_one_more(model: Model, tmp_path: Path) -> None:
    assert decoded(model, tmp_path, [1500]) == (6, 6)


def test_norms_of_heads_and_partial_rotation_take_none(tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1}
    qwen = open_model(random_checkpoint(tmp_path / "qwen3", config_of("qwen3", **sizes)))
    assert decoded(qwen, tmp_path, [5]) == (5, 5)


def test_a_step_in_sixteen_writes_pages(model: Model, tmp_path: Path) -> None:
    """At most sixteen rows stay outside their pages.

    Keys and values of one sequence are written; those of several are gathered and scattered, outside of the chain of launches.
    """
    assert decoded(model, tmp_path, [5], warm=11) == (7, 5)
    assert decoded(model, tmp_path, [5, 5, 5], warm=11) == (9, 5)
    assert decoded(model, tmp_path, [5], warm=12) == (5, 5)


def test_the_bias_of_a_quantized_projection_takes_none(tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}
    qwen = open_model(random_checkpoint(tmp_path / "qwen2", config_of("qwen2", **sizes)))
    block: Any = qwen.blocks[0]
    (linear,) = block.mixer.qkv.linears
    assert linear.bias is not None
    linear.matrix = pack(linear.matrix.weight, Format(4, 32))
    assert decoded(qwen, tmp_path, [5]) == (5, 5)
