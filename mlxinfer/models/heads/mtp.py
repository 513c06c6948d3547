"""Draft heads for multi-token prediction (MTP; arXiv:2412.19437, section 2.2).

A head's layer reads the model's hidden row of a token and the embedding of the next token, and predicts the token after that. Embedding and
output matrix are the model's. Row p joins token p with the hidden row of position p - 1. A page of the head therefore depends only on
tokens up to its end, like any other layer's page. The hidden row for the next row is a state in the cache.
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


@dataclass(frozen=True, slots=True)
class Places:
    """Layers of a head in the cache."""

    attention: int | None
    """Index of the layer with keys and values; None if the head has none."""
    state: int
    """Index of the layer with the last token's hidden row."""

    @property
    def own_attention(self) -> int:
        """`attention`, for a head with keys and values."""
        assert self.attention is not None
        return self.attention


@dataclass(frozen=True, slots=True)
class DraftScores:
    """Logits of the tokens that a head can propose."""

    logits: mx.array
    """Float32 `[R, n]`."""
    tokens: mx.array | None = None
    """Tokens of the columns, int32 `[n]` or `[R, n]`; None for all tokens in order."""

    def whole(self, vocab: int) -> mx.array:
        """Return logits `[R, vocab]`, minus infinity for tokens that cannot be proposed."""
        if self.tokens is None:
            return self.logits
        empty = mx.full((self.logits.shape[0], vocab), -mx.inf, self.logits.dtype)
        return mx.put_along_axis(empty, mx.broadcast_to(self.tokens, self.logits.shape), self.logits, axis=-1)

    def at(self, places: mx.array) -> mx.array:
        """Return the tokens of these columns, one per row: integers `[R]`."""
        if self.tokens is None:
            return places
        if self.tokens.ndim == 1:
            return mx.take(self.tokens, places)
        return mx.take_along_axis(self.tokens, places[:, None], axis=-1)[:, 0]


class TargetModel(Protocol):
    """Part of the target model that a head's logits need."""

    def unembed(self, rows: mx.array) -> mx.array:
        """Multiply `[R, hidden]` by the output matrix: float32 `[R, vocab]`."""
        ...

    def scaled(self, y: mx.array) -> mx.array:
        """Apply the model's scaling and cap to `[R, vocab]`."""
        ...


class AnyHead(Protocol):
    """Interface of a loaded head: `mtp.Head`, an EAGLE-3 drafter, or Gemma 4's assistant."""

    @property
    def places(self) -> Places:
        """Layers in the cache."""
        ...

    @property
    def normed(self) -> bool:
        """True if the head reads hidden rows after the model's last norm."""
        ...

    @property
    def taps(self) -> Sequence[int]:
        """Blocks, ascending, whose input rows `[T, n * hidden]` are read instead of the last rows.

        The number of blocks stands for the last block's output. Empty for the last rows.
        """
        ...

    @property
    def reads(self) -> Sequence[int]:
        """Model layers whose pages the head reads; it then appends nothing for drafts."""
        ...

    @property
    def ropes(self) -> Sequence[str]:
        """Keys of the ropes for drafts."""
        ...

    @property
    def embedding(self) -> Embedding | None:
        """Separate embedding; None for the model's."""
        ...

    @property
    def scales_embeddings(self) -> bool:
        """True if the head reads embeddings with the model's scale."""
        ...

    def follow(self, embedded: mx.array, hidden: mx.array, step: Step, rotations: Mapping[str, Rotation]) -> None:
        """Append a step's rows to the cache: embeddings `[T, hidden]` and the model's hidden rows."""
        ...

    def draft(self, embedded: mx.array, before: mx.array, step: Step, rotations: Mapping[str, Rotation]) -> tuple[mx.array, mx.array]:
        """Map token embeddings `[R, hidden]` and the rows before them `[R, n]` to (next rows `[R, n]`, rows for `scores`)."""
        ...

    def scores(self, rows: mx.array, target: TargetModel) -> DraftScores:
        """Return the logits of rows that `draft` returned."""
        ...


class HeadProgram(Protocol):
    """A head's layer as programs of the CPU kernels."""

    def follow(self, embedded: mx.array, before: mx.array, step: Step, rotations: Mapping[str, Rotation]) -> None:
        """Append keys and values of the rows."""
        ...

    def draft(self, embedded: mx.array, before: mx.array, step: Step, rotations: Mapping[str, Rotation]) -> mx.array:
        """Return the rows that leave the layer, `[T, hidden]`."""
        ...


