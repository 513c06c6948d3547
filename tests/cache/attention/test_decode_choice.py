"""Attention of one row: by the decode kernel or by plain MLX, whichever is faster on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support.kernels.emulated import emulated, needs_emulator
from support.kernels.fake_device import Device, pretend_to_measure

from mlxinfer.cache.attention import decode_choice, select
from mlxinfer.cache.attention.decode_choice import _Case
from mlxinfer.cache.attention.metal import METAL
from mlxinfer.cache.attention.reference import PlainAttention
from mlxinfer.cache.attention.trial import DECODE_TRIAL, PREFILL_TRIAL, kind_of
from mlxinfer.cache.base import AttentionSpec
from mlxinfer.cache.kv_format import KVFormat
from mlxinfer.kernels_metal import executors, kept_trials
from mlxinfer.kernels_metal.executors import run_with
from mlxinfer.kernels_metal.kernel_trial import Speed

MS = 1e-3
SPEC, FORM = AttentionSpec(2, 64, 64, query_heads=8), KVFormat()


@pytest.fixture(autouse=True)
def passed(monkeypatch: pytest.MonkeyPatch) -> None:
    """All kernels pass their trials, of which none is known; measured layers are small."""
    for trial in (DECODE_TRIAL, PREFILL_TRIAL):
        monkeypatch.setattr(trial, "verdicts", {})
        monkeypatch.setattr(trial, "_check", lambda *kind: None)
    monkeypatch.setattr(decode_choice, "_BYTES", 1 << 20)
    monkeypatch.setattr(decode_choice, "TOKENS", 256)
    monkeypatch.setattr(select, "has_gpu_kernels", lambda: True)
    monkeypatch.setattr(select.kernels_cpu, "in_use", lambda: False)
    monkeypatch.delenv(select.SWITCH, raising=False)


def filled(case: _Case) -> _Case:
    """Return the case with random numbers."""
    random = np.random.default_rng(1)

    def numbers(a: mx.array) -> mx.array:
        return mx.array(random.integers(0, 1 << 32, a.shape, np.uint32) if a.dtype == mx.uint32 else random.normal(size=a.shape)).astype(
            a.dtype
        )

    for store in case.layers:
        store.sealed, store.kept = [numbers(a) for a in store.sealed], [numbers(a) for a in store.kept]
    case.queries = numbers(case.queries)
    return case


@needs_emulator
@pytest.mark.parametrize("form", [FORM, KVFormat(8, 4, first16=True)], ids=lambda form: form.name)
@pytest.mark.parametrize(
    "spec", [SPEC, AttentionSpec(1, 64, 32, query_heads=2), AttentionSpec(1, 32, 32, 250, query_heads=1), AttentionSpec(1, 32, 32, 40)]
)
def test_both_ways_attend_to_the_same_tokens(spec: AttentionSpec, form: KVFormat) -> None:
    case = filled(_Case(spec, mx.float32, form))
    with emulated():
        for number in (0, len(case.layers) - 1):
            got, expected = (way(case.queries, number) for way in (case.by_kernel, case.by_mlx))
            np.testing.assert_allclose(got, expected, rtol=1e-3, atol=5e-3)
            assert got.shape == case.queries.shape


def on_device(monkeypatch: pytest.MonkeyPatch, kernel: float, mlx: float, alone: float = 1.0) -> Device:
    """Return a device on which attention by the kernel, by plain MLX, and by MLX's attention alone takes these milliseconds."""
    device = pretend_to_measure(monkeypatch)
    for name, seconds in (("by_kernel", kernel), ("by_mlx", mlx)):
        monkeypatch.setattr(_Case, name, device.takes(seconds * MS, lambda case, q, number: q))
    monkeypatch.setattr(_Case, "attend", device.takes(alone * MS, lambda case, q, k, v: q))
    return device


