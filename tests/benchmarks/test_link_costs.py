"""The table of links in the documentation is the one that is computed."""

from pathlib import Path

from click.testing import CliRunner

from benchmarks.__main__ import main
from benchmarks.links import table
from mlxinfer.distributed.cost import Link

DOCUMENT = Path(__file__).parents[2] / "docs" / "several-machines.md"


def test_the_documented_table_is_computed():
    assert "\n".join(table()) in DOCUMENT.read_text(encoding="utf-8")


def test_other_links_can_be_injected():
    done = CliRunner().invoke(main, ["links", "--latency-us", "1000", "--gb-per-s", "0.5", "--gigabytes", "80"])
    assert done.exit_code == 0
    assert done.output.splitlines()[2:] == list(table((Link("injected", 1e-3, 0.5e9),), weights=80e9))[2:]
    assert len(done.output.splitlines()) == 5
