"""Writes the first table of docs/models.md from a run of this folder: `python -m pytest tests/families --write-models-table`."""

from __future__ import annotations

import pytest
from support.models.models_page import TEXT, Writer, name_cells


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-models-table", action="store_true", help="write the results of tests/families into docs/models.md")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--write-models-table"):
        config.pluginmanager.register(Writer(TEXT), "models-table")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    name_cells(items, TEXT)
