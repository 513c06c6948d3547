"""The registry of environment variables is complete."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from support.prose import python_files

from mlxinfer.util.environment import VARIABLES

ROOT = Path(__file__).parents[2]
PACKAGE = [ROOT / name for name in ("mlxinfer", "convert", "kernels_cpu", "kernels_metal")]
NAME = re.compile(r"MLXINFER_[A-Z_]+")
GETENV = re.compile(r'getenv\("(MLXINFER_[A-Z_]+)"\)')


def _names_in_python(file: Path) -> set[str]:
    nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    texts = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return {text for text in texts if NAME.fullmatch(text)}


def test_the_registry_has_the_names_of_the_code_and_no_others() -> None:
    registry = ROOT / "mlxinfer" / "util" / "environment.py"
    files = [file for file in (*python_files(*PACKAGE), ROOT / "setup.py") if file != registry]
    used = {name for file in files for name in _names_in_python(file)}
    native = [file for suffix in ("*.cpp", "*.h") for file in (ROOT / "kernels_cpu").rglob(suffix)]
    used |= {name for file in native for name in GETENV.findall(file.read_text(encoding="utf-8"))}
    assert used == {variable.name for variable in VARIABLES}


@pytest.mark.parametrize(
    ("name", "text", "valid"),
    [
        ("MLXINFER_THREADS", "256", True),
        ("MLXINFER_THREADS", "0", False),
        ("MLXINFER_THREADS", "²", False),
        ("MLXINFER_PACKED_GB", ".5", True),
        ("MLXINFER_PACKED_GB", "1e3", False),
        ("MLXINFER_CPU_KERNELS", "0", True),
        ("MLXINFER_CPU_KERNELS", "off", False),
        ("MLXINFER_CPU_ISA", "avx2", True),
        ("MLXINFER_CPU_PRECISION", "int4", False),
    ],
)
def test_values_are_checked(name: str, text: str, valid: bool) -> None:
    (variable,) = [each for each in VARIABLES if each.name == name]
    assert variable.is_valid is not None
    assert variable.is_valid(text) is valid
