from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.models.checkpoints import GOLDEN, config_of, grow, random_checkpoint
from support.models.tiny_directory import tiny_directory
from support.processes.examples import examples
from support.processes.peak_rss import peak_rss

from mlxinfer.convert import Report, convert
from mlxinfer.convert.write import reader
from mlxinfer.errors import (
    CheckpointError,
    ConversionError,
    DestinationError,
    MLXInferError,
    ModelNotFoundError,
    UnsupportedModelError,
    WeightsError,
)
from mlxinfer.loading.directory import INDEX, SafetensorsCheckpoint
from mlxinfer.loading.find.resolve import resolve
from mlxinfer.loading.load import load, load_tokenizer, open_checkpoint
from mlxinfer.nn.packing import arrays
from mlxinfer.nn.weights import Dense, Format, Quantized, numbers

SMOLLM2 = "smollm2"


def accounted(report: Report, source: Path) -> bool:
    checkpoint = SafetensorsCheckpoint(source)
    used = {name for tensor in report.tensors for name in tensor.sources}
    return used | set(report.skipped) == set(checkpoint.names())


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(directory: Path, **changes: mx.array | None) -> None:
    tensors = dict(mx.load(str(directory / "model.safetensors"))) | changes
    mx.eval(*[array for array in tensors.values() if array is not None])
    mx.save_safetensors(str(directory / "model.safetensors"), {name: a for name, a in tensors.items() if a is not None})


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gpt_oss", "qwen3_next"])
def test_every_source_tensor_is_accounted_for(tmp_path: Path, name: str) -> None:
    report = convert(GOLDEN / name, tmp_path / "out")
    assert accounted(report, GOLDEN / name)
    assert report.nbytes == sum(tensor.nbytes for tensor in report.tensors)
    stored = SafetensorsCheckpoint(tmp_path / "out")
    assert report.nbytes == sum(stored.nbytes(n) for n in stored.names())
    assert report.bits_per_weight == 32
    assert [tensor for tensor in report.tensors if tensor.error] == []


def test_skipped_tensors_are_named_with_a_reason(tmp_path: Path) -> None:
    source = tiny_directory(tmp_path / "source", "llama3_rope")
    edit_tensors(source, **{"model.layers.0.self_attn.rotary_emb.inv_freq": mx.ones(4)})
    report = convert(source, tmp_path / "out")
    assert report.skipped == {"model.layers.0.self_attn.rotary_emb.inv_freq": "computed from the config"}


def test_files_are_copied_byte_for_byte_and_never_code(tmp_path: Path) -> None:
    source = tiny_directory(tmp_path / "source")
    (source / "README.md").write_bytes(b"caf\xe9\r\n")
    (source / "modeling.py").write_text("raise SystemExit")
    (source / "pytorch_model.bin").write_bytes(b"\x80")
    (source / ".cache").mkdir()
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tools.jinja").write_text("x")
    out = tmp_path / "out"
    report = convert(source, out)
    for name in ("tokenizer.json", "tokenizer_config.json", "additional_chat_templates/tools.jinja"):
        assert (out / name).read_bytes() == (source / name).read_bytes()
        assert name in report.copied
    assert (out / "README.md").read_bytes().endswith(b"caf\xe9\r\n")
    assert not (out / "modeling.py").exists()
    assert not (out / "pytorch_model.bin").exists()
    assert "modeling.py is not copied: code is never copied" in report.notes


@pytest.mark.smoke
def test_the_config_says_how_every_matrix_is_stored(tmp_path: Path) -> None:
    source = random_checkpoint(tmp_path / "source", config_of("qwen3_moe"), dtype=mx.bfloat16)
    convert(source, tmp_path / "out", bits=4)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization"] == config["quantization_config"]
    assert {k: v for k, v in config["quantization"].items() if "." not in k} == {"bits": 4, "group_size": 64, "mode": "affine"}
    assert config["quantization"]["model.layers.1.mlp.gate"] is False
    assert config["torch_dtype"] == "bfloat16"
    assert config["rope_theta"] == 10000.0
    stored = SafetensorsCheckpoint(tmp_path / "out")
    assert stored.stored("model.layers.1.mlp.switch_mlp.down_proj.weight") == Format(4, 64)
    assert stored.stored("model.embed_tokens.weight") == Format(4, 64)
    assert stored.stored("model.layers.1.mlp.gate.weight") == mx.bfloat16
    assert stored.stored("model.norm.weight") == mx.bfloat16


