"""The table of docs/models.md about mlx-lm's graphs; `python -m support.fallback.page`, from tests, writes it there."""

from __future__ import annotations

from pathlib import Path

from mlxinfer.models.fallback.checks import CHECKS, Check

PAGE = Path(__file__).parents[3] / "docs" / "models.md"
START = "<!-- written by: python -m support.fallback.page, from tests -->\n"
END = "<!-- end of the second table -->\n"


def table() -> str:
    lines = ["| architecture | compared with transformers | largest error |", "| --- | --- | --- |"]
    lines += [f"| `{name}` | {_status(check)} | {_error(check)} |" for name, check in CHECKS.items()]
    return START + "\n" + "\n".join(lines) + "\n\n" + END


def _status(check: Check) -> str:
    if check.error is not None:
        return "yes"
    return f"{'refused' if check.refused else 'no'}: {check.reason}"


def _error(check: Check) -> str:
    return "" if check.error is None else f"{check.error:.0e}"


def write() -> None:
    before, rest = PAGE.read_text(encoding="utf-8").split(START)
    PAGE.write_text(before + table() + rest.split(END)[1], encoding="utf-8")


if __name__ == "__main__":
    write()
