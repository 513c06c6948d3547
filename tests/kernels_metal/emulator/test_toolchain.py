"""Where kernels cannot be run, the reason is given; the package is imported all the same."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest

from mlxinfer.kernels_metal import emulator
from mlxinfer.kernels_metal.emulator import build, toolchain


@pytest.fixture(autouse=True)
def _nothing_is_remembered() -> Iterator[None]:
    caches = (toolchain.find, toolchain._version, toolchain._cpu_features, build.toolchain)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def test_on_a_mac(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    assert not emulator.available()
    assert "runs on Linux on x86-64" in str(emulator.why_not())


def _clang(folder: Path, version: str) -> str:
    script = folder / "clang++"
    script.write_text(f'#!/bin/sh\necho "clang version {version}"\n')
    script.chmod(0o755)
    return str(script)


@pytest.mark.skipif(sys.platform != "linux" or platform.machine() != "x86_64", reason="elsewhere that is the reason")
@pytest.mark.parametrize(
    ("version", "reason"),
    [(None, "no clang was found"), ("14.0.6", "is older than 17"), ("19.1.7", "lacks its libraries builtins, asan, tsan, msan")],
)
def test_without_a_usable_clang(version: str | None, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "_cpu_features", lambda: frozenset(toolchain.CPU_FEATURES))
    if version:
        _clang(tmp_path, version)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not emulator.available()
    assert reason in str(emulator.why_not())
    assert "apt-get install clang-19 libclang-rt-19-dev llvm-19" in str(emulator.why_not())
    kernel = emulator.metal_kernel("k", ["x"], ["out"], "out[0] = x[0];")
    with pytest.raises(RuntimeError, match="not available"):
        kernel(inputs=[mx.zeros((1,))], grid=(1, 1, 1), threadgroup=(1, 1, 1), output_shapes=[(1,)], output_dtypes=[mx.float32])


def test_importing_starts_nothing() -> None:
    script = "import subprocess, sys\nsubprocess.Popen = subprocess.run = None\nimport mlxinfer.kernels_metal.emulator"
    subprocess.run([sys.executable, "-c", script], check=True)
