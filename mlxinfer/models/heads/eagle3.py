"""EAGLE-3 drafters (arXiv:2503.01840): one Llama layer with an output matrix for a smaller vocabulary.

The layer reads the embedding of a token and a projection of the previous token's rows at three of the model's blocks. Checkpoints are those
of SpecForge and speculators. Tensors, here after `mtp.`: `fc` `[hidden, 3 * model's hidden]`; `layers.0` (SpecForge: `midlayer`) with
`input_layernorm` for embeddings, `hidden_norm` for rows, and projections of both concatenated; `norm`; `lm_head` `[n, hidden]`; `d2t`
`[n]`, which maps token i of the small vocabulary to `i + d2t[i]`; `t2d` `[vocab]`, a mask of the small vocabulary; and `embed_tokens`,
unless the model's are used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx

from ...cache.base import Rotation, Step
from ...errors import DraftError
from ...nn.activations import gated
from ...nn.attention import Attention, load_output, load_qkv
from ...nn.linear import Embedding, Linear
from ...nn.mlp import GatedMLP
from ...nn.norms import RMSNorm
from ...nn.weights import Weights
from ...util.dataclass import dataclass
from ..block import attention_specs, gated_mlp
from ..common import Sizes, read_sizes
from ..config_reader import ConfigReader
from ..decoder import Architecture
from ..families.llama import LLAMA
from ..rope_config import MRopeLayout, read_rope
from .mtp import DraftScores, HeadPlan, Places, TargetModel, shifted, without_first

_ROPE = "mtp"
_LAYER = "mtp.layers.0"
_IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True, slots=True)
class Eagle3:
    """Implements `mtp.AnyHead`."""

    places: Places
    """Layers in the cache."""
    taps: Sequence[int]
    """The three blocks whose input rows are read."""
    reduce: Linear
    """`[hidden, 3 * model's hidden]`: joins the three rows."""
    token_norm: RMSNorm
    """Applied to embeddings."""
    hidden_norm: RMSNorm
    """Applied to rows."""
    mixer: Attention
    """Attention from `[T, 2 * hidden]`, embedding and row, to `[T, hidden]`."""
    mlp: GatedMLP
    mlp_norm: RMSNorm
    """Norm before `mlp`."""
    norm: RMSNorm
    """Norm before `output`."""
    output: Linear
    """`[n, hidden]`."""
    tokens: mx.array | None
    """Proposed tokens, int32 `[n]`; None for all."""
    embedding: Embedding | None
    """Separate embedding; None for the model's."""
    adds_normed: bool
    """True if the residual of attention is the normed row."""
    scales_embeddings: bool = False
    """False: it was trained on the model's embeddings without their scale."""
    normed: bool = False
    """False: it does not read the last rows."""
    reads: Sequence[int] = ()
    """Empty: it has its own pages."""
    ropes: Sequence[str] = (_ROPE,)

    def follow(self, embedded: mx.array, hidden: mx.array, step: Step, rotations: Mapping[str, Rotation]) -> None:
        before = step.recur(self.places.state, self.reduce(hidden), shifted)
        self.mixer(self._join_inputs(embedded, before)[0], step, rotations[_ROPE])

    def draft(self, embedded: mx.array, before: mx.array, step: Step, rotations: Mapping[str, Rotation]) -> tuple[mx.array, mx.array]:
        both, residual = self._join_inputs(embedded, before)
        x = residual + self.mixer(both, step, rotations[_ROPE])
        x = self.mlp(x, norm=self.mlp_norm, onto=x)
        return x, self.norm(x)

    def scores(self, rows: mx.array, target: TargetModel) -> DraftScores:
        return DraftScores(self.output(rows).astype(mx.float32), self.tokens)

    def _join_inputs(self, embedded: mx.array, before: mx.array) -> tuple[mx.array, mx.array]:
        """Return (input of attention, residual)."""
        before = before.astype(embedded.dtype)
        normed = self.hidden_norm(before)
        return mx.concatenate([self.token_norm(embedded), normed], axis=-1), normed if self.adds_normed else before


def head_plan(config: Mapping[str, Any], model_type: str, target: Architecture) -> HeadPlan:
    """Read a drafter's config for this model. Raises `DraftError` if it does not fit, `UnsupportedModelError` if unsupported."""
    reader = ConfigReader(_flat(config))
    sizes, wide = read_sizes(reader, LLAMA), target.sizes
    _check_fit(reader, sizes, wide)
    taps = _taps(reader, wide.layers)
    count = reader.optional_integer("draft_vocab_size") or sizes.vocab
    tokens = _vocabulary(reader, count, sizes.vocab)
    adds_normed = reader.boolean("norm_before_residual", False)
    rope = read_rope(reader, sizes.heads.dim, sizes.positions, mrope=MRopeLayout(interleaved=None))
    _check_the_rest(reader)

    def load(weights: Weights, places: Places) -> Eagle3:
        own = weights.has("mtp.embed_tokens.weight") or sizes.hidden != wide.hidden
        norms = [_norm(weights, f"{_LAYER}.{part}", sizes) for part in ("input_layernorm", "hidden_norm", "post_attention_layernorm")]
        norm = _norm(weights, "mtp.norm", sizes)
        heads = sizes.heads
        qkv = load_qkv(weights, f"{_LAYER}.self_attn", replace(heads, hidden=2 * sizes.hidden))
        attention = Attention(places.own_attention, heads, qkv, load_output(weights, f"{_LAYER}.self_attn", heads), rope=rope)
        table = weights.matrix("mtp.embed_tokens.weight", (sizes.vocab, sizes.hidden)) if own else None
        return Eagle3(
            places,
            taps,
            Linear.load(weights, "mtp.fc", sizes.hidden, len(taps) * wide.hidden),
            norms[0],
            norms[1],
            attention,
            gated_mlp(weights, _LAYER, sizes, gated(sizes.activation)),
            norms[2],
            norm,
            Linear.load(weights, "mtp.lm_head", count, sizes.hidden),
            None if tokens is None else mx.array(tokens, dtype=mx.int32),
            None if table is None else Embedding(table, norm.weight.dtype),
            adds_normed,
        )

    spec = without_first(attention_specs(sizes, [None])[0])
    return HeadPlan(spec, load, {_ROPE: rope}, taps=taps, kept=sizes.hidden)


