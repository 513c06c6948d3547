"""The compiled module: its generated types, and a module that is older than this version."""

import ast
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace

import pytest
from support.kernels.native_stub import STUB, native_stub

from mlxinfer import kernels_cpu
from mlxinfer.kernels_cpu import native

CURRENT = kernels_cpu.can_run_blocks() and kernels_cpu.packs_float8() and kernels_cpu.can_compute_towers()
built = pytest.mark.skipif(not CURRENT, reason=kernels_cpu.status())


def test_an_old_module_says_what_it_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    old = SimpleNamespace(isa_name=lambda: "avx2", thread_count=lambda: 2)
    monkeypatch.setattr(native, "_loaded", lambda: native._Loaded(old))  # type: ignore[arg-type]
    monkeypatch.setattr(native, "native", old)
    assert "avx2, 2 threads; the module is older than this version, and blocks run operation by operation" in kernels_cpu.status()
    assert "and 8-bit floats with float scales are unpacked, to four times their size, and images" in kernels_cpu.status()
    assert "images take several times as long; rebuild it" in kernels_cpu.status()
    monkeypatch.setattr(old, "instructions_version", native.INSTRUCTIONS_VERSION, raising=False)
    assert "older than this version, and 8-bit floats" in kernels_cpu.status()


@built
def test_the_module_of_this_version_says_nothing() -> None:
    assert "older" not in kernels_cpu.status()


def test_a_missing_module_raises_its_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_loaded", lambda: native._Loaded(None, "not built"))
    with pytest.raises(RuntimeError, match="CPU kernels: not built; matrices and attention then run"):
        native._LazyModule().argmax  # noqa: B018


def test_the_module_loads_at_the_first_access(monkeypatch: pytest.MonkeyPatch) -> None:
    loads = []
    module = ModuleType("_native")
    module.packed_version = 7  # type: ignore[attr-defined]
    monkeypatch.setattr(native, "_loaded", lambda: loads.append(1) or native._Loaded(module))
    lazy = native._LazyModule()
    assert not loads
    assert [lazy.packed_version, lazy.packed_version] == [7, 7]
    assert len(loads) == 1
    assert not hasattr(lazy, "feed_back")


@built
@pytest.mark.skipif(find_spec("nanobind") is None, reason="nanobind is not installed")
def test_the_stub_is_that_of_the_built_module() -> None:
    checked_in, generated = (ast.unparse(ast.parse(text)) for text in (STUB.read_text(encoding="utf-8"), native_stub()))
    assert checked_in == generated
