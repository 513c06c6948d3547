"""Listing of folders with odd names, and adapters of a model with two names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mlxinfer.config import EngineArgs
from mlxinfer.engine.async_llm import AsyncLLM
from mlxinfer.errors import ServerError
from mlxinfer.server.model_manager import listing as listing_module
from mlxinfer.server.model_manager.listing import Listing, models_in


def listing(**given: object) -> Listing:
    return Listing(EngineArgs(""), AsyncLLM.of, **given)  # type: ignore[arg-type]


def test_a_name_that_cannot_be_public_leaves_the_others(tmp_path: Path) -> None:
    for name in ("good.gguf", "模型.gguf", "a..b.gguf", "x" * 150 + ".gguf"):
        (tmp_path / name).touch()
    found = listing()
    found.add_folder(tmp_path)
    models = found.models({}, ())
    assert [entry.name for entry in models.registry] == ["good"]
    assert [("a..b" in note, "NAME=MODEL" in note) for note in models.notes] == [(True, True), (False, True), (False, True)]


def test_of_two_files_with_one_name_the_log_says_which_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "a b.gguf").write_bytes(b"1")
    (tmp_path / "a-b.gguf").write_bytes(b"2")
    os.link(tmp_path / "a b.gguf", tmp_path / "a+b.gguf")  # a link to the same file is not left out
    found = listing()
    found.add_folder(tmp_path)
    models = found.models({}, ())
    assert [Path(slot.args.path_or_id).name for slot in models.registry.slots if slot.args] == ["a b.gguf"]
    (note,) = models.notes
    assert "a-b.gguf" in note


def test_what_cannot_be_read_is_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "locked").mkdir()
    (tmp_path / "good.gguf").touch()
    monkeypatch.setattr(listing_module.os, "access", lambda path, mode: Path(path).name != "locked")  # root may read everything

    def refused(self: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "is_file", lambda self: refused(self) if self.parent.name == "locked" else os.path.isfile(self))
    assert [path.name for path in models_in(tmp_path)] == ["good.gguf"]


def test_two_adapters_of_one_name_for_one_model_are_refused(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").touch()
    found = listing(adapters={"x:a": "/one", "y:a": "/two"})
    found.add(f"x={tmp_path / 'm.gguf'}")
    found.add(f"y={tmp_path / 'm.gguf'}")
    with pytest.raises(ServerError, match="x and y are one model with two adapters 'a'"):
        found.models({}, ())
