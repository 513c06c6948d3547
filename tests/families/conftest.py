"""Writes the table of docs/models.md from a run of this folder: `python -m pytest tests/families --write-models-table`."""

from __future__ import annotations

from collections.abc import Generator

import pytest
from support.models.models_page import Cell, Page


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-models-table", action="store_true", help="write the results of tests/families into docs/models.md")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--write-models-table"):
        config.pluginmanager.register(_Writer(), "models-table")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Attach the cell's row and column to each report, which another process may read."""
    for item in items:
        marker = item.get_closest_marker("column")
        if marker and isinstance(item, pytest.Function):
            item.user_properties += [("column", marker.args[0]), ("golden", item.callspec.params["name"])]


class _Writer:
    """Collects the cells of a run, in whichever process the tests ran."""

    def __init__(self) -> None:
        self.page = Page()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        told = dict(report.user_properties)
        if "column" not in told or not (report.when == "call" or report.skipped):
            return
        reason = report.longrepr[2].removeprefix("Skipped: ") if isinstance(report.longrepr, tuple) else ""
        cell = Cell(report.outcome, reason, str(told.get("cell", "")), float(told.get("error", 0.0)))  # type: ignore[arg-type]
        self.page.add(str(told["golden"]), str(told["column"]), cell)

    @pytest.hookimpl(wrapper=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, object, object]:
        if not hasattr(session.config, "workerinput"):
            self.page.write()
        return (yield)
