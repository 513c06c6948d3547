"""Settings of a conversion."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxinfer.config import settings_table
from mlxinfer.convert import ConvertArgs, convert
from mlxinfer.errors import UnknownKeywordError

LLAMA = Path(__file__).parents[1] / "golden" / "arch" / "llama"


def test_the_table_in_the_documentation_is_the_list() -> None:
    page = (Path(__file__).parents[2] / "docs" / "conversion.md").read_text(encoding="utf-8")
    assert settings_table(ConvertArgs) in page


def test_one_object_says_the_same_as_keywords(tmp_path: Path) -> None:
    by_object = convert(LLAMA, tmp_path / "object", ConvertArgs(bits=8, encoder="minmax"))
    by_keywords = convert(LLAMA, tmp_path / "keywords", bits=8, encoder="minmax")
    assert by_object.settings == by_keywords.settings
    model = "model.safetensors"
    assert (tmp_path / "object" / model).read_bytes() == (tmp_path / "keywords" / model).read_bytes()


def test_keywords_beside_an_object_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="a ConvertArgs or keywords, not both"):
        convert(LLAMA, tmp_path / "out", ConvertArgs(bits=8), encoder="minmax")
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_keyword_is_told_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UnknownKeywordError, match=r"convert has no keyword 'bit': did you mean bits\?"):
        convert(LLAMA, tmp_path / "out", bit=4)
