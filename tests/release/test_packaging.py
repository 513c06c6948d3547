"""Folders that are links in the repository are packages in the sdist, and in the wheel made from it; the Metal emulator is in neither."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import mlx.core as mx
import pytest
from support.processes.once_per_run import once_per_run

from mlxinfer._version import __version__

ROOT = Path(__file__).parents[2]
LINKED = ["convert", "kernels_cpu", "kernels_metal"]
EMULATOR = "mlxinfer/kernels_metal/emulator"


@pytest.mark.parametrize("name", LINKED)
def test_links_are_relative_and_resolve(name: str) -> None:
    link = ROOT / "mlxinfer" / name
    assert link.is_symlink()
    assert os.readlink(link) == f"../{name}"
    assert link.resolve() == ROOT / name
    assert (link / "__init__.py").is_file()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(
        once_per_run(tmp_path_factory, "packages", lambda: str(_build(tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("dist"))))
    )


def _build(tree: Path, out: Path) -> Path:
    """A folder with the sdist, and the wheel built from it, of a copy of the tree."""
    unwanted = shutil.ignore_patterns("__pycache__", "*.egg-info", "_native.*.so", "_native.json")
    for name in ["mlxinfer", *LINKED]:
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=unwanted)
    for name in ["pyproject.toml", "setup.py", "README.md", "LICENSE"]:
        shutil.copy2(ROOT / name, tree / name)
    command = [sys.executable, "-m", "build", "--no-isolation", "--skip-dependency-check", "--outdir", str(out), str(tree)]
    settings = {**os.environ, "MLXINFER_CPU_KERNELS": "0"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=settings)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def _modules_of_the_tree() -> set[str]:
    names = {f"mlxinfer/{path.relative_to(ROOT / 'mlxinfer')}" for path in (ROOT / "mlxinfer").rglob("*.py")}
    for folder in LINKED:
        files = [path for suffix in ("py", "pyi", "metal", "h", "cpp", "txt") for path in (ROOT / folder).rglob(f"*.{suffix}")]
        names |= {f"mlxinfer/{path.relative_to(ROOT)}" for path in files}
    page = (ROOT / "mlxinfer" / "server" / "page" / "static").rglob("*.*")
    names |= {f"mlxinfer/{path.relative_to(ROOT / 'mlxinfer')}" for path in page}
    return {name for name in names if not name.startswith(f"{EMULATOR}/")}


@pytest.mark.long
def test_sdist_holds_every_module(built: Path) -> None:
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    assert _modules_of_the_tree() <= names
    assert {"LICENSE", "README.md", "pyproject.toml", "setup.py"} <= names
    assert not [name for name in names if name.startswith(EMULATOR)]


@pytest.mark.long
def test_wheel_holds_every_module(built: Path) -> None:
    (archive,) = built.glob("*.whl")
    with zipfile.ZipFile(archive) as wheel:
        names = set(wheel.namelist())
    assert _modules_of_the_tree() <= names
    assert "mlxinfer/py.typed" in names
    assert not [name for name in names if name.startswith((*(f"{name}/" for name in LINKED), "tests/", EMULATOR))]


@pytest.mark.long
def test_wheel_without_the_kernels_is_for_any_system(built: Path) -> None:
    (archive,) = built.glob("*.whl")
    assert archive.name == f"mlxinfer-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(archive) as wheel:
        assert not [name for name in wheel.namelist() if name.endswith((".so", ".dylib", "_native.json"))]
        assert not [name for name in wheel.namelist() if wheel.read(name)[:4] in (b"\x7fELF", b"\xcf\xfa\xed\xfe", b"\xca\xfe\xba\xbe")]


@pytest.mark.long
def test_wheel_imports_outside_the_checkout(built: Path, tmp_path: Path) -> None:
    (archive,) = built.glob("*.whl")
    with zipfile.ZipFile(archive) as wheel:
        wheel.extractall(tmp_path)
    imports = "".join(f"import mlxinfer.{name} as module; print(module.__file__);" for name in LINKED)
    script = f"{imports} import mlxinfer.cli"
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    for line, name in zip(done.stdout.split(), LINKED, strict=True):
        assert line == str(tmp_path / "mlxinfer" / name / "__init__.py")


@pytest.mark.long
@pytest.mark.skipif(mx.metal.is_available(), reason="an Apple GPU runs the kernels whatever the variable says")
def test_the_emulator_needs_a_checkout(built: Path, tmp_path: Path) -> None:
    (archive,) = built.glob("*.whl")
    with zipfile.ZipFile(archive) as wheel:
        wheel.extractall(tmp_path)
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "MLXINFER_KERNELS": "emulator"}
    script = "from mlxinfer.kernels_metal.executors import available; available()"
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith(
        "RuntimeError: MLXINFER_KERNELS=emulator needs a checkout of mlxinfer (pip install -e .): wheels have no emulator"
    )
