from __future__ import annotations

import json
import math
from contextlib import closing
from pathlib import Path

import mlx.core as mx
import pytest

from mlxinfer.errors import CheckpointError, MLXInferError, ModelNotFoundError, UnsupportedModelError
from mlxinfer.loading.directory import INDEX, SafetensorsCheckpoint
from mlxinfer.loading.files import read_json, to_json
from mlxinfer.nn.weights import Dense, Format, Quantized


def write(directory: Path, tensors: dict[str, mx.array], config: dict | None = None, file: str = "model.safetensors") -> Path:
    directory.mkdir(exist_ok=True)
    mx.save_safetensors(str(directory / file), tensors)
    (directory / "config.json").write_text(json.dumps({"model_type": "llama"} if config is None else config))
    return directory


def sharded(directory: Path) -> Path:
    write(directory, {"a": mx.ones((2,))}, file="model-00001-of-00002.safetensors")
    write(directory, {"b": mx.zeros((3,))}, file="model-00002-of-00002.safetensors")
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return directory


def refused(directory: Path, kind: type[MLXInferError] = CheckpointError) -> str:
    with pytest.raises(kind) as caught:
        SafetensorsCheckpoint(directory)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_index_decides_what_is_read(tmp_path: Path) -> None:
    directory = sharded(tmp_path / "m")
    mx.save_safetensors(str(directory / "model-00003-of-00003.safetensors"), {"stale": mx.ones((9,)), "a": mx.zeros((2,))})
    (directory / "model.safetensors").write_bytes(b"not even safetensors")
    checkpoint = SafetensorsCheckpoint(directory)
    assert set(checkpoint.names()) == {"a", "b"}
    assert checkpoint.read("a").weight.tolist() == [1, 1]
    assert checkpoint.shape("b") == (3,)
    assert checkpoint.nbytes("b") == 12
    assert checkpoint.stored("b") == mx.float32


def test_shards_without_index(tmp_path: Path) -> None:
    directory = sharded(tmp_path / "m")
    (directory / INDEX).unlink()
    assert set(SafetensorsCheckpoint(directory).names()) == {"a", "b"}
    (directory / "model-00001-of-00002.safetensors").unlink()
    assert "model-00001-of-00002.safetensors" in refused(directory)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    directory = sharded(tmp_path / "m")
    (directory / "model-00002-of-00002.safetensors").unlink()
    assert "model-00002-of-00002.safetensors" in refused(directory)


@pytest.mark.parametrize("index", [
    "", "[]", "{}", '{"weight_map": {}}', '{"weight_map": ["a"]}', '{"weight_map": {"a": 1}}', '{"weight_map": {"a": "../x.safetensors"}}',
    '{"weight_map": {"a": "/etc/passwd"}}', '{"weight_map": {"zz": "model-00001-of-00002.safetensors"}}', "{" * 100000,
])  # fmt: skip
def test_a_bad_index(tmp_path: Path, index: str) -> None:
    directory = sharded(tmp_path / "m")
    (directory / INDEX).write_text(index)
    refused(directory)


def test_a_tensor_in_two_shards_without_index(tmp_path: Path) -> None:
    directory = sharded(tmp_path / "m")
    (directory / INDEX).unlink()
    write(directory, {"a": mx.zeros((3,))}, file="model-00002-of-00002.safetensors")
    assert "'a'" in refused(directory)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "model.pt", "consolidated.00.pth", "last.ckpt"])
def test_pickles_are_refused_with_the_way_out(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_bytes(b"\x80\x04cos\nsystem\n")
    message = refused(tmp_path, UnsupportedModelError)
    assert name in message
    assert "safetensors/convert" in message


@pytest.mark.parametrize("key", ["auto_map", "model_file", "trust_remote_code"])
def test_the_name_of_code_in_the_repository_refuses_nothing(tmp_path: Path, key: str) -> None:
    (tmp_path / "modeling.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    write(tmp_path, {"a": mx.ones(2)}, {"model_type": "llama", key: {"AutoModel": "modeling.Model"}})
    with closing(SafetensorsCheckpoint(tmp_path)) as checkpoint:
        assert checkpoint.config["model_type"] == "llama"
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "fp8", "compressed-tensors", "mxfp4", "bitnet", "quanto", "modelopt"])
def test_foreign_quantization_is_refused_by_name(tmp_path: Path, method: str) -> None:
    write(tmp_path, {"a": mx.ones(2)}, {"model_type": "llama", "quantization_config": {"quant_method": method, "bits": 4}})
    assert method in refused(tmp_path, UnsupportedModelError)
    write(tmp_path, {"a": mx.ones(2)}, {"text_config": {"quantization_config": {"quant_method": method}}})
    assert method in refused(tmp_path, UnsupportedModelError)


def test_modelopt_and_compression_config(tmp_path: Path) -> None:
    write(tmp_path, {"a": mx.ones(2)}, {"compression_config": {"format": "int8"}})
    assert "compressed-tensors" in refused(tmp_path, UnsupportedModelError)
    write(tmp_path, {"a": mx.ones(2)})
    (tmp_path / "hf_quant_config.json").write_text("{}")
    assert "modelopt" in refused(tmp_path, UnsupportedModelError)


def test_gpt_oss_blocks_pass_as_they_are(tmp_path: Path) -> None:
    blocks = mx.arange(16, dtype=mx.uint8)
    write(tmp_path, {"experts_blocks": blocks}, {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}})
    checkpoint = SafetensorsCheckpoint(tmp_path)
    assert checkpoint.stored("experts_blocks") == mx.uint8
    assert mx.array_equal(checkpoint.read("experts_blocks").weight, blocks).item()


