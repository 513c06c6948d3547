"""Measures of the source tree, and the picture of its layers in the docs."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.structure import PICTURE, arrows, layers, measures, module_tests, modules, picture

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


def test_tests_are_found_by_the_name_of_their_module(tree: Path) -> None:
    for name in ("low/test_one.py", "low/test_one_topic.py", "low/test_low_one.py", "low/test_oneness.py", "high/test_one.py"):
        (tree / "tests" / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / "tests" / name).touch()
    expected = [f"tests/low/test_{name}.py" for name in ("low_one", "one", "one_topic")]
    assert module_tests(tree)["mlxinfer.low.one"] == expected


def test_a_folder_is_below_its_importers() -> None:
    assert layers([("c", "b"), ("b", "a"), ("c", "a")]) == [["a"], ["b"], ["c"]]
    with pytest.raises(ValueError, match="cycle"):
        layers([("a", "b"), ("b", "a")])
