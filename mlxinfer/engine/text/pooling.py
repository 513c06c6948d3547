"""Pools the states of a text to one vector. Each chunk contributes a part, and the parts are summed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import mlx.core as mx

from ...loading.recipes.embedding import PoolingKind
from ...models.decoder import Decoder
from ...util.dataclass import dataclass

if TYPE_CHECKING:
    from ...models.decoder import Model


class Pooling(Protocol):
    """A kind of pooling."""

    @property
    def may_skip(self) -> bool:
        """Return True if the start of a text may come from the prefix cache, so that its states are not computed."""
        ...

    def part(self, model: Model, hidden: mx.array, past: int, total: int) -> mx.array:
        """Return the part of rows `[count, hidden]`, after `past` others, in the vector of a text of `total` tokens: float32 `[1, n]`."""
        ...


@dataclass(frozen=True, slots=True)
class StatePooling:
    """Pools the states after the last norm, `[1, hidden]`."""

    kind: PoolingKind
    may_skip: bool = False
    """False: texts are not cached. They would displace conversations, and few share a prefix."""

    def part(self, model: Model, hidden: mx.array, past: int, total: int) -> mx.array:
        assert isinstance(model, Decoder)
        if self.kind == "mean":
            return mx.sum(model.normed(hidden).astype(mx.float32), axis=0, keepdims=True) / total
        at_end, at_start = past + hidden.shape[0] == total, past == 0
        if not (at_end if self.kind == "last" else at_start):
            return mx.zeros((1, hidden.shape[1]), mx.float32)
        return model.normed(hidden[-1:] if self.kind == "last" else hidden[:1]).astype(mx.float32)


@dataclass(frozen=True, slots=True)
class TokenLogits:
    """Logits of some tokens after the last one of the text, `[1, len(token_ids)]`: the answer of a reranker."""

    token_ids: tuple[int, ...]
    may_skip: bool = True
    """True: all texts start with the instructions and the query."""

    def part(self, model: Model, hidden: mx.array, past: int, total: int) -> mx.array:
        if past + hidden.shape[0] < total:
            return mx.zeros((1, len(self.token_ids)), mx.float32)
        return model.logits(hidden[-1:])[:, mx.array(self.token_ids)]
