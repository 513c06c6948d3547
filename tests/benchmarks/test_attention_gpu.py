"""The benchmark of attention on a GPU. Without a GPU it runs in the emulator, where only its results count."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest
from click import ClickException
from click.testing import CliRunner
from support.kernels.emulated import emulated, needs_emulator

from benchmarks.__main__ import main
from benchmarks.common import options
from benchmarks.kernels import attention_gpu, gpu
from benchmarks.kernels.attention_gpu import Pages, measure, measure_prefill
from mlxinfer.cache.kv_format import KVFormat
from mlxinfer.util import device
from mlxinfer.util.device import DeviceMemory
from mlxinfer.util.mac import Power


@pytest.mark.skipif(mx.metal.is_available() or mx.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_what_it_needs() -> None:
    done = CliRunner().invoke(main, ["attention-gpu"])
    assert done.exit_code == 1
    assert "an Apple GPU, or an NVIDIA GPU and MLX for it" in done.output
    assert "Traceback" not in done.output


@pytest.mark.long
@needs_emulator
def test_all_ways_are_measured_and_right() -> None:
    with emulated():
        results = measure((4, 2, 64), 128, 2, samples=1, layers=2)
    assert [r.name for r in results] == [
        *("MLX, bfloat16", "mlx-lm, 8 bits", "mlx-lm, 4 bits"),
        *("mlxinfer, 16 bits", "mlxinfer, 8 bits", "mlxinfer, k8v4", "mlxinfer, 4 bits"),
    ]
    assert results[0].bytes == 2 * 2 * 2 * 128 * 64 * 2
    assert results[3].bytes == results[0].bytes + 2 * 2 * 64 * 64 * 2
    assert results[6].bytes < 0.3 * results[0].bytes + 2 * 2 * 64 * 64 * 2


@needs_emulator
def test_a_kernel_with_wrong_results_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_gpu, "paged_attention_decode", lambda q, *rest, **options: q)
    with pytest.raises(ClickException, match="answers differ by"):
        measure((4, 2, 64), 128, 1, samples=1, layers=2)


@pytest.mark.long
@needs_emulator
def test_prefill_is_measured_at_every_format() -> None:
    with emulated():
        results = measure_prefill((2, 1, 64), 64, 64, samples=1)
    assert [name for name, _, _ in results] == ["MLX, bfloat16", "mlxinfer, 16", "mlxinfer, 8", "mlxinfer, k8v4", "mlxinfer, 4"]
    assert {work for _, _, work in results} == {2 * 2 * 64 * 64 * 96}


@pytest.fixture
def small_mac(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[tuple[int, int, int], int, int]]:
    """Pretend a Mac of 8 GB, and return what is measured on it."""
    cases = []

    def measured(heads: tuple[int, int, int], length: int, batch: int, samples: int) -> list[attention_gpu.Result]:
        cases.append((heads, length, batch))
        return [attention_gpu.Result("MLX, bfloat16", 1.0, 1)]

    monkeypatch.setattr(attention_gpu, "measure", measured)
    monkeypatch.setattr(attention_gpu, "measure_prefill", lambda *_: [("MLX, bfloat16", 1.0, 1.0)])
    monkeypatch.setattr(device, "device_memory", lambda: DeviceMemory(8_590_000_000, 5_730_000_000))
    monkeypatch.setattr(gpu, "require_gpu", lambda what: None)
    monkeypatch.setattr(gpu, "copy_bandwidth", lambda: 60e9)
    monkeypatch.setattr(gpu, "device_name", lambda: "Apple M1")
    monkeypatch.setattr(gpu, "power", lambda: Power("battery"))
    monkeypatch.setattr(gpu, "thermal_lines", lambda: ["CPU_Speed_Limit = 70"])
    monkeypatch.setattr(options, "RESULTS", tmp_path)
    monkeypatch.setenv("MLX_MAX_OPS_PER_BUFFER", "500")
    monkeypatch.delenv("MLX_MAX_MB_PER_BUFFER", raising=False)
    (tmp_path / "kernels").mkdir()
    return cases


def test_cases_fit_a_mac_of_8_gb(small_mac: list[tuple[tuple[int, int, int], int, int]]) -> None:
    done = CliRunner().invoke(main, ["attention-gpu"])
    assert done.exit_code == 0, done.output
    assert {length for _, length, _ in small_mac} == {1024, 8192, 32768}
    assert all(3 * attention_gpu.case_bytes(*case) <= 5_730_000_000 for case in small_mac)
    assert "32768 tokens, batch 8\n\nleft out: its keys and values take 2.1 GB" in done.output
    assert "Apple M1; power: battery; CPU_Speed_Limit = 70; MLX_MAX_OPS_PER_BUFFER=500" in done.output


def test_lengths_can_be_chosen(small_mac: list[tuple[tuple[int, int, int], int, int]]) -> None:
    assert CliRunner().invoke(main, ["attention-gpu", "--length", "256", "--length", "65536", "--batch", "1"]).exit_code == 0
    assert [length for _, length, _ in small_mac] == [256, 65536] * len(attention_gpu.HEADS)


def test_building_graphs_does_not_count() -> None:
    """A clock that only advances while arrays are computed or graphs are built."""
    now = [0.0]

    def call() -> mx.array:
        now[0] += 1000.0
        return mx.ones(3)

    seconds = gpu.median_time([call, call], samples=2, clock=lambda: now[0])
    assert (seconds, now[0]) == (0.0, 6000.0)


def test_pages_are_scattered_and_counted_in_bytes() -> None:
    pages = Pages((4, 2, 64), KVFormat(4, 4), 640, 2, layers=1)
    ids = pages.plan.table.tolist()
    assert sorted(ids) == list(range(20))
    assert ids != list(range(20))
    assert pages.bytes == sum(a.nbytes for a in pages.layers[0][0]) + 2 * 2 * 64 * 64 * 2
    assert pages.q.dtype == mx.bfloat16
