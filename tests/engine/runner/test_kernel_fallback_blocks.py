"""GGUF blocks whose kernel fails during an answer are unpacked once, within the planned memory; answers continue."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from support.formats.tiny_kquants import write_tiny_kquants
from support.kernels.on_gpu import pretend_gpu

from mlxinfer import LLM, SamplingParams
from mlxinfer.engine.runner.kernel_fallback import unpacking
from mlxinfer.kernels_metal.kernel_trial import Speed, Verdict
from mlxinfer.kernels_metal.quantized_matmul import launcher
from mlxinfer.kernels_metal.quantized_matmul.reference import dequantized
from mlxinfer.nn import packing, small_batch_matmul
from mlxinfer.nn.weights import Blocks, Dense, Format

GREEDY = SamplingParams(temperature=0, max_tokens=12)
FORMS = (Format(4, 32, "Q4_K"), Format(6, 16, "Q6_K"))
ERROR = RuntimeError("[METAL] Command buffer execution failed: Caused GPU Timeout Error")


class Kernel:
    """The kernels' results in plain MLX, until they fail."""

    def __init__(self) -> None:
        self.left = 10**9
        self.products = self.unpacked = 0

    def multiply(self, x: mx.array, weight: mx.array, kind: str) -> mx.array:
        self.products += 1
        self.left -= 1
        if self.left < 0:
            raise ERROR
        return x @ dequantized(weight, kind, x.dtype).T

    def unpack(self, weight: mx.array, kind: str, dtype: mx.Dtype) -> mx.array:
        return dequantized(weight, kind, dtype)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """As on a Mac that multiplies blocks."""
    found = Kernel()
    pretend_gpu(monkeypatch, ("Q4_K", "Q6_K"))
    monkeypatch.setattr(small_batch_matmul, "is_gpu", lambda: True)
    used = Verdict(speeds=dict.fromkeys(launcher.ROWS, Speed(1.0)))
    monkeypatch.setattr(small_batch_matmul.TRIAL, "verdicts", {(form, mx.float32, ""): used for form in FORMS})
    monkeypatch.setattr(packing, "try_format", lambda *_, **__: None)
    monkeypatch.setattr(launcher, "block_matmul", found.multiply)
    monkeypatch.setattr(launcher, "block_dequantize", found.unpack)
    return found


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_tiny_kquants(tmp_path / "k.gguf")


def stored(llm: LLM) -> set[type]:
    return {type(holder.matrix) for holder in packing.holders(llm.loaded.model)}


def growth(llm: LLM) -> int:
    return unpacking([llm.loaded.model], mx.float32).nbytes


def matrices(llm: LLM) -> tuple[int, int]:
    """(number of matrices, growth of all in bytes)."""
    found = [holder.matrix for holder in packing.holders(llm.loaded.model)]
    return len(found), sum(4 * m.shape[0] * m.shape[1] - m.weight.nbytes for m in found)


def opened(file: Path, **options: Any) -> LLM:
    return LLM(file, dtype="float32", max_context=128, prefix_cache=False, **options)


def test_blocks_are_unpacked_once(file: Path, kernel: Kernel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with opened(file, max_num_seqs=2) as llm:
        expected = llm.generate("abc", GREEDY)[0].token_ids
        assert stored(llm) == {Blocks}
        assert growth(llm) == 0
        taken, kernel.left = llm.engine.config.kv_cache_tokens, 40
        count, whole = matrices(llm)
        assert llm.generate("abc", GREEDY)[0].token_ids == expected
        assert stored(llm) == {Dense}
        assert f"{count} of {count} matrices of GGUF blocks are unpacked once, which takes {whole / 1e6:.0f} MB" in caplog.text
        assert "every product" not in caplog.text
        assert llm.engine.config.kv_cache_tokens == taken  # the plan had left so much
        calls = kernel.products
        monkeypatch.setattr(Blocks, "dequantize", None)  # nothing is left to unpack
        assert llm.generate("abc", GREEDY)[0].token_ids == expected
        assert kernel.products == calls


@pytest.mark.parametrize("share", [0.5, 0.0])
def test_the_cache_makes_room_as_far_as_it_can(file: Path, kernel: Kernel, caplog: pytest.LogCaptureFixture, share: float) -> None:
    with opened(file, max_num_seqs=2) as llm:
        expected = llm.generate("abc", GREEDY)[0].token_ids
        engine = llm.engine
        token = engine.cache.token_bytes(engine.model.layers, mx.float32, engine.kv)
        count, whole = matrices(llm)
        more = int(share * whole / token)
        engine.config = replace(engine.config, kv_cache_tokens=engine.config.max_context + more)
        engine._take_memory = lambda wanted: 0
        kernel.left = 30
        assert llm.generate("abc", GREEDY)[0].token_ids == expected
        now = engine.config.kv_cache_tokens
        dense = [h.matrix for h in packing.holders(llm.loaded.model) if isinstance(h.matrix, Dense)]
        assert engine.config.max_context <= now <= engine.config.max_context + more
        assert bool(dense) == bool(share)
        assert stored(llm) == ({Dense, Blocks} if share else {Blocks})
        assert f"{len(dense)} of {count} matrices" in caplog.text
        assert "the others are unpacked for every product until the model is loaded again" in caplog.text
        assert (f"holds {now} tokens instead of" in caplog.text) == bool(share)
        grown = sum(m.weight.nbytes * (1 - 4.5 / 32) for m in dense)
        assert grown <= (engine.config.max_context + more - now) * token * 1.1
