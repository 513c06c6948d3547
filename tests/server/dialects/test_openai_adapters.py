"""vLLM's endpoints that load and unload adapters: off by default, names within one folder, several models."""

from __future__ import annotations

import json
import os
import shutil
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.http.kept_models import kept_models
from support.http.live_server import LiveServer, live_server
from support.models.adapters import random_changes, shapes_of, write_peft
from support.models.tiny_directory import tiny_directory

from mlxinfer import LLM, AsyncLLM, SamplingParams

TEXT = "It was a dark and stormy night"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model, and a folder with adapters and with links that lead out of it."""
    root = tmp_path_factory.mktemp("models")
    shapes = shapes_of(tiny_directory(root / "tiny", eos=False, context=512))
    for name, seed in {"adapters/a": 1, "adapters/team/b": 2, "outside": 3}.items():
        write_peft(root / name, random_changes(shapes, seed, size=0.2))
    write_peft(root / "adapters/wrong", random_changes({"model.layers.0.mlp.up_proj.weight": (8, 8)}), target_modules=["up_proj"])
    os.symlink(root / "outside", root / "adapters/link")
    return root


@pytest.fixture(scope="module")
def live(folder) -> Iterator[LiveServer]:
    settings = {"dtype": "float32", "memory_gb": 2, "adapter_memory_gb": 0.05}
    with live_server({"tiny": lambda: AsyncLLM(folder / "tiny", **settings)}, adapters_dir=folder / "adapters") as server:
        yield server


def send(live: LiveServer, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(live.url + path, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            status, raw = answer.status, answer.read()
    except urllib.error.HTTPError as error:
        status, raw = error.code, error.read()
    return status, json.loads(raw) if raw[:1] in (b"{", b"[") else raw.decode()


def listed(live: LiveServer) -> list[str]:
    return [model["id"] for model in send(live, "/v1/models")[1]["data"]]


def text(live: LiveServer, model: str) -> str:
    body = {"model": model, "prompt": TEXT, "temperature": 0, "max_tokens": 12}
    return send(live, "/v1/completions", body)[1]["choices"][0]["text"]


def test_loaded_asked_listed_and_unloaded(live, folder):
    with LLM(folder / "tiny", dtype="float32", memory_gb=2, adapters={"a": folder / "adapters/a", "b": folder / "adapters/team/b"}) as llm:
        expected = {n: llm.generate(TEXT, SamplingParams(temperature=0, max_tokens=12, adapter=n))[0].text for n in (None, "a", "b")}
    assert listed(live) == ["tiny"]
    assert send(live, "/v1/load_lora_adapter", {"lora_name": "sql", "lora_path": "a"}) == (
        200,
        "Success: LoRA adapter 'sql' added successfully.",
    )
    assert send(live, "/v1/load_lora_adapter", {"lora_name": "tiny:law", "lora_path": "team/b", "load_inplace": False})[0] == 200
    assert listed(live) == ["tiny", "tiny:sql", "tiny:law"]
    assert text(live, "tiny:sql") == text(live, "sql") == expected["a"]
    assert text(live, "tiny:law") == text(live, "law") == expected["b"]
    assert text(live, "tiny") == expected[None]
    status, error = send(live, "/v1/load_lora_adapter", {"lora_name": "sql", "lora_path": "team/b"})
    assert (status, "already" in error["error"]["message"]) == (400, True)
    assert send(live, "/v1/unload_lora_adapter", {"lora_name": "sql", "lora_int_id": None}) == (
        200,
        "Success: LoRA adapter 'sql' removed successfully.",
    )
    assert send(live, "/v1/load_lora_adapter", {"lora_name": "sql", "lora_path": "team/b"})[0] == 200
    assert text(live, "sql") == expected["b"]  # the new bytes under the same name
    for name in ("sql", "law"):
        assert send(live, "/v1/unload_lora_adapter", {"lora_name": name})[0] == 200
    assert listed(live) == ["tiny"]
    assert send(live, "/v1/completions", {"model": "sql", "prompt": TEXT})[0] == 404
    assert send(live, "/v1/unload_lora_adapter", {"lora_name": "sql"})[0] == 404


@pytest.mark.parametrize(
    "path",
    [
        "../outside",
        "/etc/passwd",
        "a/../../outside",
        "link",
        "./a",
        "~/a",
        "a\\..\\b",
        "team//b",
        "",
        ".",
        "nothing",
        "a" * 300,
        "a/b/c/d/e",
    ],
)
def test_nothing_outside_of_the_folder_and_no_word_about_it(live, folder, path):
    status, error = send(live, "/v1/load_lora_adapter", {"lora_name": "x", "lora_path": path})
    assert status in (400, 404)
    assert str(folder) not in json.dumps(error)
    assert listed(live) == ["tiny"]


def test_what_is_refused_names_no_path(live, folder):
    for name, path in (("x", "wrong"), ("x/y", "a"), ("latest", "a"), ("other:x", "a")):
        status, error = send(live, "/v1/load_lora_adapter", {"lora_name": name, "lora_path": path})
        assert status == (404 if name == "other:x" else 400)
        assert str(folder) not in json.dumps(error)
    assert send(live, "/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "a", "load_inplace": True})[0] == 400
    assert listed(live) == ["tiny"]


def test_off_unless_allowed(folder):
    with live_server({"tiny": lambda: AsyncLLM(folder / "tiny", dtype="float32", memory_gb=2)}) as server:
        for path in ("load", "unload"):
            body = {"lora_name": "x"} | ({"lora_path": "a"} if path == "load" else {})
            status, error = send(server, f"/v1/{path}_lora_adapter", body)
            assert (status, error["error"]["code"]) == (403, "adapter_loading_not_allowed")


def test_one_stays_with_a_model_that_is_unloaded_and_loaded_again(folder, tmp_path):
    models = {name: shutil.copytree(folder / "tiny", tmp_path / name) for name in "pq"}
    with kept_models(models, 500_000_000, adapter_memory_gb=0.02, adapters_dir=folder / "adapters") as kept:
        assert kept.ask("p", "/v1/load_lora_adapter", lora_name="x", lora_path="a")[0] == 400  # of which model?
        status, _, _ = raw(kept, {"lora_name": "q:x", "lora_path": "a"})
        assert status == 200
        first = kept.ask("q:x")[2]["choices"][0]["text"]
        assert first != kept.ask("q")[2]["choices"][0]["text"]
        kept.ask("q", "/models/unload")
        kept.until(lambda: kept.states()["q"] == "listed")
        assert [model["id"] for model in kept.get("/v1/models")["data"]] == ["p", "q", "q:x"]
        assert kept.ask("q:x")[2]["choices"][0]["text"] == first
        assert kept.ask("x")[2]["choices"][0]["text"] == first


def raw(kept: Any, body: dict[str, Any]) -> Any:
    from support.hostile.cases import request

    return kept.live.exchange(request("/v1/load_lora_adapter", json.dumps(body).encode(), "Content-Type: application/json"), unix=True)
