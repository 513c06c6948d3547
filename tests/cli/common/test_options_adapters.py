"""`--adapter` of run, chat and serve."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.models.adapters import merge, random_changes, shapes_of, write_peft
from support.models.tiny_directory import tiny_directory

from mlxinfer import AsyncLLM
from mlxinfer.cli.common.options import adapter_paths
from mlxinfer.config import EngineArgs
from mlxinfer.errors import ServerError
from mlxinfer.server.model_manager.listing import Listing

GREEDY = ("--temperature", "0", "--max-tokens", "12", "--dtype", "float32")


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    base = tiny_directory(folder / "base", eos=False)
    changes = random_changes(shapes_of(base), size=0.2)
    merged = merge(tiny_directory(folder / "merged", eos=False), changes)
    return {"base": str(base), "merged": str(merged), "adapter": str(write_peft(folder / "my adapter", changes))}


def test_run(call, models):
    merged = call("run", models["merged"], "Hello", "-q", *GREEDY).out
    assert call("run", models["base"], "Hello", "-q", *GREEDY).out != merged
    for given in (models["adapter"], f"sql={models['adapter']}"):
        assert call("run", models["base"], "Hello", "-q", *GREEDY, "--adapter", given).out == merged


def test_chat(call, models):
    merged = call("chat", models["merged"], "-q", *GREEDY, stdin="Hello\nAgain\n").out
    assert call("chat", models["base"], "-q", *GREEDY, "--adapter", models["adapter"], stdin="Hello\nAgain\n").out == merged
    assert call("chat", models["base"], "-q", *GREEDY, stdin="Hello\nAgain\n").out != merged


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--adapter", "x=/no/such"], "no adapter at /no/such"),
        (["--adapter", "x="], "is not NAME=PATH"),
        (["--adapter", "=x"], "is not NAME=PATH"),
        (["--adapter", "a b=x"], "cannot be a name"),
        (["--adapter", "a=x", "--adapter", "a=y"], "two adapters are called 'a'"),
        (["--adapter", "a=x", "--adapter", "b=y"], "only one --adapter here"),
    ],
)
@pytest.mark.parametrize("command", ["run", "chat"])
def test_errors(call, models, command, arguments, message):
    result = call(command, models["base"], *(["hi"] if command == "run" else []), *arguments)
    assert (result.code, message in " ".join(result.err.split())) == (2, True), result.err


def test_names_of_paths(tmp_path):
    assert adapter_paths(("some/folder/", "x.gguf", "n=p", "odd name!")) == {
        "folder": "some/folder/", "x": "x.gguf", "n": "p", "odd-name": "odd name!"
    }  # fmt: skip


def given(names, adapters, models):
    """The adapters of each model of a server that lists these."""
    listing = Listing(EngineArgs(""), AsyncLLM.of, None, adapters)
    for name in names:
        listing.add(f"{name}={models[name]}")
    return {entry.name: entry.slot.args.adapters for entry in listing.models({}, ()).registry}


def test_which_model_an_adapter_of_a_server_is_for(models):
    path, both = models["adapter"], ["base", "merged"]
    assert given(both, {"base:a": path, "merged:b": path}, models) == {"base": {"a": path}, "merged": {"b": path}}
    assert given(both, {"base:a": path}, models) == {"base": {"a": path}, "merged": None}
    assert given(["base"], {"a": path, "b": path}, models) == {"base": {"a": path, "b": path}}
    for adapters, names in (({"a": path}, both), ({"x:a": path}, ["base"])):
        with pytest.raises(ServerError, match="which model is the adapter"):
            given(names, adapters, models)


def test_a_property_list_of_serve_names_them(call, models, short_path):
    adapter = f"sql={Path(models['adapter'])}"
    listed = call("serve", models["base"], "--install", "--socket", str(short_path / "s"), "--adapter", adapter).out
    assert f"<string>sql={models['adapter']}</string>" in listed
