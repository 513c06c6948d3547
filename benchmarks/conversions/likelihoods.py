"""How likely a model finds continuations of a context: the context is read once for all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import mlx.core as mx
import numpy as np

from mlxinfer.cache.base import Segment
from mlxinfer.cache.paged import PagedCache
from mlxinfer.cache.pages import PAGE
from mlxinfer.models.decoder import Model

Ids = tuple[int, ...]
Pair = tuple[Ids, Ids]
"""Token ids of a context, at least one, and of what continues it, at least one."""
Found = tuple[float, bool]
"""Natural logarithm of the probability of a continuation, and whether each of its tokens is the likeliest."""
_ROWS = 768
"""Tokens of contexts that are read at once."""


def log_likelihoods(model: Model, pairs: Sequence[Pair]) -> list[Found]:
    """Of each continuation after its context, in float32. The model's weights decide the dtype of everything else."""
    together: dict[Ids, dict[Ids, Found]] = {}
    for context, continuation in pairs:
        together.setdefault(context, {})[continuation] = 0.0, False
    for contexts in _batches(list(together)):
        _read(model, {context: together[context] for context in contexts})
    return [together[context][continuation] for context, continuation in pairs]


def _batches(contexts: list[Ids]) -> Iterator[list[Ids]]:
    batch: list[Ids] = []
    for context in contexts:
        if batch and sum(map(len, batch)) + len(context) > _ROWS:
            yield batch
            batch = []
        batch.append(context)
    if batch:
        yield batch


def _read(model: Model, wanted: dict[Ids, dict[Ids, Found]]) -> None:
    """Fill in what is found. Two steps: all contexts, then all continuations but their last tokens."""
    contexts = list(wanted)
    branches = [(number, ids) for number, context in enumerate(contexts) for ids in wanted[context]]
    tokens = sum(map(len, contexts)) + sum(len(contexts[number]) + len(ids) for number, ids in branches)
    most = max(len(contexts[number]) + len(ids) for number, ids in branches)
    room = tokens + PAGE * (len(contexts) + len(branches))
    cache = PagedCache(model.layers, dtype=mx.float32, kv_cache_tokens=room, chunk=most)
    slots = [cache.open() for _ in contexts]
    first = _logprobs(model, cache, [(slot, 0, context) for slot, context in zip(slots, contexts, strict=True)], last_only=True)
    longer = [(number, ids) for number, ids in branches if len(ids) > 1]
    parts = [(cache.fork(slots[number]), len(contexts[number]), ids[:-1]) for number, ids in longer]
    later = _logprobs(model, cache, parts) if parts else first[:0]
    at = 0
    for number, ids in branches:
        rows = first[number : number + 1]
        if len(ids) > 1:
            rows = np.concatenate([rows, later[at : at + len(ids) - 1]])
            at += len(ids) - 1
        value = float(rows[np.arange(len(ids)), list(ids)].sum())
        wanted[contexts[number]][ids] = value, bool((rows.argmax(-1) == ids).all())


def _logprobs(model: Model, cache: PagedCache, parts: Sequence[tuple[int, int, Ids]], *, last_only: bool = False) -> np.ndarray:
    """What follows each token of these parts (slot, tokens before it, its ids), float32 `[tokens, vocab]`; with `last_only` what follows
    each part."""
    segments, start = [], 0
    for slot, past, ids in parts:
        segments.append(Segment(slot, start, len(ids), past, past + len(ids)))
        start += len(ids)
    step = cache.begin(segments)
    states = model.hidden(mx.array([token for _, _, ids in parts for token in ids], mx.int32), step)
    mx.eval(states)
    cache.commit(step)
    if last_only:
        states = states[mx.array([segment.start + segment.count - 1 for segment in segments])]
    logits = model.logits(states)
    return np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
