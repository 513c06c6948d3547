"""docs/models.md is what the tests of this folder say."""

from __future__ import annotations

import json

import pytest
from support.models.families import GOLDEN, LIMIT, NAMES
from support.models.models_page import PAGE, errors, rows, titles

from mlxinfer.models import FAMILIES

COMMAND = "python -m pytest tests/families --write-models-table"


def test_every_family_has_a_golden_checkpoint() -> None:
    kinds = {json.loads((GOLDEN / name / "config.json").read_text(encoding="utf-8"))["model_type"] for name in NAMES}
    assert kinds == set(FAMILIES)


def test_the_page_has_every_family_and_column(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--write-models-table", False):
        pytest.skip("the page is being written")
    text = PAGE.read_text(encoding="utf-8")
    assert list(rows(text)) == list(FAMILIES), COMMAND
    columns = {mark.args[0] for item in request.session.items for mark in item.iter_markers("column")}
    assert not columns or columns <= set(titles(text)), COMMAND
    assert all(len(cells) == len(titles(text)) for cells in rows(text).values())
    assert all(0 < error < LIMIT for error in errors(text))


def test_every_cell_that_says_no_has_a_reason() -> None:
    text = PAGE.read_text(encoding="utf-8")
    numbers = {cell.strip("no ()") for cells in rows(text).values() for cell in cells if cell.startswith("no (")}
    assert all(f"\n{number}. " in text for number in numbers)
