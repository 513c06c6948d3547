from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from support.models.tiny_directory import tiny_directory
from support.processes.optional import needs

from benchmarks.__main__ import main

FILES = ("csv", "json", "md", "svg")


def call(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory, so that mlx-lm needs no conversion."""
    return f"tiny={tiny_directory(tmp_path_factory.mktemp('models') / 'tiny', context=4096)}"


@pytest.mark.long
def test_compare_writes_all_files_and_report_reads_them(tmp_path: Path, tiny: str) -> None:
    needs("matplotlib")
    stem = str(tmp_path / "cpu-1.5")
    few = ("--limit", "mlxinfer=40", "--limit", "mlxinfer-plain=20", "--works", "decode at 0,prefill 512")
    done = call("compare", "--name", stem, "--model", tiny, "--engines", "mlxinfer,mlxinfer-plain", "--rounds", "1", "--steps", "4", *few)
    assert done.exit_code == 0, done.output
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"cpu-1.5.{kind}" for kind in FILES]
    about = json.loads((tmp_path / "cpu-1.5.json").read_text())
    assert about["limits"] == {"mlxinfer": 40, "mlxinfer-plain": 20}
    engines = about["models"]["tiny"]["engines"]
    assert engines["mlxinfer"]["first_token"] == engines["mlxinfer-plain"]["first_token"]
    assert {"mlx", "mlx-lm", "numpy"} <= set(about["packages"])
    text = (tmp_path / "cpu-1.5.md").read_text()
    rows = [
        "decode at 0 ",
        "decode at 0, 8 together",
        "prefill 512",
        "load to first token",
        "peak memory",
    ]
    assert all(f"| {row}" in text for row in rows)
    assert str(tmp_path) not in "".join((tmp_path / f"cpu-1.5.{kind}").read_text() for kind in ("csv", "json", "md"))
    (tmp_path / "cpu-1.5.svg").unlink()
    again = call("report", stem)
    assert text in again.output
    assert (tmp_path / "cpu-1.5.svg").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--engines", "vllm"],
        ["--limit", "mlx-lm"],
        ["--limit", "mlx-lm=0"],
        ["--limit", "vllm=5"],
        ["--rounds", "0"],
        ["--steps", "1000"],
        ["--works", "dance"],
        ["--works", "start", "--no-start"],
        ["--cpus", "a"],
        ["--cpus", "100000"],
        ["--model", "x=/nothing/there"],
    ],
    ids=" ".join,
)
def test_bad_input_is_refused_before_anything_is_measured(tmp_path: Path, tiny: str, arguments: list[str]) -> None:
    done = call("compare", "--name", str(tmp_path / "x"), "--model", tiny, *arguments)
    assert done.exit_code == 2
    assert "Error: " in done.output
    assert not list(tmp_path.iterdir())


def test_a_model_that_nobody_can_load_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "config.json").write_text("{}")
    done = call("compare", "--name", str(tmp_path / "x"), "--model", f"bad={tmp_path / 'bad'}", "--engines", "mlxinfer")
    assert done.exit_code == 1
    assert "Error: mlxinfer: CheckpointError" in done.output


def test_a_report_of_nothing(tmp_path: Path) -> None:
    done = call("report", str(tmp_path / "x"))
    assert done.exit_code == 1
    assert "No such file" in done.output


@pytest.mark.long
def test_batch_writes_all_files_and_report_reads_them(tmp_path: Path, tiny: str) -> None:
    stem = str(tmp_path / "batch")
    short = ("--rounds", "1", "--prompt", "100", "--steps", "4", "--streams", "1,2", "--turns", "2", "--works", "streams,prefix,drafts")
    done = call("batch", "--name", stem, "--model", tiny, "--engines", "mlxinfer,mlxinfer-undrafted", *short)
    assert done.exit_code == 0, done.output
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"batch.{kind}" for kind in FILES if kind != "svg"]
    about = json.loads((tmp_path / "batch.json").read_text())
    assert (about["study"], about["models"]["tiny"]["left_out"]) == ("batch", {})
    text = (tmp_path / "batch.md").read_text()
    assert all(f"| {row} |" in text for row in ("1 stream", "2 streams", "mlxinfer", "free text, 4 streams"))
    assert text in call("report", stem).output
