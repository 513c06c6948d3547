"""Runs notebooks from top to bottom and writes their outputs back: `python notebooks/run.py [NAME ...]`, all of them without a name.

What changes from run to run without meaning anything (when a cell ran, on which kernel) is left out, and a cell of which only speeds and
times differ keeps the outputs that it had, so that a difference in git is one. At the end of each line are the seconds of processor time.
"""

from __future__ import annotations

import re
import resource
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import nbclient
import nbformat

HERE = Path(__file__).parent
LIMIT_S = 300
"""Seconds for one cell."""


_MEASURED = re.compile(r"\d[\d.,]*(?= (?:tokens/s|s|ms)\b)|(?<=peak memory )\d+|(?<=>)\d+\.\d(?=</td><td[^<>]*>[\d,]+</td></tr>)")
"""Numbers that are others in every run: speeds (in `compare`'s table before the last column), times, the most memory that there was."""


def run(path: Path) -> tuple[float, float]:
    """Execute one notebook in place. Returns the seconds that it took, and those of processor time of its kernel, all threads together;
    raises `nbclient.exceptions.CellExecutionError`."""
    notebook, before = nbformat.read(path, as_version=4), nbformat.read(path, as_version=4)
    began, used = perf_counter(), _processor_time()
    nbclient.NotebookClient(notebook, timeout=LIMIT_S, record_timing=False, coalesce_streams=True).execute()
    notebook.metadata.language_info.version = "3"
    for number, cell in enumerate(notebook.cells):
        cell.id, cell.metadata = f"cell-{number:02d}", {}
        if cell.cell_type == "code":
            found = [output for output in cell.outputs if output.output_type != "stream" or output.name == "stdout"]
            cell.outputs = settled(found, before.cells[number].get("outputs", []))
    nbformat.write(notebook, path)
    return perf_counter() - began, _processor_time() - used


def settled(found: list[Any], before: list[Any]) -> list[Any]:
    """The outputs of a cell, or those that it had if they say the same but for what is measured."""
    return before if _MEASURED.sub("", str(_joined(found))) == _MEASURED.sub("", str(_joined(before))) else found


def _joined(outputs: list[Any]) -> list[Any]:
    """Outputs to be compared: what a cell has printed comes in as many pieces as it happens to."""
    printed = "".join(output.text for output in outputs if output.output_type == "stream")
    return [printed, *(dict(output.data) for output in outputs if output.output_type != "stream")]


def _processor_time() -> float:
    """Seconds of all processes that this one has started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    for chosen in sorted(path for path in HERE.glob("*.ipynb") if not sys.argv[1:] or path.stem in sys.argv[1:]):
        seconds, processor = run(chosen)
        print(f"{chosen.stem:<32} {seconds:5.0f} s {processor:5.0f} s", flush=True)
