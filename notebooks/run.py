"""Runs notebooks from top to bottom and writes their outputs back: `python notebooks/run.py [NAME ...]`, all of them without a name.

What changes from run to run without meaning anything (when a cell ran, on which kernel) is left out, so that a difference in git is one.
"""

from __future__ import annotations

import sys
from pathlib import Path
from time import perf_counter

import nbclient
import nbformat

HERE = Path(__file__).parent
LIMIT_S = 300
"""Seconds for one cell."""


def run(path: Path) -> float:
    """Execute one notebook in place. Returns the seconds that it took; raises `nbclient.exceptions.CellExecutionError`."""
    notebook = nbformat.read(path, as_version=4)
    began = perf_counter()
    nbclient.NotebookClient(notebook, timeout=LIMIT_S, record_timing=False).execute()
    notebook.metadata.language_info.version = "3"
    for number, cell in enumerate(notebook.cells):
        cell.id, cell.metadata = f"cell-{number:02d}", {}
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.output_type != "stream" or output.name == "stdout"]
    nbformat.write(notebook, path)
    return perf_counter() - began


if __name__ == "__main__":
    for chosen in sorted(path for path in HERE.glob("*.ipynb") if not sys.argv[1:] or path.stem in sys.argv[1:]):
        print(f"{chosen.stem:<32} {run(chosen):5.0f} s")
