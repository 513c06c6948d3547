"""The second table of docs/models.md is what the tests of this folder say."""

from __future__ import annotations

import json

import pytest
from support.models.models_page import PAGE, errors, rows, titles
from support.models.seeing import GOLDEN
from support.vision.table import NAMES, TABLE

from mlxinfer.vision.families import PROCESSORS


def test_every_family_has_a_golden_checkpoint() -> None:
    kinds = {json.loads((GOLDEN / name / "config.json").read_text(encoding="utf-8"))["model_type"] for name in NAMES}
    assert kinds | {"internvl_chat"} == set(PROCESSORS), "the original form of InternVL is made of the other one"


def test_the_page_has_every_family_and_column(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--write-vision-table", False):
        pytest.skip("the page is being written")
    text = PAGE.read_text(encoding="utf-8")
    assert list(rows(text, TABLE)) == list(NAMES), TABLE.command
    columns = {mark.args[0] for item in request.session.items for mark in item.iter_markers(TABLE.marker)}
    assert columns <= set(titles(text, TABLE)), TABLE.command
    assert all(len(cells) == len(titles(text, TABLE)) for cells in rows(text, TABLE).values())
    assert all(0 < error < 1e-3 for error in errors(text, TABLE))


def test_every_cell_that_says_no_has_a_reason() -> None:
    text = PAGE.read_text(encoding="utf-8")
    numbers = {cell.strip("no ()") for cells in rows(text, TABLE).values() for cell in cells if cell.startswith("no (")}
    table = text.split(TABLE.start)[1].split(TABLE.end)[0]
    assert all(f"\n{number}. " in table for number in numbers)
