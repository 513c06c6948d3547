"""Gemma 4's assistant: a small Gemma 4 with queries only, which reads the pages of the model that it drafts for
(`Gemma4AssistantForCausalLM` of transformers 5.23).

Its input joins the model's scaled embedding of the last token with the model's normed row of the token before. Layers with a window read
the pages of the model's last layer with a window and pages, full layers those of the last full layer. All drafts of a step are made at the
position of the last token, whose keys do not exist yet, so nothing is appended. Only token and row change from one draft to the next; the
assistant projects the row back to the model's width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any

import mlx.core as mx

from ...cache.base import AttentionSpec, Rotation, Step
from ...errors import DraftError
from ...nn.activations import gated
from ...nn.linear import Embedding, Linear
from ...nn.mlp import GatedMLP
from ...nn.norms import RMSNorm
from ...nn.weights import Weights
from ...util.dataclass import dataclass
from ..common import Sizes, read_sizes
from ..config_reader import ConfigReader
from ..decoder import Architecture
from ..families.gemma4 import GEMMA4, Kinds, load_factor, load_norms, read_ropes
from ..families.gemma4_block import Gemma4Attention, Gemma4Block
from .mtp import DraftScores, HeadPlan, Places, TargetModel, shifted

PREFIX = "mtp."
"""Prefix of the assistant's tensors among the model's."""


@dataclass(frozen=True, slots=True)
class Clusters:
    """Clusters of tokens of equal size; the output product covers only the tokens of the likeliest clusters."""

    centroids: Linear
    """`[clusters, hidden]`."""
    tokens: mx.array
    """Tokens of each cluster, int32 `[clusters, n]`."""
    chosen: int
    """Number of clusters computed per row."""

    def logits(self, rows: mx.array, table: Embedding) -> tuple[mx.array, mx.array]:
        """Map rows `[R, hidden]` to logits, float32 `[R, m]`, and their tokens, int32 `[R, m]`."""
        near = self.centroids(rows)
        best = mx.argpartition(-near, self.chosen - 1, axis=-1)[:, : self.chosen]
        tokens = self.tokens[best].reshape(rows.shape[0], -1)
        vectors = table(tokens.reshape(-1)).reshape(*tokens.shape, -1)
        return (vectors @ rows[..., None])[..., 0].astype(mx.float32), tokens


@dataclass(frozen=True, slots=True)
class Assistant:
    """Implements `mtp.AnyHead`."""

    places: Places
    """Layer of the last token's row."""
    reads: Sequence[int]
    """Model layers whose pages are read."""
    into: Linear
    """`[hidden, 2 * model's hidden]`: input projection of embedding and row, in this order."""
    blocks: Sequence[Gemma4Block]
    norm: RMSNorm
    """Norm after the blocks."""
    back: Linear
    """`[model's hidden, hidden]`: projection to the next row."""
    table: Embedding
    """Output matrix, `[vocab, hidden]`."""
    clusters: Clusters | None
    """None: logits of all tokens are computed."""
    normed: bool = True
    """True: it reads the model's rows after the last norm."""
    taps: Sequence[int] = ()
    """Empty: it reads the last rows."""
    ropes: Sequence[str] = field(default=())
    embedding: Embedding | None = None
    """None: it reads the model's embeddings."""
    scales_embeddings: bool = True
    """True: embeddings have the model's scale."""

    def follow(self, embedded: mx.array, hidden: mx.array, step: Step, rotations: Mapping[str, Rotation]) -> None:
        step.recur(self.places.state, hidden, shifted)

    def draft(self, embedded: mx.array, before: mx.array, step: Step, rotations: Mapping[str, Rotation]) -> tuple[mx.array, mx.array]:
        x = self.into(mx.concatenate([embedded, before.astype(embedded.dtype)], axis=-1))
        for block in self.blocks:
            x = block(x, step, rotations)
        y = self.norm(x)
        return self.back(y), y

    def scores(self, rows: mx.array, target: TargetModel) -> DraftScores:
        if self.clusters is None:
            return DraftScores(self.table.as_linear(rows).astype(mx.float32))
        return DraftScores(*self.clusters.logits(rows, self.table))


