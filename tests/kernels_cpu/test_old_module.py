"""A module that was built before there were instructions for whole blocks."""

from types import SimpleNamespace

import pytest

from mlxinfer import kernels_cpu
from mlxinfer.kernels_cpu import native


def test_an_old_module_says_what_it_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    old = SimpleNamespace(isa_name=lambda: "avx2", thread_count=lambda: 2)
    monkeypatch.setattr(native, "_native", lambda: native._Native(old))  # type: ignore[arg-type]
    monkeypatch.setattr(native, "native", lambda: old)
    assert "avx2, 2 threads; the module is older than this version" in kernels_cpu.status()


@pytest.mark.skipif(not kernels_cpu.can_run_blocks(), reason=kernels_cpu.status())
def test_the_module_of_this_version_says_nothing() -> None:
    assert "older" not in kernels_cpu.status()
