"""Exact comparisons on a virtual GPU: floats may differ by 1e-3 there, and nothing else is judged less strictly."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from support import exact

from mlxinfer.cache.base import PAGE

HERE = """
import mlx.core as mx
import numpy as np
import pytest

X = np.linspace(1, 2, 7, dtype=np.float32)
CLOSE = {"float32": 2e-5}

def near(found): np.testing.assert_allclose(found, X, atol=CLOSE["float32"])

def test_bits(by): assert np.array_equal(X + by, X)
def test_bits_of_mlx(by): assert mx.array_equal(mx.array(X + by), mx.array(X)).item()
def test_bound(by): assert np.abs(X + by - X).max() < 1e-5
def test_share(by): assert np.abs(10 * (X + by) - 10 * X).max() < 1e-5 * max(1.0, 10.0)
def test_helper(by): near(X + by)
def test_default(by): np.testing.assert_allclose(X + by, X)
def test_approx(by): assert 2.0 + by == pytest.approx(2.0)
def test_loose(by): assert np.abs(X + by - X).max() < 2e-3
def test_integers(by): assert np.array_equal((X + by > 1.00005).astype(int), (X > 1.00005).astype(int))
def test_differ(by): assert by > 1e-3 or not np.array_equal(X + by, X)
def test_nan(by): assert np.array_equal(X * np.nan, X * np.nan, equal_nan=True)
def test_shapes(by): assert np.array_equal(X[:int(7 - 1e5 * by)], X)
"""
MARKED = ["bits", "bits_of_mlx", "bound", "share", "helper", "default", "approx", "integers", "shapes"]


def _failed(folder: Path, by: float, *options: str, virtual: bool) -> list[str]:
    """Run the tests with results that differ by so much. Return the names of those that fail."""
    (folder / "conftest.py").write_text(
        "import pytest\nfrom support import exact\nexact._TESTS = __file__.rpartition('/')[0]\n"
        f"exact.is_virtual = lambda: {virtual}\n@pytest.fixture\ndef by(): return {by}\n"
    )
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = exact\n")
    (folder / "test_here.py").write_text(HERE)
    command = [sys.executable, "-m", "pytest", "-q", "-rf", "-p", "support.exact", "-p", "no:cacheprovider", *options, str(folder)]
    path = os.pathsep.join([*map(str, Path(__file__).parents[1:3]), os.environ.get("PYTHONPATH", "")])  # for support, and the package
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "", "PYTHONPATH": path}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return re.findall(r"^FAILED \S+::test_(\w+)", done.stdout, re.MULTILINE)


def test_a_small_difference_of_floats_passes_on_a_virtual_gpu(tmp_path: Path) -> None:
    assert _failed(tmp_path, 1e-4, virtual=True) == ["integers", "shapes"]
    assert _failed(tmp_path, 1e-4, virtual=False) == MARKED


def test_a_larger_difference_fails(tmp_path: Path) -> None:
    assert _failed(tmp_path, 3e-3, virtual=True) == [*MARKED[:7], "loose", *MARKED[7:]]


def test_tests_can_be_chosen_by_the_mark(tmp_path: Path) -> None:
    assert _failed(tmp_path, 1e-2, "-m", "exact", virtual=False) == MARKED
    assert _failed(tmp_path, 1e-2, "-m", "not exact", virtual=False) == ["loose"]


def test_comparisons_of_the_package_stay_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = mx.array([1.0]), mx.array([1.0001])
    scope = {"__file__": str(Path(exact.__file__).parents[2] / "mlxinfer" / "x.py"), "mx": mx, "np": np, "x": x, "y": y}
    with exact.judged_at_bound():
        assert mx.array_equal(x, y).item()
        assert not eval("mx.array_equal(x, y).item()", scope)
        assert not eval("np.allclose(np.array(x), np.array(y))", scope)
        assert eval("np.allclose(np.array(x), np.array(y), 1e-3)", scope)


@pytest.mark.parametrize(
    ("message", "passes"),
    [
        ("assert 3e-05 < 1e-05", True),
        ("assert np.float32(0.00012) < 0.0001\n +  where ...", True),
        ("assert 0.0123 < (0.0001 * 40.1)\n +  where 40.1 = max()", True),
        ("assert 0.0523 < (0.0001 * 40.1)", False),
        ("tower\nassert 3e-05 < 1e-05", True),
        ("assert 0.002 < 0.0001", False),
        ("assert 3 < 2", False),
        ("assert 0.0005 < (1e-05 + 0.1)", False),
        ("assert nan < 0.0001", False),
        ("assert inf < 0.0001", False),
        ("assert False", False),
        ("assert 'a' == 'b'", False),
    ],
)
def test_messages_that_are_within_the_bound(message: str, passes: bool) -> None:
    assert exact.within_bound(message) == passes


def test_a_mark_needs_a_comparison() -> None:
    def counts() -> None:
        assert PAGE * 2 > 5

    assert not exact.is_exact(counts)
    assert exact.is_exact(test_comparisons_of_the_package_stay_exact)