def head_plan(config: Mapping[str, Any], model_type: str, target: Architecture) -> HeadPlan:
    """Read an assistant's config for this model. Raises `DraftError` if it does not fit, `UnsupportedModelError` if unsupported."""
    whole = ConfigReader(config)
    text = whole.take("text_config")
    if model_type not in ("gemma4", "gemma4_text"):
        raise DraftError(f"the assistant reads the pages of a Gemma 4, and the model is {model_type}")
    if not isinstance(text, dict):
        raise whole.bad("text_config", text, "an object")
    hidden = whole.integer("backbone_hidden_size", 1536)
    if hidden != target.sizes.hidden:
        raise DraftError(f"the assistant reads rows of {hidden} channels, and the model has {target.sizes.hidden}: it is another model's")
    reader = ConfigReader(text)
    sizes = read_sizes(reader, GEMMA4, activation_key="hidden_activation")
    if sizes.vocab != target.sizes.vocab:
        raise DraftError(f"the assistant has a vocabulary of {sizes.vocab} tokens, and the model has {target.sizes.vocab}")
    kinds = Kinds.read(reader, sizes)
    sources = {kind: _source(kind, kinds, target.specs) for kind in kinds.types}
    ropes = {PREFIX + kind: rope for kind, rope in read_ropes(reader, kinds, sizes, partial=0.25).items() if kind in kinds.types}
    _check_the_rest(reader, sizes)
    clusters = _ClusterSizes.read(whole, sizes)
    whole.skip("tie_word_embeddings")
    whole.finish()

    def load(weights: Weights, places: Places) -> Assistant:
        table = weights.matrix(f"{PREFIX}model.embed_tokens.weight", (sizes.vocab, sizes.hidden))
        norm = RMSNorm.load(weights, f"{PREFIX}model.norm", sizes.hidden, sizes.eps)
        return Assistant(
            places,
            sorted(set(sources.values())),
            Linear.load(weights, f"{PREFIX}pre_projection", sizes.hidden, 2 * hidden),
            [_block(weights, layer, sizes, kinds, sources[kind]) for layer, kind in enumerate(kinds.types)],
            norm,
            Linear.load(weights, f"{PREFIX}post_projection", hidden, sizes.hidden),
            Embedding(table, norm.weight.dtype),
            clusters.load(weights, sizes) if clusters else None,
            ropes=tuple(PREFIX + kind for kind in dict.fromkeys(kinds.types)),
        )

    return HeadPlan(None, load, ropes)


def _block(weights: Weights, layer: int, sizes: Sizes, kinds: Kinds, source: int) -> Gemma4Block:
    name, kind = f"{PREFIX}model.layers.{layer}", kinds.types[layer]
    return Gemma4Block(
        Gemma4Attention.load(weights, f"{name}.self_attn", source, kinds.heads[kind], ["q_proj"], sizes.eps),
        GatedMLP.load(weights, f"{name}.mlp", sizes.hidden, sizes.inner, gated(sizes.activation)),
        load_norms(weights, name, sizes),
        rope=PREFIX + kind,
        factor=load_factor(weights, name),
    )


def _source(kind: str, kinds: Kinds, specs: Sequence[object]) -> int:
    """Return the model layer whose pages are read by layers of `kind`."""
    heads, window = kinds.heads[kind], kinds.window_of(kind)
    found = [(i, s) for i, s in enumerate(specs) if isinstance(s, AttentionSpec) and (s.window is None) == (window is None)]
    if not found:
        raise DraftError(f"the assistant has layers of {kind}, and the model has none")
    at, spec = found[-1]
    wanted, stored = (heads.kv, heads.dim, window), (spec.kv_heads, spec.key_dim, spec.window)
    if wanted != stored:
        words = [f"{kv} KV heads of {dim} channels and " + (f"a window of {w}" if w else "no window") for kv, dim, w in (wanted, stored)]
        raise DraftError(f"the assistant's layers of {kind} read {words[0]}, and the model keeps {words[1]}: it is another model's")
    return at


def _check_the_rest(reader: ConfigReader, sizes: Sizes) -> None:
    reader.only("num_kv_shared_layers", 0, sizes.layers)
    reader.only("hidden_size_per_layer_input", 0)
    reader.only("enable_moe_block", False)
    reader.only("use_double_wide_mlp", False)
    reader.only("use_bidirectional_attention", "vision", False)
    reader.only("attention_bias", False)
    # The assistant has no experts, and transformers does not cap its logits.
    reader.skip("hidden_act", "vocab_size_per_layer_input", "final_logit_softcapping", "num_experts", "top_k_experts")
    reader.skip("moe_intermediate_size", "num_local_experts", "expert_intermediate_size", "partial_rotary_factor")
    reader.finish()


@dataclass(frozen=True, slots=True)
class _ClusterSizes:
    """Sizes of the clusters."""

    count: int
    chosen: int
    """Number of clusters computed per row."""
    order: Sequence[int]
    """All tokens, ordered by cluster."""

    @classmethod
    def read(cls, reader: ConfigReader, sizes: Sizes) -> _ClusterSizes | None:
        ordered, order = reader.boolean("use_ordered_embeddings", False), reader.integers("token_ordering")
        count = reader.count("num_centroids", 2048)
        chosen = reader.integer("centroid_intermediate_top_k", 32)
        if not ordered:
            return None
        if sizes.vocab % count:
            raise reader.bad("num_centroids", count, f"a divisor of the {sizes.vocab} tokens")
        if chosen > count:
            raise reader.bad("centroid_intermediate_top_k", chosen, f"at most {count}, the number of centroids")
        if order is None or sorted(order) != list(range(sizes.vocab)):
            raise DraftError("masked_embedding.token_ordering of the assistant must hold every token of the vocabulary once")
        return cls(count, chosen, order)

    def load(self, weights: Weights, sizes: Sizes) -> Clusters:
        centroids = Linear.load(weights, f"{PREFIX}masked_embedding.centroids", self.count, sizes.hidden)
        tokens = mx.array(list(self.order), dtype=mx.int32).reshape(self.count, -1)
        return Clusters(centroids, tokens, self.chosen)
