"""A module that was built before there were instructions for whole blocks."""

from types import SimpleNamespace

import pytest

from mlxinfer import kernels_cpu
from mlxinfer.kernels_cpu import native


def test_an_old_module_says_what_it_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    old = SimpleNamespace(isa_name=lambda: "avx2", thread_count=lambda: 2)
    monkeypatch.setattr(native, "_native", lambda: native._Native(old))  # type: ignore[arg-type]
    monkeypatch.setattr(native, "native", lambda: old)
    assert "avx2, 2 threads; the module is older than this version, and blocks run operation by operation" in kernels_cpu.status()
    assert "and 8-bit floats with float scales are unpacked, to four times their size; rebuild it" in kernels_cpu.status()
    monkeypatch.setattr(old, "instructions_version", native.INSTRUCTIONS_VERSION, raising=False)
    assert "older than this version, and 8-bit floats" in kernels_cpu.status()


@pytest.mark.skipif(not (kernels_cpu.can_run_blocks() and kernels_cpu.packs_float8()), reason=kernels_cpu.status())
def test_the_module_of_this_version_says_nothing() -> None:
    assert "older" not in kernels_cpu.status()
