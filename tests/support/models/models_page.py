"""The tables of docs/models.md: a row for each family, a column for each feature, and the reasons where a cell is empty."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from mlxinfer.models import FAMILIES

from .families import GOLDEN

PAGE = Path(__file__).parents[3] / "docs" / "models.md"


@dataclass(frozen=True)
class Table:
    """A table of the page."""

    command: str
    """Command that writes the table."""
    end: str
    """Line after the table."""
    marker: str
    """Marker of the tests that make its columns."""
    families: Many[str]
    """Its rows, in order."""
    family_of: Callable[[str], str]
    """From the name of a golden checkpoint to its row."""

    @property
    def start(self) -> str:
        """Line before the table."""
        return f"<!-- written by: {self.command} -->\n"


def _model_type(golden: str) -> str:
    return str(json.loads((GOLDEN / golden / "config.json").read_text(encoding="utf-8"))["model_type"])


TEXT = Table("python -m pytest tests/families --write-models-table", "<!-- end of the table -->\n", "column", tuple(FAMILIES), _model_type)


@dataclass(frozen=True)
class Cell:
    """Result of one test."""

    outcome: str
    """pytest's: "passed", "failed" or "skipped"."""
    reason: str = ""
    """Why it was skipped."""
    text: str = ""
    """Text of the cell instead of "yes"."""
    error: float = 0.0
    """Largest error of a logit."""


@dataclass
class Page:
    """The cells of a run."""

    table: Table
    cells: dict[tuple[str, str], list[Cell]] = field(default_factory=dict)
    """By family and column, one cell for each golden checkpoint of the family."""

    def add(self, golden: str, column: str, cell: Cell) -> None:
        self.cells.setdefault((self.table.family_of(golden), column), []).append(cell)

    def write(self) -> None:
        """Replace the table in the page. Raises ValueError if a test failed or was not run."""
        start, end = self.table.start, self.table.end
        before, rest = PAGE.read_text(encoding="utf-8").split(start)
        PAGE.write_text(before + start + self.text() + end + rest.split(end, 1)[1], encoding="utf-8")

    def text(self) -> str:
        """The table in Markdown."""
        columns = sorted(dict.fromkeys(column for _, column in self.cells), key=lambda column: column != "logits")
        lines = ["| family | largest error | " + " | ".join(columns) + " |", "|" + " --- |" * (len(columns) + 2)]
        reasons: list[str] = []
        for family in self.table.families:
            row = [self._shown(self.cells.get((family, column), []), reasons) for column in columns]
            errors = [cell.error for column in columns for cell in self.cells.get((family, column), [])]
            lines.append(f"| `{family}` | {max(errors, default=0.0):.0e} | " + " | ".join(row) + " |")
        notes = [f"{number}. {reason}" for number, reason in enumerate(reasons, 1)]
        return "\n" + "\n".join([*lines, "", *notes, ""] if notes else [*lines, ""]) + "\n"

    @staticmethod
    def _shown(cells: list[Cell], reasons: list[str]) -> str:
        if not cells:
            raise ValueError("a cell has no test: run the whole folder")
        if any(cell.outcome == "failed" for cell in cells):
            raise ValueError("a test failed: nothing is written")
        passed = [cell for cell in cells if cell.outcome == "passed"]
        if passed:
            return passed[0].text or "yes"
        reason = cells[0].reason
        if reason not in reasons:
            reasons.append(reason)
        return f"no ({reasons.index(reason) + 1})"


def name_cells(items: Iterable[pytest.Item], table: Table) -> None:
    """Attach the cell's row and column to each report, which another process may read."""
    for item in items:
        marker = item.get_closest_marker(table.marker)
        if marker and isinstance(item, pytest.Function):
            item.user_properties += [(table.marker, marker.args[0]), ("golden", item.callspec.params["name"])]


class Writer:
    """Collects the cells of a run, in whichever process the tests ran."""

    def __init__(self, table: Table) -> None:
        self.page = Page(table)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        told, marker = dict(report.user_properties), self.page.table.marker
        if marker not in told or not (report.when == "call" or report.skipped or report.failed):
            return
        reason = report.longrepr[2].removeprefix("Skipped: ") if isinstance(report.longrepr, tuple) else ""
        cell = Cell(report.outcome, reason, str(told.get("cell", "")), float(told.get("error", 0.0)))  # type: ignore[arg-type]
        self.page.add(str(told["golden"]), str(told[marker]), cell)

    @pytest.hookimpl(wrapper=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, object, object]:
        if not hasattr(session.config, "workerinput"):
            self.page.write()
        return (yield)


def _lines(text: str, table: Table) -> str:
    return text.split(table.start)[1].split(table.end)[0]


def rows(text: str, table: Table = TEXT) -> dict[str, list[str]]:
    """The cells of each row of the table in a page, without the family and without the error."""
    found = re.findall(r"^\| `(\w+)` \| ([^|]+) \| (.*) \|$", _lines(text, table), re.MULTILINE)
    return {family: cells.split(" | ") for family, _, cells in found}


def titles(text: str, table: Table = TEXT) -> list[str]:
    """The titles of its columns, without the first two."""
    return _lines(text, table).strip().splitlines()[0].strip("| ").split(" | ")[2:]


def errors(text: str, table: Table = TEXT) -> list[float]:
    """The largest error of each row."""
    return [float(error) for error in re.findall(r"^\| `\w+` \| ([^|]+) \|", _lines(text, table), re.MULTILINE)]
