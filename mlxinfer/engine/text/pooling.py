"""How the states of a text become one vector, chunk by chunk: each adds its part, and the parts are summed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import mlx.core as mx

from ...loading.recipes.embedding import PoolingKind
from ...models.decoder import Decoder
from ...util.dataclass import dataclass

if TYPE_CHECKING:
    from ...models.decoder import Model


class Pooling(Protocol):
    """A way to pool."""

    @property
    def may_skip(self) -> bool:
        """Whether the beginning of a text may come from the prefix cache, so that its states are not computed."""
        ...

    def part(self, model: Model, hidden: mx.array, past: int, total: int) -> mx.array:
        """What rows `[count, hidden]`, which come after `past` others, add to the vector of a text of `total` tokens: float32 `[1, n]`."""
        ...


@dataclass(frozen=True, slots=True)
class StatePooling:
    """Pools the states after the last norm, `[1, hidden]`."""

    kind: PoolingKind
    """Which states."""
    may_skip: bool = False
    """Texts are not kept in the prefix cache: they would displace conversations, and few begin alike."""

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
    """The logits of some tokens after the last one of the text, `[1, len(token_ids)]`: how rerankers answer."""

    token_ids: tuple[int, ...]
    """Whose logits."""
    may_skip: bool = True
    """All texts begin with the instructions and the query."""

    def part(self, model: Model, hidden: mx.array, past: int, total: int) -> mx.array:
        if past + hidden.shape[0] < total:
            return mx.zeros((1, len(self.token_ids)), mx.float32)
        return model.logits(hidden[-1:])[:, mx.array(self.token_ids)]
