"""Every committed notebook runs from top to bottom in a fresh kernel."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.optional import needs

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
SAYS = {"01": "Paris", "02": "without these six    11.", "07": "Warsaw", "08": "+0 ' empty. I looked around"}
"""What each of them has to find out."""


@pytest.mark.model
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path: Path, tmp_path: Path) -> None:
    nbformat, nbclient = needs("nbformat"), needs("nbclient")
    for name in ("ipykernel", "matplotlib"):
        needs(name)
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert any(SAYS[path.stem[:2]] in str(output) for output in outputs)
    committed = nbformat.read(path, as_version=4)
    for cell, found in zip(committed.cells, notebook.cells, strict=True):
        kinds = [sorted(output.get("data", {})) for output in cell.get("outputs", ()) if output.output_type != "stream"]
        assert kinds == [sorted(output.get("data", {})) for output in found.get("outputs", ()) if output.output_type != "stream"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_committed_outputs_name_no_machine(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert "/home/" not in text
    assert "site-packages" not in text
