"""Where kernels cannot be run, the reason is given; the package is imported all the same."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import mlx.core as mx
import pytest
from support.kernels.fake_clang import install_compiler

from mlxinfer.kernels_metal import emulator
from mlxinfer.kernels_metal.emulator import build, toolchain, trial

ELSEWHERE = sys.platform != "linux" or platform.machine() != "x86_64"
elsewhere_that_is_the_reason = pytest.mark.skipif(ELSEWHERE, reason="elsewhere that is the reason")
INSTALL = "apt-get install clang-19 libclang-rt-19-dev llvm-19"
CACHES = (
    *(toolchain.find, toolchain._common, toolchain._version, toolchain._cpu_features, trial.fixed_addresses),
    *(build.toolchain, build.library, build.program),
)


@pytest.fixture(autouse=True)
def _nothing_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("MLXINFER_EMULATOR_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("MLXINFER_EMULATOR_CLANG", raising=False)
    for function in CACHES:
        function.cache_clear()
    yield
    for function in CACHES:
        function.cache_clear()


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder on the path."""
    folder = tmp_path / "usr" / "bin"
    folder.mkdir(parents=True)
    monkeypatch.setattr(toolchain, "_cpu_features", cache(lambda: frozenset(toolchain.CPU_FEATURES)))
    monkeypatch.setenv("PATH", str(folder))
    return folder


def test_on_a_mac(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    assert not emulator.available()
    assert "runs on Linux on x86-64" in str(emulator.why_not())


@elsewhere_that_is_the_reason
@pytest.mark.parametrize(
    ("version", "reason"),
    [
        (None, "no clang was found"),
        ("14.0.6", "clang++ 14: is older than 17"),
        ("19.1.7", "clang++ 19: lacks its library of builtins"),
    ],
)
def test_without_a_usable_clang(version: str | None, reason: str, programs: Path) -> None:
    if version:
        install_compiler(programs, "clang++", version, builtins=False)
    assert not emulator.available()
    assert emulator.why_not() == f"no compiler for Metal kernels: {reason} ({INSTALL})"
    kernel = emulator.metal_kernel("k", ["x"], ["out"], "out[0] = x[0];")
    with pytest.raises(emulator.Unavailable, match="no compiler"), emulator.count_bytes():
        pass
    with pytest.raises(emulator.Unavailable, match="no compiler"):
        kernel(inputs=[mx.zeros((1,))], grid=(1, 1, 1), threadgroup=(1, 1, 1), output_shapes=[(1,)], output_dtypes=[mx.float32])


@elsewhere_that_is_the_reason
def test_each_sanitizer_has_the_first_compiler_that_can_do_it(programs: Path) -> None:
    install_compiler(programs, "clang++-19", "19.1.7", refused="-fsanitize=thread")
    install_compiler(programs, "clang++", "21.0.0", crashing="-fsanitize=memory")
    found = {mode: toolchain.find(mode) for mode in emulator.MODES}
    names = {mode: Path(one.compiler).name for mode, one in found.items() if isinstance(one, toolchain.Toolchain)}
    assert names == {"fast": "clang++-19", "asan": "clang++-19", "tsan": "clang++", "msan": "clang++-19", "trace": "clang++-19"}


@elsewhere_that_is_the_reason
def test_what_cannot_be_linked_or_run_has_its_reason(programs: Path) -> None:
    install_compiler(programs, "clang++", "21.0.0", refused="-fsanitize=thread", crashing="-fsanitize=memory")
    assert [mode for mode in emulator.MODES if emulator.available(mode)] == ["fast", "asan", "trace"]
    reason = "no ThreadSanitizer for Metal kernels: clang++ 21: cannot link -fsanitize=thread: undefined reference to 'what_is_not_there'"
    assert emulator.why_not("tsan") == f"{reason} ({INSTALL})"
    reason = "no MemorySanitizer for Metal kernels: clang++ 21: links -fsanitize=memory, but the program fails: no memory there"
    assert emulator.why_not("msan") == f"{reason} ({INSTALL})"


@elsewhere_that_is_the_reason
def test_swifts_clang_is_given_its_libdispatch(programs: Path) -> None:
    install_compiler(programs, "clang++", "21.0.0", refused="-fsanitize=thread", cure="-ldispatch")
    assert not emulator.available("tsan")
    toolchain.find.cache_clear()
    folder = programs.parent / "lib" / "swift" / "linux"
    folder.mkdir(parents=True)
    (folder / "libdispatch.so").touch()
    found = toolchain.find("tsan")
    assert isinstance(found, toolchain.Toolchain)
    assert {f"-L{folder}", "-ldispatch"} <= set(found.libraries)
    fast = toolchain.find("fast")
    assert isinstance(fast, toolchain.Toolchain)
    assert fast.libraries == ()


@elsewhere_that_is_the_reason
def test_a_trial_that_went_well_is_not_repeated(programs: Path) -> None:
    log = install_compiler(programs, "clang++", "21.0.0", refused="-fsanitize=thread")

    def links() -> list[str]:
        for mode in emulator.MODES:
            emulator.why_not(mode)
        for function in CACHES:
            function.cache_clear()
        lines = log.read_text().splitlines()
        log.write_text("")
        return [line for line in lines if "-rdynamic" in line]

    assert len(links()) == 4  # fast and trace are the same
    (again,) = links()  # what failed may have been mended
    assert "-fsanitize=thread" in again


def test_importing_starts_nothing() -> None:
    script = "import subprocess, sys\nsubprocess.Popen = subprocess.run = None\nimport mlxinfer.kernels_metal.emulator"
    subprocess.run([sys.executable, "-c", script], check=True)
