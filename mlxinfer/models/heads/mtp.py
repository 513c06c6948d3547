"""Heads that predict several tokens (MTP; arXiv:2412.19437, section 2.2): a layer that reads the model's hidden row of a token and the
embedding of the token after it, and from both predicts the one after that. The embedding and the output matrix are the model's own.

The row at position p joins token p with the hidden row of position p - 1, so that a page of the head depends on the tokens of that page
and of those before it, as any other layer's does. The hidden row that the next row needs is a state in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from typing import Protocol

import mlx.core as mx

from ...cache.base import AttentionSpec, LayerSpec, RecurrentSpec, Rotation, Step
from ...nn.linear import Embedding, Linear
from ...nn.norms import RMSNorm
from ...nn.rope import Rope
from ...nn.weights import Weights, map_rows
from ...util.dataclass import dataclass
from ..block import AnyBlock, Mixer
from ..native.head import NativeHead


@dataclass(frozen=True, slots=True)
class Places:
    """Where a head's parts are in the cache."""

    attention: int | None
    """Index of the layer of its keys and values; None if it has none of its own."""
    state: int
    """Index of the layer that keeps the hidden row of the last token."""

    @property
    def own_attention(self) -> int:
        """`attention` of a head that has such a layer."""
        assert self.attention is not None
        return self.attention


@dataclass(frozen=True, slots=True)
class Scores:
    """Logits of the tokens that a head may propose."""

    logits: mx.array
    """Float32 `[R, n]`."""
    tokens: mx.array | None = None
    """int32 `[n]` or `[R, n]`: which tokens these are; None: all, in order."""

    def whole(self, vocab: int) -> mx.array:
        """Logits of all tokens, `[R, vocab]`, minus infinity for the others."""
        if self.tokens is None:
            return self.logits
        empty = mx.full((self.logits.shape[0], vocab), -mx.inf, self.logits.dtype)
        return mx.put_along_axis(empty, mx.broadcast_to(self.tokens, self.logits.shape), self.logits, axis=-1)

    def at(self, places: mx.array) -> mx.array:
        """The tokens in these columns, one for each row: integers `[R]`."""
        if self.tokens is None:
            return places
        if self.tokens.ndim == 1:
            return mx.take(self.tokens, places)
        return mx.take_along_axis(self.tokens, places[:, None], axis=-1)[:, 0]


class Target(Protocol):
    """The model that a head drafts for, as far as the head's logits need it."""

    def unembed(self, rows: mx.array) -> mx.array:
        """`[R, hidden]` through the output matrix: float32 `[R, vocab]`."""
        ...

    def scaled(self, y: mx.array) -> mx.array:
        """`[R, vocab]` with the model's own scaling and cap."""
        ...


class AnyHead(Protocol):
    """A head with its weights: `mtp.Head`, an EAGLE-3 drafter, or an assistant of Gemma 4."""

    @property
    def places(self) -> Places:
        """Its layers in the cache."""
        ...

    @property
    def normed(self) -> bool:
        """Whether it reads the model's hidden rows after its last norm."""
        ...

    @property
    def taps(self) -> Sequence[int]:
        """Ascending: it reads the rows that enter these blocks, `[T, n * hidden]`, instead of the last rows; the number of all blocks
        stands for the rows that leave the last. Empty: the last rows."""
        ...

    @property
    def reads(self) -> Sequence[int]:
        """The model's layers in the cache whose pages it reads in place; it then appends nothing when it drafts."""
        ...

    @property
    def ropes(self) -> Sequence[str]:
        """Keys of the ropes that it drafts with."""
        ...

    @property
    def embedding(self) -> Embedding | None:
        """Its own; None: the model's."""
        ...

    @property
    def scales_embeddings(self) -> bool:
        """Whether it reads the model's embeddings with the model's factor."""
        ...

    def follow(self, embedded: mx.array, hidden: mx.array, step: Step, rotations: Mapping[str, Rotation]) -> None:
        """Keep what it needs of the rows of a step: embeddings `[T, hidden]` and what the model has made of them."""
        ...

    def draft(self, embedded: mx.array, before: mx.array, step: Step, rotations: Mapping[str, Rotation]) -> tuple[mx.array, mx.array]:
        """Embeddings of tokens `[R, hidden]` and the rows before them `[R, n]` to the rows that take their place for the next tokens
        `[R, n]`, and rows for `scores`."""
        ...

    def scores(self, rows: mx.array, target: Target) -> Scores:
        """What it makes of rows for `scores`."""
        ...


