"""A GPU kernel that fails during an answer: its layers continue in plain MLX, and every answer is complete."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from support.engines.tiny_engine import UNMEASURED
from support.http.live_server import live_server
from support.models.checkpoints import config_of, random_checkpoint
from support.models.tiny_directory import tiny_directory

from mlxinfer import LLM, AsyncLLM, SamplingParams
from mlxinfer.cache.attention import metal, select, trial
from mlxinfer.cache.attention.metal import MetalAttention
from mlxinfer.cache.attention.reference import PlainAttention
from mlxinfer.engine.client import engine_thread
from mlxinfer.errors import EngineError
from mlxinfer.kernels_metal import kernel_trial
from mlxinfer.kernels_metal.append_rows.launcher import Norm, RowPart
from mlxinfer.kernels_metal.append_rows.reference import appended
from mlxinfer.kernels_metal.paged_attention.plan import DecodePlan
from mlxinfer.kernels_metal.paged_attention.reference import attention_over_pages

PROMPTS = ["The quick brown fox", "jumps over the lazy dog, and " * 7, "abcabcabc"]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=24),
    SamplingParams(temperature=0.9, seed=7, max_tokens=60, logprobs=2),
    SamplingParams(temperature=0.8, seed=3, n=2, max_tokens=30, stop="QZ~"),
]
ERROR = "Thread group size (512) is greater than  the maximum allowed threads per threadgroup (448)."


class Kernels:
    """Decode attention as the kernels compute it, but in plain MLX, and what it does instead once it is broken."""

    def __init__(self) -> None:
        self.broken: Callable[[DecodePlan], bool] = lambda plan: False
        self.error: Exception = ValueError(ERROR)
        self.calls = 0
        self.failed = 0

    def __call__(self, *arrays: Any, **options: Any) -> mx.array:
        self.calls += 1
        if self.broken(arrays[4]):
            self.failed += 1
            raise self.error
        return attention_over_pages(*arrays, **options)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernels]:
    """The choice as it is made on a Mac, with kernels that work, for now."""
    found = Kernels()
    monkeypatch.delenv(select.SWITCH, raising=False)
    monkeypatch.setattr(select.kernels_cpu, "in_use", lambda: False)
    monkeypatch.setattr(select, "has_gpu_kernels", lambda: True)
    monkeypatch.setattr(metal, "paged_attention_decode", found)
    monkeypatch.setattr(metal, "append_rows", appended)

    class Both:
        def __init__(self, parts: Any, append: Any, plan: DecodePlan, **options: Any) -> None:
            self.places, self.append, self.plan = [part.at for part in parts], append, plan
            self.norms, self.waves = [options.pop(name) for name in ("q_norm", "k_norm")], options.pop("waves")
            self.has_bias, self.value_eps = options.pop("has_bias"), options.pop("value_eps")
            self.options = options

        def run(self, rows: Any, old: Any, *pages: Any) -> tuple[mx.array, list[mx.array]]:
            q, k, v, bias, *weights = rows
            parts = [RowPart(array, at) for array, at in zip((q, k, v), self.places, strict=True)]
            norms = [norm and Norm(weight, norm.eps) for norm, weight in zip(self.norms, weights, strict=True)]
            steps = {"bias": bias if self.has_bias else None, "q_norm": norms[0], "k_norm": norms[1], "waves": self.waves}
            q, recent = appended(parts, old, self.append, self.plan.shape, value_eps=self.value_eps, **steps)
            y = found(q, *pages[:3], self.plan, recent=recent, **self.options)
            return y.reshape(len(y), -1), recent

    monkeypatch.setattr(metal, "append_launch", Both)
    monkeypatch.setattr(kernel_trial, "TRIALS", [])  # what other tests have tried is not used here
    trial.forget_trials()
    yield found
    trial.forget_trials()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two kinds of layers, with heads that there are kernels for."""
    target = tiny_directory(tmp_path_factory.mktemp("model"), eos=False)
    sizes = {"hidden_size": 64, "head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 3}
    config = config_of("gemma3_text", **sizes, max_position_embeddings=2048, eos_token_id=None)
    made = random_checkpoint(tmp_path_factory.mktemp("weights") / "m", config)
    for name in ("config.json", "model.safetensors"):
        (target / name).write_bytes((made / name).read_bytes())
    return target


def answers(llm: LLM) -> list[Any]:
    return [(c.token_ids, c.text, c.finish_reason) for c in llm.generate(PROMPTS, PARAMS)]


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[Any]:
    """The answers of plain MLX."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(select.SWITCH, "0")
        patch.setattr(select.kernels_cpu, "in_use", lambda: False)
        with LLM(folder, dtype="float32", prefix_cache=False) as llm:
            assert backends(llm) == {PlainAttention}
            return answers(llm)


def backends(llm: LLM) -> set[type]:
    return {type(backend) for _, backend in llm.engine.cache.attention}


def after(tokens: int, slots: int = 1) -> Callable[[DecodePlan], bool]:
    """Broken where so many sequences are answered together and one of them is so long, but not in a trial, which has two KV heads."""
    return lambda plan: len(plan.sequences) >= slots and max(r.past for r in plan.sequences) >= tokens and plan.shape.kv_heads == 1


@pytest.mark.long
@pytest.mark.parametrize(
    ("error", "speculate"),
    [(ValueError(ERROR), True), (RuntimeError("[METAL] Command buffer execution failed: Caused GPU Timeout Error"), False)],
)
def test_the_answers_come_by_plain_mlx(
    folder: Path, plain: list[Any], kernels: Kernels, error: Exception, speculate: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with LLM(folder, dtype="float32", speculate=speculate, **UNMEASURED) as llm:
        assert backends(llm) == {MetalAttention}
        kernels.error, kernels.broken = error, after(120, slots=2)
        assert answers(llm) == plain
        assert 1 <= kernels.failed <= 2  # where sums with norms are kernels as well, those are given up first
        assert backends(llm) == {PlainAttention}
        assert "plain MLX" in caplog.text
        assert answers(llm) == plain
        lines = select.fallback_lines(llm.loaded.model.layers, llm.kv, llm.dtype)
        assert len(lines) == 1
        assert " ".join(str(error).split()) in lines[0]
        assert llm.stats().running == llm.stats().waiting == 0


@pytest.mark.long
def test_only_layers_that_fail_their_trial_again_are_given_up(folder: Path, plain: list[Any], kernels: Kernels) -> None:
    with LLM(folder, dtype="float32") as llm:
        kernels.broken = lambda plan: plan.window is None and plan.sequences[0].past > 100
        assert answers(llm) == plain
        assert backends(llm) == {MetalAttention, PlainAttention}


@pytest.mark.long
def test_a_stream_goes_on(folder: Path, plain: list[Any], kernels: Kernels) -> None:
    with LLM(folder, dtype="float32") as llm:
        stream = llm.stream(PROMPTS[1], PARAMS[1])
        chunks = [next(stream) for _ in range(5)]
        kernels.broken = lambda plan: True
        chunks += stream
    assert [t for c in chunks for t in c.token_ids] == plain[1][0]
    assert len([p for c in chunks for p in c.logprobs or ()]) == len(plain[1][0])


def test_prompts_are_read_to_their_end(folder: Path, kernels: Kernels) -> None:
    with LLM(folder, dtype="float32") as llm:
        ids = llm.tokenizer.encode(PROMPTS[1])
        expected = llm.logits(ids)
        kernels.broken = lambda plan: True
        step, steps = llm.engine.runner.submit, []

        def failing(*arguments: Any) -> Any:
            steps.append(step(*arguments))
            raise ValueError(ERROR)

        llm.engine.runner.submit = failing  # type: ignore[method-assign]
        assert mx.allclose(llm.logits(ids), expected, atol=1e-4).item()
        assert len(steps) == 1


def test_what_plain_mlx_would_not_mend_ends_the_requests(folder: Path, kernels: Kernels) -> None:
    memory = RuntimeError(
        "[METAL] Command buffer execution failed: Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)"
    )
    with LLM(folder, dtype="float32") as llm:
        for error in (memory, ZeroDivisionError("a bug"), KeyboardInterrupt()):
            kernels.error, kernels.broken = error, lambda plan: True  # type: ignore[assignment]
            with pytest.raises(type(error)):
                llm.generate(PROMPTS[0], PARAMS[0])
            kernels.broken = lambda plan: False
            assert backends(llm) == {MetalAttention}


def test_a_fault_of_plain_mlx_is_not_tried_again(folder: Path, kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(folder, dtype="float32") as llm:
        faults: list[int] = []

        def broken(*_: Any) -> Any:
            faults.append(1)
            raise ValueError("shapes do not fit")

        monkeypatch.setattr(llm.engine.model, "scores", broken)
        with pytest.raises(ValueError, match="do not fit"):
            llm.generate(PROMPTS[0], PARAMS[0])
    assert len(faults) == 2  # with kernels, and without


@pytest.mark.long
def test_asyncio_and_the_server_answer_too(folder: Path, plain: list[Any], kernels: Kernels, tmp_path: Path) -> None:
    async def ask() -> list[Any]:
        async with AsyncLLM(folder, dtype="float32") as llm:
            await llm.generate("warm", SamplingParams(max_tokens=2))
            kernels.broken = after(120)
            found = [(c.token_ids, c.text, c.finish_reason) for c in await llm.generate(PROMPTS, PARAMS)]
            assert llm.stats().restarts == 0
            return found

    assert asyncio.run(ask()) == plain
    assert kernels.failed == 1
    trial.forget_trials()
    kernels.broken, kernels.failed = lambda plan: False, 0
    with live_server({"tiny": lambda: AsyncLLM(folder, dtype="float32")}) as live:
        kernels.broken = after(120)
        body = json.dumps({"model": "tiny", "prompt": PROMPTS[1], "temperature": 0.9, "seed": 7, "max_tokens": 60}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        status, _, answer = live.exchange(head.encode() + body)
        assert (status, json.loads(answer)["choices"][0]["text"]) == (200, plain[1][1])
    assert kernels.failed == 1


def test_an_engine_that_fails_once_an_hour_goes_on(folder: Path, kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(engine_thread, "perf_counter", lambda: now[0])
    kernels.error = RuntimeError("Insufficient Memory")

    async def use() -> int:
        async with AsyncLLM(folder, dtype="float32") as llm:
            for _ in range(3):
                kernels.broken = lambda plan: True
                with pytest.raises(EngineError, match="Insufficient Memory"):
                    await llm.generate(PROMPTS[0], PARAMS[0])
                kernels.broken = lambda plan: False
                assert (await llm.generate(PROMPTS[0], PARAMS[0]))[0].finish_reason == "length"
                now[0] += 3601
            return llm.stats().restarts

    assert asyncio.run(use()) == 3
