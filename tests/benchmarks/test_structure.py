"""Measures of the source tree, and the picture of its layers in the docs."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.structure import PICTURE, arrows, layers, measures, modules, picture

FILES = {
    "__init__.py": "",
    "low/__init__.py": "",
    "low/one.py": '"""Of nothing."""\nX = 1\n',
    "high/__init__.py": "",
    "high/two.py": "from ..low.one import X\nfrom ..low import one\n",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / "mlxinfer" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


@pytest.mark.long
def test_the_picture_shows_the_imports() -> None:
    assert PICTURE.read_text(encoding="utf-8") == picture(modules()), "python -m benchmarks structure --draw"


def test_imports_of_modules_and_names_are_counted_once_a_file(tree: Path) -> None:
    assert arrows(modules(tree)) == {("high", "low"): 1}


def test_measures(tree: Path) -> None:
    table = measures(tree)
    assert table["files"] == "5"
    assert table["imports between folders"] == "1"


def test_a_folder_is_below_its_importers() -> None:
    assert layers([("c", "b"), ("b", "a"), ("c", "a")]) == [["a"], ["b"], ["c"]]
    with pytest.raises(ValueError, match="import one another"):
        layers([("a", "b"), ("b", "a")])
