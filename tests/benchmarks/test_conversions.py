"""The comparison of conversions: what is measured, what is kept, and how it is shown."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from support.models.checkpoints import config_of, random_checkpoint
from support.models.tiny_directory import tiny_directory

from benchmarks import ggml_quantizers
from benchmarks.conversions import step, study
from benchmarks.conversions.jobs import Job, run
from benchmarks.conversions.llama_cpp import everywhere, in_layers, mixture
from benchmarks.conversions.report import paired, table
from benchmarks.conversions.source import _tokenizer, _unpack, samples, write_samples
from benchmarks.conversions.ways import Way, _layers, ways
from mlxinfer.convert import convert


def _result(way: str, bpw: float, windows: list[float]) -> dict:
    engine = way.partition(": ")[0]
    figures = {"kl_mean": float(np.mean(windows)), "kl_stderr": 0.01, "kl_p99": 1.0, "top1": 0.8, "ppl_ratio": 1.1, "positions": 64}
    return {"model": "m", "engine": engine, "way": way, "bpw": bpw, "kl_of_windows": windows, "seconds": 1.0, **figures}


def test_the_table_pairs_results_of_one_size() -> None:
    ours, theirs = _result("mlxinfer fit: 4 bits", 4.5, [0.1, 0.3, 0.2]), _result("llama.cpp, imatrix: Q4_K", 4.52, [0.2, 0.4, 0.3])
    mean, stderr = paired(ours, theirs)
    assert (mean, stderr) == (pytest.approx(-0.1), pytest.approx(0.0, abs=1e-9))
    text = table([ours, theirs, _result("mx.quantize: 3 bits", 3.5, [1.0, 2.0, 3.0])])
    assert "-0.1000 ± 0.0000 (Q4_K)" in text
    assert text.index("3.50") < text.index("4.50") < text.index("4.52")


def test_results_of_others_have_ours_of_their_size_beside_them() -> None:
    ours = [_result(f"mlxinfer fit: {bits} bits", bits + 0.5, [kl, kl]) for bits, kl in ((3, 0.4), (4, 0.1), (5, 0.02))]
    few = [_result(f"mlxinfer gptq: {bits} bits, 8,192 tokens", bits + 0.5, [kl, kl]) for bits, kl in ((3, 0.3), (4, 0.2))]
    best = _result("mlxinfer gptq: 4 bits", 4.5, [0.01, 0.01])
    others = [_result(way, 4.0, [0.5, 0.6]) for way in ("mx.quantize: 4 bits", "llama.cpp, imatrix: Q3_K, 8,192 tokens")]
    lines = table([*ours, *few, best, *others]).splitlines()
    assert [line.split(" | ")[-1] for line in lines if "mx.quantize" in line] == ["0.200, 0.055 |"]
    assert [line.split(" | ")[-1] for line in lines if "llama.cpp" in line and "Q3_K" in line] == ["0.200, 0.245 |"]
    assert all(line.endswith("|  |") for line in lines if "| mlxinfer" in line)


def test_layers_alone_are_not_compared_with_whole_models() -> None:
    ours = _result("mlxinfer gptq: 4 bits, layers only", 4.5, [0.1, 0.3])
    whole, part = (_result(f"llama.cpp, imatrix: Q4_K{name}", 4.5, [0.2, 0.5]) for name in ("", ", layers only"))
    assert "± " not in table([ours, whole]).splitlines()[-2].rpartition("x1.100")[2]
    assert "(Q4_K, layers only)" in table([ours, whole, part])


def test_ways_have_names_of_their_own() -> None:
    names = [way.key for way in ways()]
    assert len(set(names)) == len(names)
    assert {"mlxinfer fit: 4 bits", "mx.quantize: 4 bits", "llama.cpp, imatrix: Q4_K", "mlx-lm recipes: mixed_4_6"} <= set(names)


def test_a_result_says_of_how_many_tokens_it_is(tmp_path: Path) -> None:
    way = Way("a", "b", lambda source, target: None, pieces=6)
    for piece, title in enumerate(["a: b, 8,192 tokens", "a: b, 16,384 tokens"]):
        (tmp_path / f"m.samples.{piece}.json").write_text("[]")
        assert way.title(tmp_path / "m") == title
    for piece in range(6):
        (tmp_path / f"m.samples.{piece}.json").write_text("[]")
    assert way.title(tmp_path / "m") == "a: b"
    assert Way("a", "c", way.make).title(tmp_path / "m") == "a: c"


def test_a_point_is_measured_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def make(source: Path, target: Path) -> None:
        made.append(target)
        convert(source, target, bits=4, group_size=32, measure=False)

    model = tiny_directory(tmp_path / "model", "mistral")
    way = Way("mlxinfer fit", "4 bits", make)
    found = study.measure("m", model, way, tmp_path, positions=512)
    assert found["kl_mean"] == pytest.approx(np.mean(found["kl_of_windows"]), rel=0.05)
    assert study.merged([{"model": "m", "way": way.key, "kl_mean": -1.0}], tmp_path) == [found]
    assert not made[0].exists()
    left = [job.name for job in step.jobs({"m": model}, tmp_path, ("mlxinfer fit: 4", "mx.quantize: 4 bits"))]
    points = ["mx.quantize: 4 bits", "mx.quantize: 4 bits, layers only", "mlxinfer fit: 4 bits, layers only"]
    assert left == [f"m {name}" for name in ("source", "teacher", *points)]


def test_what_was_made_before_an_interruption_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    model, made = tiny_directory(tmp_path / "model", "mistral"), []
    way = Way("a", "b", lambda source, target: made.append(convert(source, target, bits=4, group_size=32, measure=False)))
    with monkeypatch.context() as patched:
        patched.setattr(study, "compare", interrupted)
        with pytest.raises(KeyboardInterrupt):
            study.measure("m", model, way, tmp_path, positions=512)
    other = Way("a", "c", way.make)  # of the same model, and not made yet
    study.measure("m", model, other, tmp_path, positions=512)
    study.measure("m", model, way, tmp_path, positions=512)
    assert len(made) == 2


def test_only_the_layers_are_quantized(tmp_path: Path) -> None:
    model = random_checkpoint(tmp_path / "model", config_of("llama", hidden_size=64, num_attention_heads=2, head_dim=32))
    way = _layers("a", 4, "fit", group=32)
    assert way.make(model, tmp_path / "made") == 5
    quantized = {name.rpartition(".")[0] for name in mx.load(str(tmp_path / "made" / "model.safetensors")) if name.endswith(".scales")}
    assert quantized
    assert all(".layers." in name for name in quantized)


def test_types_of_mixtures_are_those_of_llama_cpp() -> None:
    """As its files of a model of 30 layers have them, whose embedding is the head."""

    def layers_with(kind: str, types: str, matrix: str) -> list[int]:
        return [n for n in range(30) if mixture(types)(f"model.layers.{n}.{matrix}.weight", 30) == kind]

    more = [0, 1, 2, 5, 8, 11, 14, 17, 20, 23, 26, 27, 28, 29]
    assert layers_with("Q6_K", "Q4_K_M", "mlp.down_proj") == layers_with("Q6_K", "Q5_K_M", "self_attn.v_proj") == more
    assert layers_with("Q4_K", "Q4_K_M", "self_attn.q_proj") == layers_with("Q3_K", "Q3_K_M", "mlp.up_proj") == list(range(30))
    assert layers_with("Q5_K", "Q3_K_M", "self_attn.v_proj") == [0, 1]
    assert layers_with("Q5_K", "Q3_K_M", "mlp.down_proj") == [0]
    assert layers_with("Q4_K", "Q3_K_M", "self_attn.o_proj") == list(range(30))
    assert mixture("Q4_K_M")("model.embed_tokens.weight", 30) == everywhere("Q6_K")("model.embed_tokens.weight", 30) == "Q6_K"
    assert in_layers("Q4_K")("model.embed_tokens.weight", 30) is None


def test_jobs_that_fail_end_only_those_that_need_them(tmp_path: Path) -> None:
    def job(name: str, code: str, needs: tuple[str, ...] = ()) -> Job:
        return Job(name, (sys.executable, "-I", "-S", "-c", code), needs)

    write = f"open({str(tmp_path / 'order')!r}, 'a').write"
    listed = [
        job("d", f"{write}('d')", ("a",)),
        job("a", f"{write}('a')"),
        job("b", "raise SystemExit(1)"),
        job("c", f"{write}('c')", ("b",)),
    ]
    told: list[str] = []
    left = run(listed, side_by_side=2, threads=1, seconds=1e9, logs=tmp_path / "logs", tell=told.append)
    assert left == ["b", "c"]
    assert (tmp_path / "order").read_text() == "ad"
    assert sum("FAILED" in line for line in told) == 1
    assert run(listed, side_by_side=2, threads=1, seconds=0, logs=tmp_path / "logs", tell=told.append) == ["d", "a", "b", "c"]


def test_noise_stays_inside_the_cells(tmp_path: Path) -> None:
    source = tiny_directory(tmp_path / "source", "mistral")
    for name in ("plain", "noisy"):
        convert(source, tmp_path / name, bits=4, group_size=32, dtype="float32", measure=False)
        _unpack(tmp_path / name, noise=name == "noisy")
    plain, noisy = (mx.load(str(tmp_path / name / "model.safetensors")) for name in ("plain", "noisy"))
    moved = [np.abs(np.array(noisy[name] - plain[name])).max() / np.abs(np.array(plain[name])).max() for name in plain]
    assert max(moved) < 0.2
    assert sum(each > 0 for each in moved) >= 3
    again = tmp_path / "again"
    convert(source, again, bits=4, group_size=32, dtype="float32", measure=False)
    _unpack(again, noise=True)
    assert all(mx.array_equal(noisy[name], array) for name, array in mx.load(str(again / "model.safetensors")).items())


@pytest.mark.skipif(find_spec("llama_cpp") is None, reason="llama-cpp-python is not installed")
def test_an_importance_matrix_moves_llama_cpps_error() -> None:
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    rng = np.random.default_rng(0)
    weight, importance = rng.normal(size=(16, 256)).astype(np.float32), rng.gamma(0.3, 1.0, 256).astype(np.float32)

    def error(weights: np.ndarray | None) -> float:
        blocks = ggml_quantizers.quantize(weight, "Q4_K", 256, weights)
        found = dequantize(blocks, GGMLQuantizationType.Q4_K).reshape(weight.shape)
        return float((importance * (found - weight) ** 2).sum())

    assert error(importance) < 0.9 * error(None)


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="matplotlib is not installed")
@pytest.mark.long
def test_the_picture_is_drawn(tmp_path: Path) -> None:
    from benchmarks.conversions.picture import draw

    draw([_result("mlxinfer fit: 4 bits", 4.5, [0.1, 0.3]), _result("llama.cpp, imatrix: Q4_K", 4.5, [0.2, 0.4])], tmp_path / "a.svg")
    assert "Q4_K" in (tmp_path / "a.svg").read_text() or (tmp_path / "a.svg").stat().st_size > 1000


def test_larger_models_read_what_the_smallest_writes(tmp_path: Path) -> None:
    """As text, in their own tokens, once it has been written."""
    folders = {name: tiny_directory(tmp_path / name, "mistral") for name in ("smollm2", "larger")}
    found = {job.name: job.needs for job in step.jobs(folders, tmp_path, ("mlxinfer gptq: 4 bits", "mlxinfer plan: 4.5"))}
    assert found["larger samples 1"] == ("larger source", "smollm2 samples 1")
    assert found["smollm2 samples 1"] == ("smollm2 source",)
    written = [[5, 6, 7, 8, 9], [10, 11, 12]]
    (tmp_path / "smollm2.samples.0.json").write_text(json.dumps(written), encoding="utf-8")
    write_samples(folders["larger"], 0)
    read, tokenizer = samples(folders["larger"]), _tokenizer(folders["larger"])
    assert [tokenizer.decode(ids) for ids in read] == [tokenizer.decode(ids) for ids in written]
