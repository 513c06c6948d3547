"""Rows of an image see one another: against plain masks, in any chunks outside of images, for every format, and beside others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from support.engines.tiny_engine import tiny_model
from support.models.tiny import random_tokens
from support.oracles.plain_step import PlainCache

from mlxinfer.cache.attention import reference_chunks
from mlxinfer.cache.attention.native import AttentionBackend
from mlxinfer.cache.attention.reference import PlainAttention
from mlxinfer.cache.attention.select import attention_backend
from mlxinfer.cache.base import AttentionSpec, GivenRows, LayerSpec, Segment
from mlxinfer.cache.kv_format import KVFormat
from mlxinfer.cache.paged import PagedCache
from mlxinfer.cache.store import LayerStore
from mlxinfer.models.decoder import Model

TOKENS = random_tokens(330)
SPANS = ((9, 20), (50, 130), (130, 142), (250, 310))
"""One within a page, one over two boundaries and longer than the windows, one right after it, and one that ends in an open page."""
IMAGES = [row for first, end in SPANS for row in range(first, end)]
PLAIN = PlainAttention()
BACKENDS: dict[str, Callable[[LayerStore], AttentionBackend]] = {"own": attention_backend, "plain": lambda store: PLAIN}
FAMILIES = ["gemma3_text", "whole gemma3_text", "llama", "gpt_oss", "gemma2", "gemma4_text_shared"]
"""Windows and full layers; full ones only; sinks; soft caps; layers that read the pages of others."""
APART = [9, 11, 30, 80, 12, 108, 60, 20]
"""Every span in a chunk of its own."""


def layers_of(name: str, *, sees: bool = True) -> tuple[LayerSpec, ...]:
    """With "whole " before a name, no window hides rows of the same image."""
    how = {"sees_spans": sees, "whole_spans": sees and name.startswith("whole ")}
    return tuple(replace(spec, **how) if isinstance(spec, AttentionSpec) else spec for spec in model_of(name).layers)


def model_of(name: str) -> Model:
    return tiny_model(name.removeprefix("whole "))


def features(model: Model) -> mx.array:
    hidden = model.hidden(mx.array(TOKENS[:1], mx.int32), PlainCache(model.layers).step([(0, 1)])).shape[1]
    return mx.random.normal((len(TOKENS), hidden), key=mx.random.key(5)) * 3


def given(model: Model, past: int, end: int, start: int = 0) -> GivenRows | None:
    rows = [row for row in IMAGES if past <= row < end]
    return GivenRows(mx.array([start + row - past for row in rows], mx.int32), features(model)[mx.array(rows)]) if rows else None


def expected(name: str, *, sees: bool = True) -> np.ndarray:
    """Logits with plain masks, of the whole prompt at once."""
    model = model_of(name)
    step = PlainCache(layers_of(name, sees=sees)).step([(0, len(TOKENS))], spans=SPANS)
    step.given = given(model, 0, len(TOKENS))
    return np.array(model.logits(model.hidden(mx.array(TOKENS, mx.int32), step)))


class Reader:
    """Reads the prompt in chunks, and a text beside it if there is one."""

    def __init__(self, name: str, kv: KVFormat | None = None, backend: str = "own"):
        self.model = model_of(name)
        self.cache = PagedCache(layers_of(name), dtype=mx.float32, kv_cache_tokens=1 << 13, chunk=400, kv=kv, backend=BACKENDS[backend])
        self.slot, self.beside = self.cache.open(), self.cache.open()
        self.past, self.text = 0, 0

    def read(self, count: int, text: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Logits of the next rows of the prompt, and of those of the text, which are before them in the step."""
        end = min(self.past + count, len(TOKENS))
        spans = tuple(span for span in SPANS if self.past <= span[0] and span[1] <= end)
        segments = [Segment(self.beside, 0, text, self.text, 300)] if text else []
        segments.append(Segment(self.slot, text, end - self.past, self.past, len(TOKENS), spans=spans))
        step = self.cache.begin(segments)
        step.given = given(self.model, self.past, end, text)
        tokens = TOKENS[::-1][self.text : self.text + text] + TOKENS[self.past : end]
        logits = self.model.logits(self.model.hidden(mx.array(tokens, mx.int32), step))
        mx.eval(logits, step.state)
        if step.needs_commit:
            self.cache.commit(step)
        self.past, self.text = end, self.text + text
        return np.array(logits[text:]), np.array(logits[:text])


def in_chunks(name: str, kv: KVFormat | None, chunks: Sequence[int], backend: str = "own", beside: Sequence[int] = ()) -> np.ndarray:
    """Logits of the prompt in these chunks, the last one again and again, with rows of a text beside them."""
    reader, rows = Reader(name, kv, backend), []
    while reader.past < len(TOKENS):
        number = len(rows)
        rows.append(reader.read(chunks[min(number, len(chunks) - 1)], beside[number] if number < len(beside) else 0)[0])
    return np.concatenate(rows)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", FAMILIES)