@pytest.mark.parametrize(("kernel", "used"), [(0.5, True), (1.02, True), (1.05, False), (3.0, False)])
def test_the_faster_way_is_used(kernel: float, used: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    on_device(monkeypatch, kernel, 1.0)
    backend = select.gpu_backend(SPEC, mx.float32, FORM)
    reason = f"the kernel has only {1 / kernel:.3g}x its speed"
    assert backend == (METAL if used else PlainAttention(reason, faster=True))
    assert select.attention_lines([SPEC], FORM, mx.float32) == ["layer 0: " + ("Metal kernels" if used else f"plain MLX ({reason})")]
    assert select.fallback_lines([SPEC], FORM, mx.float32) == []  # nothing is slower than it could be
    choice = f"this project's kernel, {1 / kernel:.3g}x plain MLX" if used else f"plain MLX instead: {reason}"
    assert select.tried_decode_lines() == [f"attention, 4 heads of 64 per KV head, kv 16, float32: {choice}"]


def test_quantized_pages_are_left_to_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor tells its speed."""
    on_device(monkeypatch, 2.0, 1.0)
    assert select.gpu_backend(replace(SPEC, window=500), mx.float32, KVFormat(4, 4)) == METAL
    (line,) = select.tried_decode_lines()
    assert line == "attention, 4 heads of 64 per KV head in a window, kv 4, float32: this project's kernel, 0.5x plain MLX"


def test_a_kernel_that_fails_is_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DECODE_TRIAL, "_check", lambda *kind: "zeros")
    assert isinstance(backend := select.gpu_backend(SPEC, mx.float32, FORM), PlainAttention)
    assert not backend.faster
    (line,) = select.fallback_lines([SPEC], FORM, mx.float32)
    assert line.endswith("failed their trial: zeros: plain MLX instead")


def test_a_choice_is_read_by_the_next_process_and_lasts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(executors, "kind", lambda: "Metal")
    monkeypatch.setattr(kept_trials, "trials_file", lambda: tmp_path / "kernel_trials.json")

    def chosen(kernel: float, *, again: bool = False) -> tuple[bool, int]:
        """True if the kernel is used, and the number of evaluations."""
        monkeypatch.setattr(DECODE_TRIAL, "verdicts", {})
        with monkeypatch.context() as changed:
            device = on_device(changed, kernel, 1.0)
            return DECODE_TRIAL.try_now(*kind_of(SPEC, mx.float32, FORM), again=again).obstacle is None, device.evaluations

    assert chosen(0.9)[0]
    assert chosen(3.0) == (True, 0)
    assert [chosen(kernel, again=True)[0] for kernel in (1.05, 1.08, 1.12, 1.05, 1.01)] == [True, True, False, False, True]


def test_nothing_is_measured_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    device = on_device(monkeypatch, 3.0, 1.0)
    monkeypatch.setattr(executors, "measurable", lambda: False)
    monkeypatch.setattr(decode_choice, "measurable", lambda: False)
    assert select.gpu_backend(SPEC, mx.float32, FORM) == METAL
    assert len(select.usual_decode_lines()) == 2
    assert not any("joined keys" in line or "x plain" in line for line in select.tried_decode_lines())
    assert device.evaluations == 0


def test_the_doctor_compares_attention_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    on_device(monkeypatch, 0.5, 1.0, alone=0.4)
    monkeypatch.setattr(decode_choice, "measurable", lambda: True)
    chosen, alone = select.usual_decode_lines()
    assert "4 heads of 128 per KV head, kv 16" in chosen
    assert chosen.endswith("this project's kernel, 2x plain MLX")
    assert alone == "attention to 256 tokens: 0.8x MLX's attention to joined keys"


@needs_emulator
def test_what_is_measured_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Callable[..., Any]] = []

    def compare(ours: Callable[..., mx.array], theirs: Callable[..., mx.array], x: mx.array, *, steps: int, busy: bool) -> Speed:
        asked.extend((ours, theirs))
        for step in (ours, theirs):
            y = x
            for number in range(steps):
                y = step(y, number)
            mx.eval(y)
        return Speed(1.5)

    monkeypatch.setattr(decode_choice, "compare", compare)
    monkeypatch.setattr(decode_choice, "measurable", lambda: True)
    with emulated():
        assert decode_choice.speeds(*kind_of(SPEC, mx.float32, FORM)) == {1: Speed(1.5)}
        assert decode_choice.on_joined_keys(SPEC, mx.float32, FORM) == Speed(1.5)
    assert len(asked) == 4


def test_the_measured_sequence_is_divided_as_in_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that `combine` is measured too."""
    monkeypatch.setattr(decode_choice, "TOKENS", 1024)
    launched: list[str] = []

    def maker(*, name: str, **_: Any) -> Callable[..., list[mx.array]]:
        def call(*, output_shapes: Any, output_dtypes: Any, **_: Any) -> list[mx.array]:
            launched.append(name)
            return [mx.zeros(*made) for made in zip(output_shapes, output_dtypes, strict=True)]

        return call

    with run_with(maker):
        case = _Case(SPEC, mx.float32, FORM)
        case.by_kernel(case.queries, 0)
    assert launched == ["paged_attention_decode", "paged_attention_combine"]
