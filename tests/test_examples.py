"""Every file in examples/ runs, as its docstring says, and prints what it promises."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from mlxinfer.models.llama_head import is_head

EXAMPLES = Path(__file__).parents[1] / "examples"
PROMISES = {
    "generate": "Paris",
    "stream": "less likely than 10 %",
    "many_requests": "To be or not to be,",
    "long_context": "prompt tokens were cached",
    "convert": "converted:",
    "structured": "the capital is Paris, in Europe",
    "adapters": "the model itself: ",
    "tools": "It is sunny in Paris",
}
pytestmark = pytest.mark.model


def run(name: str, *arguments: str) -> str:
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": str(EXAMPLES.parent)})
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_each_has_a_test() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*PROMISES, "openai_client", "train_mtp_head"}


@pytest.mark.parametrize("name", PROMISES)
def test_it_prints_what_it_promises(name: str) -> None:
    assert PROMISES[name] in run(name)


@pytest.fixture
def url() -> Iterator[str]:
    pytest.importorskip("openai", reason="openai is not installed (make test installs it)")
    from support.live_server import live_server

    from mlxinfer import AsyncLLM

    with live_server({"smollm2": lambda: AsyncLLM("smollm2")}) as server:
        yield f"{server.url}/v1"


def test_openai_client(url: str) -> None:
    assert "Paris" in run("openai_client", url)


@pytest.mark.slow
def test_train_mtp_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it writes for training: texts, each with as many rows as tokens. Training itself needs torch."""
    monkeypatch.syspath_prepend(EXAMPLES)
    import train_mtp_head as example

    for name, value in {"MOST": 6, "STREAMS": 4, "DRAFT_VOCABULARY": 32}.items():
        monkeypatch.setattr(example, name, value)
    example.write("smollm2", tmp_path, 60)
    parts = [np.load(path) for path in tmp_path.glob("texts-*.npz")]
    assert sum(len(part["ids"]) for part in parts) >= 60
    assert all(part["rows"].shape == (part["lengths"].sum(), 576) for part in parts)
    pytest.importorskip("torch", reason="torch is not installed")
    example.train(tmp_path, tmp_path / "head", 0.01)
    assert is_head(json.loads((tmp_path / "head" / "config.json").read_text()))
