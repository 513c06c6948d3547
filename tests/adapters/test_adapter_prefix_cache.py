"""Cached prefixes of one adapter are never reused by another adapter or the base model: in memory, on disk, or under the same name."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from support.models.adapters import random_changes, shapes_of, write_gguf_adapter, write_mlx_lm, write_peft
from support.models.tiny_directory import tiny_directory

from mlxinfer import LLM, SamplingParams
from mlxinfer.adapters.files import open_adapter
from mlxinfer.types import Completion

PROMPT = [int(token) for token in np.random.default_rng(3).integers(3, 96, 200)]


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return tiny_directory(tmp_path_factory.mktemp("base") / "llama", eos=False, context=1024)


def answer(llm: LLM, adapter: str | None, prompt: list[int] = PROMPT) -> Completion:
    return llm.generate(prompt, SamplingParams(temperature=0, max_tokens=20, adapter=adapter))[0]


def fresh(base: Path, path: Path | None) -> list[int]:
    """The answer without any cache of prefixes."""
    with LLM(base, dtype="float32", memory_gb=2, prefix_cache=False, adapters=None if path is None else {"x": path}) as llm:
        return answer(llm, None if path is None else "x").token_ids


def test_in_memory(base, tmp_path):
    shapes = shapes_of(base)
    paths = {name: write_peft(tmp_path / name, random_changes(shapes, seed)) for seed, name in enumerate("ab")}
    expected = {name: fresh(base, paths.get(name)) for name in (None, "a", "b")}
    assert len({tuple(tokens) for tokens in expected.values()}) == 3
    with LLM(base, dtype="float32", memory_gb=2, adapters=paths) as llm:
        for name in ("a", None, "b"):
            first, again = answer(llm, name), answer(llm, name)
            assert first.usage.stats.reused_tokens == 0
            assert again.usage.stats.reused_tokens >= 128
            assert first.token_ids == again.token_ids == expected[name]


def test_a_sequence_goes_on_with_what_its_adapter_has_said(base, tmp_path):
    path = write_peft(tmp_path / "a", random_changes(shapes_of(base)))
    with LLM(base, dtype="float32", memory_gb=2, adapters={"a": path}) as llm:
        said = answer(llm, "a").token_ids
        longer = [*PROMPT, *said, 7, 8, 9]
        assert answer(llm, None, longer).usage.stats.reused_tokens == 0
        assert answer(llm, "a", longer).usage.stats.reused_tokens >= len(PROMPT)


@pytest.mark.long
@pytest.mark.parametrize("change", ["weights", "config", "format"])
def test_from_disk_and_after_a_reload_under_the_same_name(base, tmp_path, change):
    shapes, path = shapes_of(base), tmp_path / "adapter"
    changes = random_changes(shapes, 1)

    def run() -> Completion:
        with LLM(base, dtype="float32", memory_gb=2, adapters={"same": path}, prefix_disk_gb=0.1, prefix_dir=tmp_path / "prefix") as llm:
            return answer(llm, "same")

    write_peft(path, changes)
    expected = fresh(base, path)
    assert (run().usage.stats.reused_tokens, run().usage.stats.reused_tokens) == (0, 192)
    shutil.rmtree(path)
    if change == "weights":
        write_peft(path, random_changes(shapes, 2))
    elif change == "config":
        write_peft(path, changes, lora_alpha=16)
    else:
        write_mlx_lm(path, changes)
    reloaded = run()
    assert reloaded.usage.stats.reused_tokens == 0
    assert reloaded.token_ids == fresh(base, path)
    assert (reloaded.token_ids == expected) == (change == "format")
    with LLM(base, dtype="float32", memory_gb=2, prefix_disk_gb=0.1, prefix_dir=tmp_path / "prefix") as llm:
        plain = answer(llm, None)
        assert plain.usage.stats.reused_tokens == 0
        assert plain.token_ids == fresh(base, None)


def test_what_names_an_adapters_content(base, tmp_path):
    changes, config = random_changes(shapes_of(base)), {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4}

    def digest(path: Path) -> str:
        adapter = open_adapter("x", path, config)
        adapter.close()
        return adapter.digest

    a, b = write_peft(tmp_path / "a", changes), write_peft(tmp_path / "b", changes)
    (b / "adapter_config.json").write_text("\n" + (a / "adapter_config.json").read_text().replace(", ", " ,  "))
    assert digest(a) == digest(b)  # the same config, written in another way
    other = write_peft(tmp_path / "c", changes, use_rslora=True)
    gguf = [write_gguf_adapter(tmp_path / f"{alpha}.gguf", changes, alpha=alpha) for alpha in (1.0, 2.0)]
    assert len({digest(path) for path in (a, other, *gguf)}) == 4
