from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from mlxinfer.util.installing import install_line

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("uv-receipt.toml", "uv pip install --python {prefix} pandas"),
        ("pipx_metadata.json", "pipx runpip mlxinfer install pandas"),
        ("bin/pip", "pip install pandas"),
        ("pyvenv.cfg", "{python} -m pip install pandas"),
    ],
)
def test_the_line_installs_into_the_environment_that_runs_this(tmp_path, monkeypatch, file, line):
    prefix = tmp_path / "mlxinfer"
    (prefix / "bin").mkdir(parents=True)
    (prefix / file).touch(mode=0o755)
    monkeypatch.setattr(sys, "prefix", str(prefix))
    monkeypatch.setenv("PATH", str(prefix / "bin"))
    assert install_line("pandas") == line.format(prefix=prefix, python=sys.executable)


def test_no_text_tells_to_install_this_project_from_an_index():
    """The name is on no index, so that anybody could take it. docs/install.md marks the lines that work from the first release on."""
    files = [*ROOT.glob("mlxinfer/**/*.py"), *ROOT.glob("convert/**/*.py"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.py")]
    told = re.compile(r"pip install (?:-\S+ )*['\"]?mlxinfer\b")
    found = [f"{file}: {line}" for file in files for line in file.read_text(encoding="utf-8").splitlines() if told.search(line)]
    assert [line for line in found if "docs/install.md" not in line] == []
