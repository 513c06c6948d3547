from __future__ import annotations

import io
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.models.tiny_directory import tiny_directory

from mlxinfer.cli import main


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


Call = Callable[..., Result]


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_directory(tmp_path_factory.mktemp("models") / "tiny", eos=False, rounded=True))


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use a home of the test's own, and no network."""
    for name in ("HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME", "MLXINFER_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path / "home"


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Call:
    """Run the command line in this process: `call("run", model, "hello", stdin="...")`."""

    def run(*arguments: str, stdin: str | bytes = "") -> Result:
        streams = {name: io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for name in ("stdout", "stderr")}
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode() if isinstance(stdin, str) else stdin), "utf-8"))
            for name, stream in streams.items():
                patch.setattr(sys, name, stream)
            with pytest.raises(SystemExit) as ended:
                main(list(arguments))
        out, err = (stream.buffer.getvalue().decode() for stream in streams.values())  # type: ignore[attr-defined]
        return Result(int(ended.value.code or 0), out, err)

    return run