@pytest.mark.parametrize("content", [None, "", "{", "[1]", '"x"', "\xff\xfe", "[" * 200000])
def test_a_bad_config(tmp_path: Path, content: str | None) -> None:
    mx.save_safetensors(str(tmp_path / "model.safetensors"), {"a": mx.ones(2)})
    if content is not None:
        (tmp_path / "config.json").write_bytes(content.encode("latin-1"))
    assert "config.json" in refused(tmp_path, ModelNotFoundError if content is None else CheckpointError)


def test_no_weights_and_adapters(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert "no .safetensors" in refused(tmp_path)
    mx.save_safetensors(str(tmp_path / "adapters.safetensors"), {"a": mx.ones(2)})
    assert "adapter" in refused(tmp_path, UnsupportedModelError)


def test_several_files_and_nothing_to_choose_by(tmp_path: Path) -> None:
    write(tmp_path, {"a": mx.ones(2)}, file="one.safetensors")
    assert set(SafetensorsCheckpoint(tmp_path).names()) == {"a"}
    write(tmp_path, {"b": mx.ones(2)}, file="two.safetensors")
    assert "two" not in refused(tmp_path)


FORMATS = [Format(b, g) for b in (2, 3, 4, 5, 6, 8) for g in (32, 64, 128)] + [
    Format(4, 32, "mxfp4"),
    Format(8, 32, "mxfp8"),
    Format(4, 16, "nvfp4"),
]


def pack(weight: mx.array, form: Format, name: str = "p.weight") -> dict[str, mx.array]:
    parts = mx.quantize(weight, group_size=form.group_size, bits=form.bits, mode=form.mode)
    base = name.removesuffix("weight")
    return dict(zip((name, base + "scales", base + "biases"), parts, strict=False))


def block(form: Format, **overrides: object) -> dict:
    return {"model_type": "llama", "quantization": {"bits": form.bits, "group_size": form.group_size, "mode": form.mode, **overrides}}


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_quantized_matrices(tmp_path: Path, form: Format) -> None:
    weight = mx.random.normal((4, 128))
    write(tmp_path, {**pack(weight, form), "norm.weight": mx.ones(8), "p.bias": mx.ones(4)}, block(form))
    checkpoint = SafetensorsCheckpoint(tmp_path)
    assert set(checkpoint.names()) == {"p.weight", "norm.weight", "p.bias"}
    assert checkpoint.shape("p.weight") == (4, 128)
    assert checkpoint.stored("p.weight") == form
    matrix = checkpoint.read("p.weight")
    assert isinstance(matrix, Quantized)
    assert matrix.shape == (4, 128)
    assert isinstance(checkpoint.read("norm.weight"), Dense)
    expected = mx.dequantize(*mx.quantize(weight, form.group_size, form.bits, form.mode), group_size=form.group_size, bits=form.bits,
                             mode=form.mode)  # fmt: skip
    assert mx.array_equal(matrix.dequantize(mx.float32), expected).item()
    rows = checkpoint.read_rows("p.weight", 1, 3)
    assert isinstance(rows, Quantized)
    assert mx.array_equal(rows.dequantize(mx.float32), expected[1:3]).item()


def test_overrides_per_layer(tmp_path: Path) -> None:
    eight, four = Format(8, 32), Format(4, 64)
    tensors = {**pack(mx.ones((4, 128)), four, "a.weight"), **pack(mx.ones((4, 128)), eight, "b.weight"), "c.weight": mx.ones((4, 128))}
    write(tmp_path, tensors, block(four, b={"bits": 8, "group_size": 32}, c=False))
    checkpoint = SafetensorsCheckpoint(tmp_path)
    assert [checkpoint.stored(n) for n in ("a.weight", "b.weight", "c.weight")] == [four, eight, mx.float32]


def test_a_format_that_the_block_does_not_name_is_found_from_the_shapes(tmp_path: Path) -> None:
    tensors = {**pack(mx.ones((4, 128)), Format(4, 64), "a.weight"), **pack(mx.ones((4, 128)), Format(8, 64), "b.weight")}
    write(tmp_path, tensors, block(Format(4, 64)))
    assert SafetensorsCheckpoint(tmp_path).stored("b.weight") == Format(8, 64)


def test_contradictions(tmp_path: Path) -> None:
    four = Format(4, 64)
    tensors = pack(mx.ones((4, 128)), four)
    write(tmp_path, tensors, {"model_type": "llama"})
    assert "no quantization block" in refused(tmp_path)
    write(tmp_path, tensors, block(four, p=False))
    assert "p is quantized" in refused(tmp_path)
    write(tmp_path, tensors, block(four, p={"bits": 3, "group_size": 64}))
    assert "do not agree" in refused(tmp_path)
    write(tmp_path, {**tensors, "p.biases": mx.ones((1, 2))}, block(four))
    assert "p.biases" in refused(tmp_path)
    write(tmp_path, {name: tensors[name] for name in ("p.weight", "p.scales")}, block(four))
    assert "p.biases" in refused(tmp_path)
    for bad in ({"bits": 9, "group_size": 64}, {"bits": 4, "group_size": 48}, {"bits": 4, "group_size": 64, "mode": "nf4"}, {"bits": "4"}):
        write(tmp_path, tensors, {"quantization": bad})
        refused(tmp_path, UnsupportedModelError)


def test_json_keeps_infinities(tmp_path: Path) -> None:
    value = {"a": [math.inf, {"b": -math.inf}], "c": 1}
    (tmp_path / "x.json").write_text(to_json(value))
    assert read_json(tmp_path / "x.json") == value
    assert json.loads((tmp_path / "x.json").read_text())["a"][0] == {"__float__": "Infinity"}