@dataclass(frozen=True, slots=True)
class HeadPlan:
    """What a head needs, before its tensors are asked for."""

    spec: AttentionSpec | None
    """What its layer stores in the cache; None if it has no layer of its own."""
    load: Callable[[Weights, Places], AnyHead]
    """Asks for its tensors."""
    ropes: Mapping[str, Rope] = field(default_factory=dict)
    """Ropes of its own, by the key in its blocks."""
    vocabulary: Sequence[int] | None = None
    """Tokens that it proposes; None: all."""
    witness: str = "mtp.fc"
    """A projection that a checkpoint with the head has."""
    taps: Sequence[int] = ()
    """As `AnyHead.taps`."""
    kept: int | None = None
    """Channels of the row that it keeps of the last token; None: those of the model's rows."""

    def specs(self, hidden: int) -> tuple[LayerSpec, ...]:
        """Its layers in the cache, for hidden rows of so many channels."""
        state = RecurrentSpec(((1, self.kept or hidden),), optional=True)
        return (state,) if self.spec is None else (self.spec, state)

    def places(self, first: int) -> Places:
        """Where these are, if they begin at layer `first`."""
        return Places(None, first) if self.spec is None else Places(first, first + 1)


@dataclass(frozen=True, slots=True)
class Head:
    """A head with its weights."""

    places: Places
    """Its layers in the cache."""
    token_norm: RMSNorm
    """Applied to embeddings."""
    hidden_norm: RMSNorm
    """Applied to hidden rows."""
    join: Linear
    """`[hidden, 2 * hidden]`: reads an embedding and a hidden row, in this order."""
    first: Mixer
    """The attention of the first of the blocks."""
    blocks: Sequence[AnyBlock]
    """One layer: a block, or two of one part each."""
    rope: str | None
    """The key of the attention's rope."""
    norm: RMSNorm
    """The norm before the output matrix."""
    normed: bool
    """Whether it reads hidden rows after the model's last norm, and hands its own on after `norm`; or both before."""
    tokens: mx.array | None = None
    """int32 `[n]`, ascending: the tokens that it proposes; None: all."""
    output: Linear | None = None
    """`[n, hidden]`: the rows of the output matrix for these tokens."""
    native: NativeHead | None = None
    """The layer for the CPU kernels, if they can compute it."""

    @property
    def taps(self) -> Sequence[int]:
        return ()

    @property
    def reads(self) -> Sequence[int]:
        return ()

    @property
    def ropes(self) -> Sequence[str]:
        return () if self.rope is None else (self.rope,)

    @property
    def embedding(self) -> Embedding | None:
        return None

    @property
    def scales_embeddings(self) -> bool:
        return True

    def follow(self, embedded: mx.array, hidden: mx.array, step: Step, rotations: Mapping[str, Rotation]) -> None:
        """Append keys and values for the rows of a step. `embedded` `[T, hidden]` are its tokens, `hidden` `[T, hidden]` what the model
        has made of them."""
        before = step.recur(self.places.state, hidden, shifted)
        if self.native is not None and step.runs_blocks:
            self.native.follow(embedded, before, step, rotations)
            return
        rotation = None if self.rope is None else rotations[self.rope]
        self.first(self.rows(embedded, before), step, rotation, norm=self.blocks[0].norms.before_mixer)

    def rows(self, embedded: mx.array, before: mx.array) -> mx.array:
        """Embeddings and hidden rows `[T, hidden]` of the tokens before them to what the blocks read, `[T, hidden]`."""
        both = [self.token_norm(embedded), self.hidden_norm(before.astype(embedded.dtype))]
        return self.join(mx.concatenate(both, axis=-1))

    def draft(self, embedded: mx.array, before: mx.array, step: Step, rotations: Mapping[str, Rotation]) -> tuple[mx.array, mx.array]:
        """The same for a step of the head alone. Returns the rows to join with the next tokens, and those for the output matrix, which
        still need `norm` where the two are different."""
        if self.native is not None and step.runs_blocks:
            x = self.native.draft(embedded, before, step, rotations)
            return x, x if self.normed else self.norm(x)
        x = self.rows(embedded, before)
        for block in self.blocks:
            x = block(x, step, rotations)
        normed = self.norm(x)
        return normed if self.normed else x, normed

    def scores(self, rows: mx.array, target: Target) -> Scores:
        y = target.unembed(rows) if self.output is None else self.output(rows).astype(mx.float32)
        return Scores(target.scaled(y), self.tokens)


