"""Files made to break the reader give an error of one line in little memory, or a model."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.processes.examples import examples

from mlxinfer import tokenizer
from mlxinfer.errors import MLXInferError, WeightsError
from mlxinfer.loading.gguf import GGUFCheckpoint
from mlxinfer.loading.gguf.hparams import short_float
from mlxinfer.loading.gguf.types import TENSOR_TYPES
from mlxinfer.loading.weights import MetaWeights
from mlxinfer.models import build
from tests.support.formats.gguf_file import Tensor, Typed, array_tensor, encode, string
from tests.support.formats.gguf_golden import Arrays, golden, rewritten
from tests.support.formats.ollama_forms import FORMS

PLACES = {"nested arrays": 9, "strings": 8, "bytes": 0}
"""The result of reading a huge array of zeros, with the number of its type."""
OPEN = """
import resource, sys
from pathlib import Path
from mlxinfer.errors import CheckpointError
from mlxinfer.loading.gguf.reader import GGUFFile
path = Path(sys.argv[1])
size = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmSize"))
resource.setrlimit(resource.RLIMIT_AS, (size + 2 * path.stat().st_size, resource.RLIM_INFINITY))
try:
    GGUFFile(path)
except CheckpointError as error:
    print(error)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="the size of a process is read from /proc")
@pytest.mark.parametrize("kind", PLACES)
def test_an_array_of_zeros_takes_no_more_than_twice_its_file(kind: str, tmp_path: Path) -> None:
    """Each empty string or array is a Python object of many times its bytes."""
    path = tmp_path / "x.gguf"
    count = (1 << 29) // 12
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + string("k") + struct.pack("<IIQ", 9, PLACES[kind], count))
    os.truncate(path, 1 << 29)
    run = subprocess.run([sys.executable, "-c", OPEN, path], capture_output=True, text=True, timeout=60, check=True)
    assert "claims 44739242" in run.stdout if kind != "bytes" else not run.stdout


def test_a_number_of_layers_that_draft_may_be_one_in_a_list(tmp_path: Path) -> None:
    GGUFCheckpoint(rewritten("llama", tmp_path / "x.gguf", {"nextn_predict_layers": [0]})).close()


@pytest.mark.parametrize(("name", "key"), [("qwen3moe", "expert_feed_forward_length"), ("deepseek2", "attention.key_length_mla")])
def test_sizes_beyond_those_of_any_array(name: str, key: str, tmp_path: Path) -> None:
    checkpoint = GGUFCheckpoint(rewritten(name, tmp_path / "x.gguf", {key: 2**31 - 1}))
    with pytest.raises(WeightsError, match=r"would have the shape .*; a number in the config is wrong"):
        build(checkpoint.config, MetaWeights(checkpoint, mx.float16))
    checkpoint.close()


def test_numbers_beyond_float32_warn_of_nothing(recwarn: pytest.WarningsRecorder) -> None:
    assert short_float(1e300) == 1e300
    assert not recwarn.list


VALUES: list[Any] = [
    *(0, 1, 2, 3, 7, 2**31 - 1, 2**31, 2**32 - 1, -1.0, 0.0, 0.5, 1e-30, 1e30, float("nan"), float("inf"), -float("inf")),
    *("", "x\ny", "yarn", "linear", "longrope", "none", "default", "\u00e9" * 100, True, False),
    *([1, 2], [0], [0, 0], [0.5], ["a"], [True, False], [4] * 64, [0, 2] * 32, [True] * 64),
    *(
        Typed("u64", 2**64 - 1),
        Typed("i64", -(2**63)),
        Typed("f64", 1e308),
        Typed("i8", -3),
        Typed("i32", -1),
        Typed("array", [-1] * 64, of="i32"),
    ),
    *(Typed("array", [], of="u32"), Typed("array", [], of="string"), Typed("array", [2**63] * 3, of="u64")),
    *(Typed("array", [float("nan")] * 4, of="f32"), Typed("array", [Typed("array", [1], of="u8")], of="array")),
]
NAMES = """
attention.sliding_window attention.sliding_window_pattern rope.scaling.type rope.scaling.factor rope.scaling.original_context_length
rope.dimension_count rope.freq_base nextn_predict_layers expert_count expert_used_count attention.key_length attention.value_length
attention.key_length_mla attention.scale logit_scale rope.local.freq_base rope.scaling.mscale ssm.v_head_reordered norm_top_k_prob
mrope_sections attention.head_dim vision.block_count attention.head_count_kv attention.recurrent_layers full_attention_interval
expert_weights_norm leading_dense_block_count rope.scaling.yarn_log_multiplier rope.scaling.beta_fast feed_forward_length
"""
KEYS = NAMES.split()
TOKENIZERS: list[dict[str, Any]] = [
    {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["a", "b", "ab", "\u0120", "\u010a", "<e>", *(f"t{n}" for n in range(90))],
        "tokenizer.ggml.token_type": [1] * 5 + [3] + [1] * 90,
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 5,
    },
    {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *(f"<0x{n:02X}>" for n in range(93))],
        "tokenizer.ggml.scores": [0.0] * 96,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 93,
    },
]
GENERAL = ("general.architecture", "general.type", "general.quantization_version", "split.count", "split.tensors.count", "general.name")