def test_rows_of_a_span_see_one_another(name: str, backend: str) -> None:
    whole = expected(name)
    for chunks in ([400], APART, [8, 42, 92, 168], [142, 188]):
        np.testing.assert_allclose(in_chunks(name, None, chunks, backend), whole, atol=1e-4, err_msg=str(chunks))
    assert np.abs(expected(name, sees=False) - whole).max() > 0.05


@pytest.mark.parametrize("kv", [KVFormat(8, 8), KVFormat(4, 4), KVFormat(4, 3, first16=True)], ids=lambda kv: kv.name)
@pytest.mark.parametrize("name", ["gemma3_text", "llama", "gemma4_text_shared"])
def test_chunks_of_text_change_nothing_where_spans_are_chunks(name: str, kv: KVFormat) -> None:
    """To the bit on CPU kernels and without: a code that differs would be far off."""
    whole = in_chunks(name, kv, APART)
    for cut in (7, 20, 64):
        chunks = [part for count in APART for part in ([count] if count in (11, 80, 12, 60) else _parts(count, cut))]
        np.testing.assert_allclose(in_chunks(name, kv, chunks), whole, atol=2e-5, err_msg=str(cut))
    assert np.abs(whole - in_chunks(name, None, APART)).max() > 1e-3


@pytest.mark.parametrize("kv", [KVFormat(8, 8), KVFormat(4, 4)], ids=lambda kv: kv.name)
@pytest.mark.parametrize("name", ["gemma3_text", "whole gemma3_text"])
def test_chunks_with_spans_and_text_change_nothing_in_plain_mlx(name: str, kv: KVFormat) -> None:
    """What a row of a span sees unquantized depends on the span, not on the chunk: everything from the page in which the span begins. All
    rows of the first two spans, and the text before them, are in such pages."""
    whole, exact = in_chunks(name, kv, [400], "plain"), in_chunks(name, None, [400], "plain")
    np.testing.assert_allclose(whole[:130], exact[:130], atol=2e-5)
    assert np.abs(whole[130:142] - exact[130:142]).max() > 1e-3
    for chunks in (APART, [8, 42, 92, 168], [49, 1, 92, 108, 60, 1], [142, 188]):
        np.testing.assert_allclose(in_chunks(name, kv, chunks, "plain"), whole, atol=2e-5, err_msg=str(chunks))


@pytest.mark.parametrize("kv", [None, KVFormat(4, 4)], ids=["16", "4"])
@pytest.mark.parametrize("name", ["gemma3_text", "gpt_oss", "gemma4_text_shared"])
def test_an_image_changes_nothing_beside_it(name: str, kv: KVFormat | None) -> None:
    """Neither the text of another sequence, to the bit, nor the image's own prompt."""
    beside = [40, 1, 25, 3, 1, 70, 1, 1]
    alone, both = Reader(name, kv), Reader(name, kv)
    apart = in_chunks(name, kv, APART)
    done = 0
    for count, text in zip(APART, beside, strict=True):
        tokens = mx.array(TOKENS[::-1][done : done + text], mx.int32)
        step = alone.cache.begin([Segment(alone.beside, 0, text, done, 300)])
        logits = alone.model.logits(alone.model.hidden(tokens, step))
        mx.eval(logits, step.state)
        if step.needs_commit:
            alone.cache.commit(step)
        rows, others = both.read(count, text)
        assert np.array_equal(others, np.array(logits)) or not _native(both)
        np.testing.assert_allclose(others, np.array(logits), atol=2e-5)
        np.testing.assert_allclose(rows, apart[both.past - count : both.past], atol=2e-5)
        done += text


def test_scores_are_bounded_within_a_span(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = {name: in_chunks(name, None, [400], "plain") for name in FAMILIES}
    rows: list[int] = []
    usual = reference_chunks.rows_at_once

    def few(*args: int, **how: bool) -> int:
        rows.append(usual(*args, **how))
        return rows[-1]

    monkeypatch.setattr(reference_chunks, "MOST_SCORES", 4096)
    monkeypatch.setattr("mlxinfer.cache.attention.reference.rows_at_once", few)
    for name, answer in whole.items():
        np.testing.assert_allclose(in_chunks(name, None, [400], "plain"), answer, atol=2e-5)
    assert max(rows) < 60


def test_steps_without_spans_run_whole_blocks() -> None:
    reader = Reader("gemma3_text")
    step = reader.cache.begin([Segment(reader.slot, 0, 5, 0, 100)])
    assert step.runs_blocks == _native(reader)
    spanned = reader.cache.begin([Segment(reader.slot, 0, 5, 0, 100, spans=((1, 4),))])
    assert not spanned.runs_blocks


def _native(reader: Reader) -> bool:
    return all(not isinstance(backend, PlainAttention) for _, backend in reader.cache.attention)


def _parts(count: int, most: int) -> list[int]:
    return [min(most, count - start) for start in range(0, count, most)]