def shifted(x: mx.array, states: tuple[mx.array, ...]) -> tuple[mx.array, tuple[mx.array, ...]]:
    """The rows one later: `[B, L, C]` after the last ones `[B, 1, C]` of the step before."""
    if x.shape[1] == 1:
        return states[0].astype(x.dtype), (x,)
    whole = mx.concatenate([states[0].astype(x.dtype), x], axis=1)
    return whole[:, :-1], (whole[:, -1:],)


@dataclass(frozen=True, slots=True)
class Names:
    """What the parts of a head are called in a checkpoint."""

    token_norm: str
    """The norm of embeddings."""
    hidden_norm: str
    """The norm of hidden rows."""
    join: str
    """The projection of both."""
    norm: str
    """The norm before the output matrix."""


QWEN = Names("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm")
"""In checkpoints of Qwen, and in heads by themselves."""


def deepseek_names(layer: int) -> Names:
    """Those of DeepSeek and GLM, where a head is one more layer."""
    name = f"model.layers.{layer}"
    return Names(f"{name}.enorm", f"{name}.hnorm", f"{name}.eh_proj", f"{name}.shared_head.norm")


def plain_norm(eps: float) -> Callable[[Weights, str, int], RMSNorm]:
    """Loads norms whose weights are stored as they are."""
    return lambda weights, name, size: RMSNorm.load(weights, name, size, eps)


def load_head(
    weights: Weights,
    names: Names,
    places: Places,
    hidden: int,
    norm: Callable[[Weights, str, int], RMSNorm],
    blocks: Sequence[AnyBlock],
    first: Mixer,
    *,
    rope: str | None = "rope",
    normed: bool,
) -> Head:
    """A head of these blocks. `norm` loads a norm; the other arguments are fields of `Head`."""
    return Head(
        places,
        norm(weights, names.token_norm, hidden),
        norm(weights, names.hidden_norm, hidden),
        Linear.load(weights, names.join, hidden, 2 * hidden),
        first,
        blocks,
        rope,
        norm(weights, names.norm, hidden),
        normed,
    )


def without_first(spec: AttentionSpec) -> AttentionSpec:
    """The spec of a head that was trained on pairs of a hidden row and the next token: there is none for a sequence's first token."""
    return replace(spec, skips_first=True)


def with_vocabulary(head: Head, weights: Weights, name: str, tokens: Sequence[int], vocab: int) -> Head:
    """The head with the rows of the output matrix `name` `[vocab, hidden]` that belong to the tokens that it proposes."""
    ids = mx.array(list(tokens), dtype=mx.int32)
    whole = weights.matrix(name, (vocab, head.norm.weight.shape[0]))
    return replace(head, tokens=ids, output=Linear(map_rows(whole, lambda rows: rows[ids])))