def hostile(random: Random) -> bytes:
    """A golden file, or one in Ollama's form with a tokenizer, with some keys, tensors and bytes changed."""
    name, form = random.choice(list(FORMS.values()))
    architecture, hyper, arrays = golden(name)
    if random.random() < 0.5:
        architecture = form(hyper, arrays)
    metadata = dict(random.choice(TOKENIZERS)) | {"general.architecture": architecture}
    metadata |= {f"{architecture}.{key}": plain(value) for key, value in hyper.items()}
    keys = [*metadata, *(f"{architecture}.{key}" for key in KEYS), *GENERAL]
    for _ in range(random.choice([0, 1, 1, 1, 2, 3])):
        metadata[random.choice(keys)] = random.choice(VALUES)
    if random.random() < 0.1:
        metadata.pop(random.choice([*metadata]))
    data = bytearray(encode(metadata, changed(random, arrays)))
    for _ in range(random.choice([0, 0, 0, 1, 4])):
        data[random.randrange(min(len(data), 6000))] = random.choice([0, 1, 255, random.randrange(256)])
    return bytes(data[: random.randrange(len(data))] if random.random() < 0.05 else data)


def changed(random: Random, arrays: Arrays) -> list[Tensor]:
    tensors = [array_tensor(name, values) for name, values in arrays.items()]
    for _ in range(random.choice([0, 0, 1, 1, 2])):
        at = random.randrange(len(tensors))
        name, shape = tensors[at].name, tensors[at].shape or (1,)
        kind, place, ending = (
            random.choice(list(TENSOR_TYPES.values())),
            random.randrange(len(shape)),
            random.choice(["x", ".scale", ".bias", ""]),
        )
        size = random.choice([0, 1, 2, 3, 2**20, 2**31, 2**40, 2**62, shape[place] + 1])
        count = int(np.prod(shape))
        tensors[at : at + 1] = random.choice(
            [
                [],
                [Tensor(name, (*shape[:place], size, *shape[place + 1 :]), tensors[at].data)],
                [Tensor(name, shape, random.randbytes(count // kind.block * kind.block_bytes), kind.id)],
                [Tensor(random.choice(tensors).name + ending, shape, tensors[at].data)],
                [tensors[at], Tensor(name.rpartition(".")[0] + ending, (3,), bytes(12))],
                [Tensor(name, shape[::-1], tensors[at].data)],
                [Tensor(name, (count,), tensors[at].data)],
            ]
        )
    return tensors


def plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return Typed("array", value.tolist(), of="bool" if value.dtype == bool else "i32")
    return value


@settings(max_examples=examples(600), deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.randoms(use_true_random=False))
def test_any_file_is_a_model_or_an_error_of_one_line(tmp_path: Path, random: Random) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(hostile(random))
    try:
        checkpoint = GGUFCheckpoint(path, raw_blocks=random.random() < 0.5)
        try:
            weights = MetaWeights(checkpoint, mx.float16)
            build(checkpoint.config, weights)
            weights.finish()
            for name in checkpoint.names():
                checkpoint.read(name)
            tokenizer.from_gguf(checkpoint.metadata)
        finally:
            checkpoint.close()
    except MLXInferError as error:
        assert "\n" not in str(error)  # noqa: PT017