@dataclass(frozen=True, slots=True)
class HeadPlan:
    """A head's plan, before its tensors are requested."""

    spec: AttentionSpec | None
    """Cache spec of the layer; None without keys and values."""
    load: Callable[[Weights, Places], AnyHead]
    """Requests the tensors and creates the head."""
    ropes: Mapping[str, Rope] = field(default_factory=dict)
    """Ropes of the head, by the key in its blocks."""
    vocabulary: Sequence[int] | None = None
    """Proposed tokens; None for all."""
    witness: str = "mtp.fc"
    """Name of a projection that identifies a checkpoint with the head."""
    taps: Sequence[int] = ()
    """See `AnyHead.taps`."""
    kept: int | None = None
    """Channels of the last token's stored row; None for the model's."""

    def specs(self, hidden: int) -> tuple[LayerSpec, ...]:
        """Return the cache specs for hidden rows of `hidden` channels."""
        state = RecurrentSpec(((1, self.kept or hidden),), optional=True)
        return (state,) if self.spec is None else (self.spec, state)

    def places(self, first: int) -> Places:
        """Return the layers' places if they start at index `first`."""
        return Places(None, first) if self.spec is None else Places(first, first + 1)


@dataclass(frozen=True, slots=True)
class Head:
    """Implements `AnyHead` for MTP."""

    places: Places
    """Layers in the cache."""
    token_norm: RMSNorm
    """Applied to embeddings."""
    hidden_norm: RMSNorm
    """Applied to hidden rows."""
    join: Linear
    """`[hidden, 2 * hidden]`: projection of embedding and hidden row, in this order."""
    first: Mixer
    """Attention of the first block."""
    blocks: Sequence[AnyBlock]
    """One layer: a block, or two blocks of one part each."""
    rope: str | None
    """Key of the attention's rope."""
    norm: RMSNorm
    """Norm before the output matrix."""
    normed: bool
    """True if hidden rows are read after the model's last norm and returned after `norm`; False for both before."""
    tokens: mx.array | None = None
    """Proposed tokens, int32 `[n]`, ascending; None for all."""
    output: Linear | None = None
    """Rows `[n, hidden]` of the output matrix for `tokens`."""
    native: HeadProgram | None = None
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

    def scores(self, rows: mx.array, target: TargetModel) -> DraftScores:
        y = target.unembed(rows) if self.output is None else self.output(rows).astype(mx.float32)
        return DraftScores(target.scaled(y), self.tokens)


def shifted(x: mx.array, states: tuple[mx.array, ...]) -> tuple[mx.array, tuple[mx.array, ...]]:
    """Shift rows `[B, L, C]` by one, starting with the last row `[B, 1, C]` of the previous step."""
    if x.shape[1] == 1:
        return states[0].astype(x.dtype), (x,)
    whole = mx.concatenate([states[0].astype(x.dtype), x], axis=1)
    return whole[:, :-1], (whole[:, -1:],)


@dataclass(frozen=True, slots=True)
class HeadNames:
    """Names of a head's parts in a checkpoint."""

    token_norm: str
    hidden_norm: str
    join: str
    norm: str
    """Norm before the output matrix."""


QWEN = HeadNames("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm")
"""Names in Qwen's checkpoints and in separate heads."""


def deepseek_names(layer: int) -> HeadNames:
    """Return DeepSeek's and GLM's names, where a head is one more layer."""
    name = f"model.layers.{layer}"
    return HeadNames(f"{name}.enorm", f"{name}.hnorm", f"{name}.eh_proj", f"{name}.shared_head.norm")


def plain_norm(eps: float) -> Callable[[Weights, str, int], RMSNorm]:
    """Return a loader of RMS norms with unmodified weights."""
    return lambda weights, name, size: RMSNorm.load(weights, name, size, eps)


def load_head(
    weights: Weights,
    names: HeadNames,
    places: Places,
    hidden: int,
    norm: Callable[[Weights, str, int], RMSNorm],
    blocks: Sequence[AnyBlock],
    first: Mixer,
    *,
    rope: str | None = "rope",
    normed: bool,
) -> Head:
    """Load a head with these blocks. `norm` loads a norm; the other arguments are fields of `Head`."""
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
    """Return the spec of a head without a row for a sequence's first token, which has no hidden row before it."""
    return replace(spec, skips_first=True)


def with_vocabulary(head: Head, weights: Weights, name: str, tokens: Sequence[int], vocab: int) -> Head:
    """Return the head with the rows of the output matrix `name` `[vocab, hidden]` for its proposed `tokens`."""
    ids = mx.array(list(tokens), dtype=mx.int32)
    whole = weights.matrix(name, (vocab, head.norm.weight.shape[0]))
    return replace(head, tokens=ids, output=Linear(map_rows(whole, lambda rows: rows[ids])))
