"""Decode as the engine runs it on a GPU, in the emulator: attention appends rows, which lie apart from their pages for a while."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support.engines.tiny_engine import request, run
from support.kernels.emulated import emulated
from support.models.checkpoints import config_of, random_checkpoint
from support.models.tiny import open_model, random_tokens

from mlxinfer.cache.attention import select
from mlxinfer.cache.attention.metal import METAL, MetalAttention, MetalStep
from mlxinfer.cache.attention.reference import PlainAttention
from mlxinfer.cache.base import AttentionParams, AttentionSpec, Segment
from mlxinfer.cache.kv_format import KVFormat
from mlxinfer.cache.pages import AttentionGroup, PageTable
from mlxinfer.cache.recent_rows import RecentRows
from mlxinfer.cache.store import LayerStore
from mlxinfer.config import EngineConfig
from mlxinfer.engine.core.engine import Engine
from mlxinfer.kernels_metal import emulator, kernel_trial
from mlxinfer.kernels_metal.executors import run_with
from mlxinfer.models.decoder import Model

FAMILIES = ("llama", "qwen3", "gemma3_text", "gemma2", "phi3", "phi3_longrope", "olmo2", "gpt_oss", "smollm3", "qwen3_next")
"""Plain; norms of heads; local and global frequencies; a soft cap; joined projections; partial and changing rotation; wide norms; sinks;
layers without rotation; gated queries between recurrent layers."""
ELSEWHERE = ("qwen3", "phi3")
"""Families whose features other families also have."""
HEADS = {"head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture
def on_a_mac(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kernels as a Mac uses them, in the emulator."""
    monkeypatch.setattr(select.kernels_cpu, "in_use", lambda: False)
    monkeypatch.setattr(kernel_trial, "is_gpu", lambda: True)
    with emulated():
        yield


def engine_of(model: Model, kv: KVFormat) -> Engine:
    config = EngineConfig(max_context=256, kv_cache_tokens=4096, max_num_batched_tokens=70, max_num_seqs=4, max_draft=3)
    return Engine(model, config, dtype=mx.float32, kv=kv)


@pytest.mark.emulator
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=pytest.mark.slow if name in ELSEWHERE else pytest.mark.long) for name in FAMILIES]
)
def test_every_family_says_the_same_as_with_plain_mlx(family: str, on_a_mac: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Covers filled pages, accepted and rejected drafts, and a batch whose members change."""
    config = config_of(family, **HEADS)
    if family == "phi3_longrope":
        config["rope_parameters"] |= {"partial_rotary_factor": 0.5}
    model = open_model(random_checkpoint(tmp_path / "m", config))
    tokens = random_tokens(60)
    prompts = [(tokens[:20] * 2, 12), (tokens[:54], 18), (tokens[:1], 9)]
    kv = KVFormat(8, 8) if family in ("llama", "gemma3_text") else KVFormat()

    def answers() -> list[list[int]]:
        return run(engine_of(model, kv), [request(prompt, limit, index) for index, (prompt, limit) in enumerate(prompts)])

    monkeypatch.setattr(select, "gpu_backend", lambda *layer: PlainAttention("not wanted"))
    plain = answers()
    monkeypatch.setattr(select, "gpu_backend", lambda *layer: METAL)
    kernels: set[str] = set()

    def noted(*, name: str, **source: Any) -> emulator.Kernel:
        kernels.add(name)
        return emulator.metal_kernel(name=name, **source)

    with run_with(noted):
        assert run(engine_of(model, kv), [request(prompts[2][0], 3)])[0] == plain[2][:3]
        assert "paged_attention_decode" in kernels
        assert "append_rows" not in kernels
        assert answers() == plain


def stepped(store: LayerStore, group: AttentionGroup, parts: list[tuple[int, int, int]], seed: int) -> mx.array:
    """Answers to rows of (slot, past, count)."""
    segments, start = [], 0
    for slot, past, count in parts:
        segments.append(Segment(slot, start, count, past, 0))
        start += count
    keys = mx.random.split(mx.random.key(seed), 3)
    q, k, v = (mx.random.normal((start, heads, 16), key=key) for heads, key in zip((4, 2, 2), keys, strict=True))
    return MetalStep(tuple(segments), group).heads(store, (q, k, v), AttentionParams(0.25))[0]


@pytest.fixture
def layer() -> tuple[LayerStore, AttentionGroup]:
    store, group = LayerStore(AttentionSpec(2, 16, 16, query_heads=4), mx.float32), AttentionGroup(None, 8)
    store.grow(slots=3)
    group.tables.update({slot: PageTable() for slot in range(3)})
    return store, group


@pytest.mark.emulator
def test_pages_are_written_only_when_somebody_reads_them_or_too_many_rows_lie_apart(layer: tuple[LayerStore, AttentionGroup]) -> None:
    store, group = layer
    with emulated():
        pages = store.kept
        for past in range(16):
            stepped(store, group, [(0, past, 1)], past)
            assert store.kept is pages
        assert store.recent.spans == ((0, 0, 16),)
        assert all(a.shape == (1, 2, 16, 16) for a in store.recent.arrays)
        stepped(store, group, [(0, 16, 1), (2, 0, 4)], 16)
        assert store.kept is not pages
        assert store.recent.spans == ((0, 16, 17), (2, 0, 4))
        stepped(store, group, [(2, 2, 1)], 17)  # two drafts were withdrawn, and slot 0 pauses
        assert store.recent.spans == ((2, 0, 3), (0, 16, 17))
        apart = [np.array(a) for a in store.recent.arrays]
        for whole, rows in zip(store.open, apart, strict=True):
            assert np.array_equal(np.array(whole)[2, :, :3], rows[0, :, :3])
            assert np.array_equal(np.array(whole)[0, :, 16:17], rows[1, :, :1])
        assert store.recent == RecentRows()
        assert not np.array(pages[0]).any()


@pytest.mark.emulator
def test_nothing_is_copied_but_recent_rows(layer: tuple[LayerStore, AttentionGroup]) -> None:
    """A step reads the recent rows and writes them with its own: at most 4 KB instead of 16."""
    store, group = layer
    with emulated():
        for past in range(9):
            stepped(store, group, [(0, past, 1)], past)
        with emulator.count_bytes() as counts:
            stepped(store, group, [(0, 9, 1)], 9)
    append, row = counts.of("paged_attention_decode"), 2 * 16 * 4
    assert append["recent_keys"].loaded == append["recent_values"].loaded == 9 * row
    assert append["new_keys"].stored == append["new_values"].stored == 10 * row


@pytest.mark.emulator
def test_rows_of_too_many_heads_are_appended_in_a_launch_of_their_own() -> None:
    """One work item cannot process all queries of a sequence."""
    spec, segments = AttentionSpec(1, 80, 80, query_heads=16), (Segment(0, 0, 8, 0, 0),)
    q, k, v = (mx.random.normal((8, heads, 80), key=mx.random.key(heads)) for heads in (16, 1, 2))
    answers = []
    with emulated(), emulator.count_bytes() as counts:
        for backend in (MetalAttention(), PlainAttention()):
            store, group = LayerStore(spec, mx.float32), AttentionGroup(None, 8)
            store.grow(slots=1)
            group.tables[0] = PageTable()
            answers.append(backend.begin(segments, group).heads(store, (q, k, v[:, :1]), AttentionParams(0.1))[0])
    assert [launch.kernel for launch in counts.launches][:2] == ["append_rows", "paged_attention_decode"]
    assert mx.allclose(*answers, atol=1e-5).item()
