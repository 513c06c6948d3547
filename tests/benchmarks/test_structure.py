"""What the tree is measured by, and that its picture in the docs is today's."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.structure import PICTURE, arrows, docstrings, layers, measures, modules, picture, undocumented_fields

FILES = {
    "__init__.py": "",
    "low/__init__.py": "",
    "low/one.py": '"""Of nothing."""\nX = 1\n',
    "high/__init__.py": "",
    "high/two.py": (
        "from dataclasses import dataclass\nfrom ..low.one import X\nfrom ..low import one\n\n"
        '@dataclass\nclass Point:\n    x: int\n    """Metres."""\n    y: int = X\n    _z: int = 0\n'
    ),
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / "mlxinfer" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


@pytest.mark.long
def test_the_picture_and_the_docstrings_are_in_order() -> None:
    """Read once for all three: the picture is that of the imports, every public field is explained, and no docstring dangles."""
    here = modules()
    assert PICTURE.read_text(encoding="utf-8") == picture(here), "python -m benchmarks structure --draw"
    assert list(undocumented_fields(here)) == []
    assert [place for place, text in docstrings(here) if text.lstrip().startswith("Of ")] == []


def test_imports_of_modules_and_names_are_counted_once_a_file(tree: Path) -> None:
    assert arrows(modules(tree)) == {("high", "low"): 1}


def test_fields_and_docstrings_are_found(tree: Path) -> None:
    found = modules(tree)
    assert [place.rpartition(" ")[2] for place in undocumented_fields(found)] == ["Point.y"]
    assert {text for _, text in docstrings(found)} == {"Of nothing.", "Metres."}


def test_the_table(tree: Path) -> None:
    table = measures(tree)
    assert table["files"] == "5"
    assert table['docstrings that begin with "Of"'] == "1"
    assert table["imports between folders"] == "1"


def test_a_folder_stands_below_all_that_import_it() -> None:
    assert layers([("c", "b"), ("b", "a"), ("c", "a")]) == [["a"], ["b"], ["c"]]
    with pytest.raises(ValueError, match="import one another"):
        layers([("a", "b"), ("b", "a")])
