"""Every committed notebook runs from top to bottom in a fresh kernel."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.optional import needs

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


@pytest.mark.model
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path: Path, tmp_path: Path) -> None:
    nbformat, nbclient = needs("nbformat"), needs("nbclient")
    for name in ("ipykernel", "matplotlib"):
        needs(name)
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert any("Paris" in str(output) for output in outputs)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_committed_outputs_name_no_machine(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert "/home/" not in text
    assert "site-packages" not in text
