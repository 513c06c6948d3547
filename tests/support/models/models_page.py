"""The table of docs/models.md: a row for each family, a column for each feature, and the reasons where a cell is empty."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

from mlxinfer.models import FAMILIES

from .families import GOLDEN

PAGE = Path(__file__).parents[3] / "docs" / "models.md"
START, END = "<!-- written by: python -m pytest tests/families --write-models-table -->\n", "<!-- end of the table -->\n"


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

    cells: dict[tuple[str, str], list[Cell]] = field(default_factory=dict)
    """By family and column, one cell for each golden checkpoint of the family."""

    def add(self, golden: str, column: str, cell: Cell) -> None:
        family = json.loads((GOLDEN / golden / "config.json").read_text(encoding="utf-8"))["model_type"]
        self.cells.setdefault((family, column), []).append(cell)

    def write(self) -> None:
        """Replace the table in the page. Raises ValueError if a test failed or was not run."""
        before, rest = PAGE.read_text(encoding="utf-8").split(START)
        after = rest.split(END)[1]
        PAGE.write_text(before + START + self.table() + END + after, encoding="utf-8")

    def table(self) -> str:
        columns = sorted(dict.fromkeys(column for _, column in self.cells), key=lambda column: column != "logits")
        lines = ["| family | largest error | " + " | ".join(columns) + " |", "|" + " --- |" * (len(columns) + 2)]
        reasons: list[str] = []
        for family in FAMILIES:
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


def rows(text: str) -> dict[str, list[str]]:
    """The cells of each row of the table in a page, without the family and without the error."""
    table = text.split(START)[1].split(END)[0]
    found = re.findall(r"^\| `(\w+)` \| ([^|]+) \| (.*) \|$", table, re.MULTILINE)
    return {family: cells.split(" | ") for family, _, cells in found}


def titles(text: str) -> list[str]:
    """The titles of its columns, without the first two."""
    table = text.split(START)[1].split(END)[0]
    return table.strip().splitlines()[0].strip("| ").split(" | ")[2:]


def errors(text: str) -> list[float]:
    """The largest error of each row."""
    return [float(error) for error in re.findall(r"^\| `\w+` \| ([^|]+) \|", text.split(END)[0], re.MULTILINE)]