def _check_fit(reader: ConfigReader, sizes: Sizes, wide: Sizes) -> None:
    reads = reader.optional_integer("target_hidden_size") or sizes.hidden
    if reads != wide.hidden:
        raise DraftError(f"the drafter reads rows of {reads} channels, and the model has {wide.hidden}: it was trained for another model")
    if sizes.vocab != wide.vocab:
        raise DraftError(f"the drafter was trained for a vocabulary of {sizes.vocab} tokens, and the model has {wide.vocab}")
    if sizes.layers != 1:
        raise reader.bad("num_hidden_layers", sizes.layers, "1: drafters have one layer")


def _norm(weights: Weights, name: str, sizes: Sizes) -> RMSNorm:
    return RMSNorm.load(weights, name, sizes.hidden, sizes.eps)


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return one object with the keys of layer and drafter, SpecForge's form; speculators nests the layer's keys."""
    inner = config.get("transformer_layer_config")
    if inner is None:
        return dict(config)
    reader = ConfigReader(config)
    if not isinstance(inner, dict):
        raise reader.bad("transformer_layer_config", inner, "an object")
    if "norm_before_residual" not in config:
        raise reader.error("norm_before_residual", "must be given: drafters of this form are trained with either")
    reader.only("speculators_model_type", "eagle3")
    reader.only("has_no_defaults_at_init", False)
    own = {key: reader.take(key) for key in ("draft_vocab_size", "target_hidden_size", "norm_before_residual", _IDS, "d2t", "t2d")}
    reader.only("norm_before_fc", False)
    reader.skip("transformer_layer_config", "speculators_config", "speculators_version", "embed_requires_grad", "tie_word_embeddings")
    reader.finish()
    return inner | own


def _taps(reader: ConfigReader, layers: int) -> list[int]:
    """Return the blocks whose input rows are read.

    Ids inside `eagle_config` count the blocks that output the rows (SGLang); ids beside it the blocks that read them (vLLM). Without ids,
    both use block 2, the middle one, and the third from the end.
    """
    inner, ids = reader.take("eagle_config"), reader.integers(_IDS)
    found = [2, layers // 2, layers - 3] if ids is None else list(ids)
    if inner is not None:
        if not isinstance(inner, dict):
            raise reader.bad("eagle_config", inner, "an object")
        own = ConfigReader(inner)
        own.only("use_aux_hidden_state", True)
        left = own.integers(_IDS)
        own.finish()
        found = found if left is None else [each + 1 for each in left]
    if len(found) != 3 or found != sorted(set(found)) or found[0] < 0 or found[-1] > layers:
        where = ", ".join(map(str, found))
        raise DraftError(f"the drafter reads rows before the blocks {where}, which must be three in order of the model's {layers}")
    return found


def _vocabulary(reader: ConfigReader, count: int, vocab: int) -> list[int] | None:
    """Return the tokens of the drafter's vocabulary; None for the model's."""
    offsets, there = reader.integers("d2t"), reader.integers("t2d")
    if offsets is None and count == vocab:
        return None
    if offsets is None or len(offsets) != count:
        have = "no d2t" if offsets is None else f"{len(offsets)} entries in d2t"
        raise DraftError(f"the drafter has {count} tokens and {have}, which says which tokens of the model they are")
    tokens = [i + offset for i, offset in enumerate(offsets)]
    if len(set(tokens)) != count or min(tokens) < 0 or max(tokens) >= vocab:
        raise DraftError(f"d2t of the drafter must name {count} different tokens below {vocab}")
    if there is not None and (len(there) != vocab or [i for i, one in enumerate(there) if one] != sorted(tokens)):
        raise DraftError("t2d and d2t of the drafter do not name the same tokens")
    return tokens


def _check_the_rest(reader: ConfigReader) -> None:
    for key in ("attention_bias", "mlp_bias", "qkv_bias", "bias", "parallel_drafting", "norm_before_fc"):
        reader.only(key, False)
    reader.only("logit_scale", 1, 1.0)
    reader.skip("max_window_layers", "target_model_type")
    reader.finish()
