"""Writes the second table of docs/models.md from a run of this folder: `python -m pytest tests/vision/table --write-vision-table`."""

from __future__ import annotations

import pytest
from support.models.models_page import Writer, name_cells
from support.vision.table import TABLE


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-vision-table", action="store_true", help="write the results of tests/vision/table into docs/models.md")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--write-vision-table"):
        config.pluginmanager.register(Writer(TABLE), "vision-table")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    name_cells(items, TABLE)