@pytest.mark.long
def test_a_float32_state_stays_float32(tmp_path: Path) -> None:
    source = random_checkpoint(tmp_path / "source", config_of("qwen3_next"), dtype=mx.bfloat16)
    convert(source, tmp_path / "out", bits=4, dtype="float16")
    stored = SafetensorsCheckpoint(tmp_path / "out")
    assert stored.stored("model.layers.0.linear_attn.A_log") == mx.float32
    assert stored.stored("model.layers.0.linear_attn.norm.weight") == mx.float16


def test_shards_and_progress(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    report = convert(GOLDEN / "llama", tmp_path / "out", shard_bytes=60000, progress=lambda done, total: told.append((done, total)))
    assert len(list((tmp_path / "out").glob("model-*-of-00005.safetensors"))) == 5
    assert told[-1] == (report.nbytes, report.nbytes)
    assert told == sorted(told)
    assert same_weights(GOLDEN / "llama", tmp_path / "out")


def same_weights(first: Path, second: Path) -> bool:
    pairs = zip(arrays(load(first).model), arrays(load(second).model), strict=True)
    return all(mx.array_equal(a, b).item() for a, b in pairs)


@pytest.mark.long
def test_blocks_do_not_change_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = random_checkpoint(tmp_path / "source", config_of("qwen3_moe"))
    convert(source, tmp_path / "whole", bits=4)
    monkeypatch.setattr(reader, "BLOCK", 200)
    convert(source, tmp_path / "blocks", bits=4)
    assert (tmp_path / "whole" / "model.safetensors").read_bytes() == (tmp_path / "blocks" / "model.safetensors").read_bytes()


@settings(max_examples=examples(12), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    bits=st.sampled_from([2, 3, 4, 5, 6, 8]),
    group_size=st.sampled_from([32, 64, 128]),
    name=st.sampled_from(["llama", "qwen2", "qwen3_moe", "phi3", "gemma2"]),
)
def test_to_convert_and_load_is_to_quantize_at_load(
    tmp_path_factory: pytest.TempPathFactory, bits: int, group_size: int, name: str
) -> None:
    """The two are equal unless a matrix falls back to smaller groups, which only a conversion does."""
    directory = tmp_path_factory.mktemp("pair")
    config = config_of(name, hidden_size=128, num_attention_heads=8, num_key_value_heads=8, intermediate_size=128,
                       **({"moe_intermediate_size": 128} if "moe" in name else {}), num_hidden_layers=1, head_dim=16)  # fmt: skip
    source = random_checkpoint(directory / "source", config)
    convert(source, directory / "out", bits=bits, group_size=group_size, encoder="minmax")
    converted = load(directory / "out", dtype="float32")
    quantized = load(source, dtype="float32", bits=bits, group_size=group_size)
    for a, b in zip(arrays(converted.model), arrays(quantized.model), strict=True):
        assert mx.array_equal(a, b).item()


def test_the_error_reported_is_that_of_the_weights(tmp_path: Path) -> None:
    source = random_checkpoint(tmp_path / "source", config_of("llama"))
    report = convert(source, tmp_path / "out", bits=3)
    before, after = SafetensorsCheckpoint(source), SafetensorsCheckpoint(tmp_path / "out")
    tensor = next(t for t in report.tensors if t.name.endswith("up_proj.weight"))
    w, q = before.read(tensor.name), after.read(tensor.name)
    assert isinstance(q, Quantized)
    expected = mx.linalg.norm(w.weight - q.dequantize(mx.float32)) / mx.linalg.norm(w.weight)
    assert tensor.error == pytest.approx(expected.item(), rel=1e-4)


def test_a_narrower_dtype_is_measured_too(tmp_path: Path) -> None:
    report = convert(GOLDEN / "llama", tmp_path / "out", dtype="bfloat16")
    assert report.actions == {"cast": 30}
    assert all(0 < tensor.error < 0.01 for tensor in report.tensors)


@pytest.mark.long
def test_quality_on_a_text(tmp_path: Path) -> None:
    source = tiny_directory(tmp_path / "source", "mistral")
    report = convert(source, tmp_path / "eight", bits=8, group_size=32)
    assert report.quality is not None
    assert report.quality.tokens >= 32
    assert 0 < report.quality.kl < 0.1
    assert report.quality.top1 > 0.8
    worse = convert(source, tmp_path / "two", bits=2, group_size=32).quality
    assert worse is not None
    assert worse.kl > 3 * report.quality.kl
    assert convert(source, tmp_path / "plain").quality is None
    assert convert(source, tmp_path / "unmeasured", bits=2, group_size=32, measure=False).quality is None
    without = convert(GOLDEN / "mistral", tmp_path / "no-tokenizer", bits=8, group_size=32)
    assert without.quality is None
    assert any("not compared" in note for note in without.notes)


def quantized_source(directory: Path, **form: Any) -> Path:
    plain = random_checkpoint(directory / "plain", config_of("llama", num_hidden_layers=1))
    convert(plain, directory / "quantized", **form)
    return directory / "quantized"


def test_what_is_quantized_already_is_kept_where_it_can_be(tmp_path: Path) -> None:
    source = quantized_source(tmp_path, bits=4, group_size=32)
    weights = (source / "model.safetensors").read_bytes()
    for number, asked in enumerate([{}, {"bits": 4}, {"bits": 4, "group_size": 32}, {"bits": 8}]):
        report = convert(source, tmp_path / str(number), **asked)
        assert (tmp_path / str(number) / "model.safetensors").read_bytes() == weights
        assert "requantized" not in report.actions


@pytest.mark.parametrize("asked", [{"bits": 4, "group_size": 64}, {"bits": 3}, {"mode": "mxfp8"}], ids=str)
def test_else_it_is_requantized_with_a_note(tmp_path: Path, asked: dict[str, Any]) -> None:
    report = convert(quantized_source(tmp_path, bits=4, group_size=32), tmp_path / "out", **asked)
    assert report.actions["requantized"] == 8
    assert any("8 matrices requantized" in note and "4-bit affine in groups of 32" in note for note in report.notes)


def test_a_head_equal_in_name_only_unties_the_config(tmp_path: Path) -> None:
    source = tiny_directory(tmp_path / "source", "llama")
    edit_config(source, tie_word_embeddings=True)
    convert(source, tmp_path / "untied")
    assert json.loads((tmp_path / "untied" / "config.json").read_text())["tie_word_embeddings"] is False
    edit_tensors(source, **{"lm_head.weight": None})
    edit_config(source, tie_word_embeddings=False)
    convert(source, tmp_path / "tied")
    assert json.loads((tmp_path / "tied" / "config.json").read_text())["tie_word_embeddings"] is True


class TestRefusals:
    """Refusals are one line and leave nothing behind."""

    @staticmethod
    def refused(source: str | Path, folder: Path, kind: type[MLXInferError], **options: Any) -> str:
        before = set(folder.iterdir())
        with pytest.raises(kind) as caught:
            convert(source, options.pop("dst", folder / "out"), **options)
        assert "\n" not in str(caught.value)
        assert set(folder.iterdir()) == before
        return str(caught.value)

    def test_a_group_size_without_bits(self, tmp_path: Path) -> None:
        assert "give the bits as well" in self.refused(GOLDEN / "llama", tmp_path, ConversionError, group_size=64)

    def test_the_destination_exists(self, tmp_path: Path) -> None:
        (tmp_path / "out").mkdir()
        assert "exists" in self.refused(GOLDEN / "llama", tmp_path, DestinationError)

    def test_the_destination_cannot_be_made(self, tmp_path: Path) -> None:
        self.refused(GOLDEN / "llama", tmp_path, DestinationError, dst=GOLDEN / "llama" / "config.json" / "out")
        self.refused(GOLDEN / "llama", tmp_path, DestinationError, dst="/proc/no/out")

    @pytest.mark.parametrize("options", [
        {"bits": 1}, {"bits": 7}, {"bits": 16}, {"bits": 4, "group_size": 48}, {"mode": "nf4"}, {"mode": "mxfp4", "bits": 8},
        {"mode": "nvfp4", "group_size": 64}, {"dtype": "float8"}, {"dtype": "int8"},
    ], ids=str)  # fmt: skip
    def test_formats_that_do_not_exist(self, tmp_path: Path, options: dict[str, Any]) -> None:
        self.refused(GOLDEN / "llama", tmp_path, UnsupportedModelError, **options)

    def test_no_such_source(self, tmp_path: Path) -> None:
        self.refused("./nothing", tmp_path, ModelNotFoundError)

    def test_an_architecture_without_a_graph(self, tmp_path: Path) -> None:
        source = tiny_directory(tmp_path / "source")
        edit_config(source, model_type="dbrx")
        assert "dbrx" in self.refused(source, tmp_path, ConversionError)

    def test_a_config_key_that_changes_the_maths(self, tmp_path: Path) -> None:
        source = tiny_directory(tmp_path / "source")
        edit_config(source, hidden_act="telepathy")
        self.refused(source, tmp_path, UnsupportedModelError)

    def test_tensors_that_do_not_fit(self, tmp_path: Path) -> None:
        source = tiny_directory(tmp_path / "source")
        edit_tensors(source, **{"model.norm.weight": None, "surprise": mx.ones(2)})
        message = self.refused(source, tmp_path, WeightsError)
        assert "model.norm.weight is missing" in message
        assert "surprise is unexpected" in message

    def test_nan(self, tmp_path: Path) -> None:
        source = tiny_directory(tmp_path / "source")
        edit_tensors(source, **{"model.norm.weight": mx.full((48,), float("nan"))})
        assert "model.norm.weight holds NaN" in self.refused(source, tmp_path, WeightsError)

    def test_values_beyond_float16(self, tmp_path: Path) -> None:
        source = tiny_directory(tmp_path / "source")
        edit_tensors(source, **{"model.norm.weight": mx.full((48,), 1e6)})
        assert "leaves the range" in self.refused(source, tmp_path, WeightsError, dtype="float16")

    def test_a_cut_file(self, tmp_path: Path) -> None:
        source = tiny_directory(tmp_path / "source")
        data = (source / "model.safetensors").read_bytes()
        (source / "model.safetensors").write_bytes(data[: len(data) // 2])
        assert "truncated" in self.refused(source, tmp_path, CheckpointError)

    def test_ctrl_c(self, tmp_path: Path) -> None:
        def interrupt(done: int, total: int) -> None:
            if done > total / 2:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            convert(GOLDEN / "llama", tmp_path / "out", progress=interrupt)
        assert [path.name for path in tmp_path.iterdir()] == [".out.partial"]

    def test_a_disk_that_runs_full(self, tmp_path: Path) -> None:
        """A limit on the size of files gives the same error as a full disk, from the same write."""
        script = (
            "import resource, sys\nresource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
            "from mlxinfer.convert import convert\nfrom mlxinfer.errors import DestinationError\n"
            "try:\n    convert(sys.argv[1], sys.argv[2])\nexcept DestinationError as error:\n    print(error)"
        )
        command = [sys.executable, "-c", script, str(GOLDEN / "llama"), str(tmp_path / "out")]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stdout.startswith(f"cannot write {tmp_path / 'out'}: File too large")
        assert list(tmp_path.iterdir()) == []


def test_weights_of_a_killed_run_do_not_block_the_next(tmp_path: Path) -> None:
    (tmp_path / ".out.0123abcd.partial").mkdir()
    convert(GOLDEN / "llama", tmp_path / "out")
    assert (tmp_path / "out" / INDEX).exists()


def test_inside_the_source(tmp_path: Path) -> None:
    source = tiny_directory(tmp_path / "source")
    convert(source, source / "mlx")
    assert same_weights(source, source / "mlx")


def test_a_relative_destination(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = shutil.copytree(GOLDEN / "llama", tmp_path / "source")
    monkeypatch.chdir(tmp_path)
    report = convert("./source", "out")
    assert report.destination == Path(os.path.abspath("out"))
    assert same_weights(source, tmp_path / "out")


@pytest.mark.long
def test_memory_is_bounded_by_a_block(tmp_path: Path) -> None:
    """Converts a matrix of 128 MB, mostly a hole in the file, in blocks of 1 MB."""
    config = config_of("llama", vocab_size=8, tie_word_embeddings=True, num_hidden_layers=1, hidden_size=128, num_attention_heads=8)
    source = random_checkpoint(tmp_path / "source", config)
    grow(source / "model.safetensors", "model.embed_tokens.weight", (1 << 18, 128))
    edit_config(source, vocab_size=1 << 18)
    script = "from mlxinfer.convert import convert; from mlxinfer.convert.write import reader\nreader.BLOCK = 1 << 18\n"
    before, _ = peak_rss(script)
    peak, _ = peak_rss(script + "convert(sys.argv[1], sys.argv[2], bits=4, measure=False)", str(source), str(tmp_path / "out"))
    assert (tmp_path / "out" / "model.safetensors").stat().st_size > 18e6
    assert peak < before + 64e6


def test_a_gguf_keeps_all_its_end_tokens(tmp_path: Path) -> None:
    """The tokenizer knows several end tokens; the files that it saves name one."""
    source = tmp_path / "model.gguf"
    shutil.copyfile(GOLDEN.parent / "gguf" / "llama.gguf", source)
    tokenizer = load_tokenizer(open_checkpoint(source))
    tokenizer.eos_token_ids = frozenset({2, 5, 7})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mlxinfer.convert.pipeline.load_tokenizer", lambda checkpoint: tokenizer)
        convert(source, tmp_path / "out", measure=False)
    assert load(tmp_path / "out").tokenizer.eos_token_ids >= {2, 5, 7}


@pytest.mark.model
def test_a_gguf_keeps_its_exact_formats(tmp_path: Path) -> None:
    report = convert(SMOLLM2, tmp_path / "out", measure=False)
    stored = SafetensorsCheckpoint(tmp_path / "out")
    assert report.actions["kept"] == 211
    assert stored.stored("model.layers.0.mlp.up_proj.weight") == Format(4, 32)
    assert max(tensor.error for tensor in report.tensors) < 1e-3
    assert report.bits_per_weight < 6
    source = open_checkpoint(resolve(SMOLLM2).path)
    converted, original = load_tokenizer(open_checkpoint(tmp_path / "out")), load_tokenizer(source)
    text = "The capital of France is Paris. <|im_start|>user\n"
    assert converted.encode(text) == original.encode(text)
    assert converted.chat_template == original.chat_template
    for name in sorted(source.names())[::16]:  # visits each of a layer's nine tensors
        assert mx.allclose(numbers(stored.read(name)), numbers(source.read(name)), rtol=1e-3, atol=1e-6).item()


def test_a_dense_matrix_of_an_mlx_directory(tmp_path: Path) -> None:
    source = quantized_source(tmp_path, bits=4, group_size=32)
    checkpoint = SafetensorsCheckpoint(source)
    assert isinstance(checkpoint.read("model.norm.weight"), Dense)
    assert isinstance(checkpoint.read("model.embed_tokens.weight"), Quantized)
