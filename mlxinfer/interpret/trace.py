"""Activations of a prompt, with analyses: logit lens, entropy, surprisal, norms, attribution."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, Union, cast

import mlx.core as mx

from ..cache.base import AttentionSpec
from ..errors import SettingError
from ..models.decoder import Decoder
from ..models.hooks import ATTENTION_OUT, HEADS, MLP, RESIDUAL, ROUTER
from ..nn.moe import MixtureOfExperts
from ..nn.norms import RMSNorm
from ..util.dataclass import dataclass
from ..util.words import counted
from .places import ATTENTION, KV, LOGITS, TRACED, Layers, attends, checked_layers, checked_names
from .recorder import Recorder
from .trace_file import SavedTrace, TracedImage, model_kind, save

Result = TypeVar("Result")
Computing = Callable[[Callable[[], Result]], Result]
"""Calls a function in a thread that may use the model."""

MOST_BYTES = 4 * 2**30
"""Maximum bytes of a trace; larger ones are refused before anything is computed."""


def wanted_places(model: Decoder, what: Union[str, Iterable[str]], layers: Layers) -> dict[str, tuple[int, ...]]:
    """Layers to trace, by place. Raises `SettingError`."""
    found: dict[str, tuple[int, ...]] = {}
    for place in checked_names(what, TRACED):
        if place == LOGITS:
            found[place] = ()
            continue
        chosen = checked_layers(model, layers, place=place)
        if place in (ATTENTION, HEADS, KV):
            chosen = tuple(layer for layer in chosen if attends(model, layer))
        elif place == ROUTER:
            chosen = tuple(layer for layer in chosen if isinstance(getattr(model.blocks[layer], "mlp", None), MixtureOfExperts))
        if not chosen:
            kind = "experts" if place == ROUTER else "attention"
            raise SettingError(f"{place!r} cannot be traced: none of these layers has {kind}")
        found[place] = chosen
    return found


def check_size(model: Decoder, wanted: Mapping[str, Sequence[int]], tokens: int) -> None:
    """Raise `SettingError` if a trace of `tokens` tokens would take more than `MOST_BYTES`."""
    nbytes = 4 * sum(_floats(model, place, layer, tokens) for place, layers in wanted.items() for layer in layers)
    nbytes += 4 * tokens * model.vocab_size if LOGITS in wanted else 0
    if nbytes > MOST_BYTES:
        raise SettingError(
            f"a trace of {tokens} tokens would take {nbytes / 1e9:.1f} GB, more than {MOST_BYTES / 1e9:.1f}: "
            "choose fewer layers, or less of `what`"
        )


def _floats(model: Decoder, place: str, layer: int, tokens: int) -> int:
    hidden, spec = model.norm.weight.shape[0], model.layers[layer] if layer < len(model.layers) else None
    if isinstance(spec, AttentionSpec) and place in (ATTENTION, HEADS, KV):
        width = {ATTENTION: spec.query_heads * tokens, HEADS: spec.query_heads * spec.value_dim}
        return tokens * width.get(place, spec.kv_heads * (spec.key_dim + spec.value_dim))
    return tokens * hidden


@dataclass(frozen=True, slots=True)
class LogitLens:
    """Predictions from the stream that enters each layer, as if it were the last layer."""

    tokens: list[str]
    """Text of each token of the prompt."""
    layers: tuple[int, ...]
    """Layers, one more than the model has: the last row is the model's own prediction."""
    token_ids: mx.array
    """int32 `[layers, T]`: likeliest next token."""
    texts: list[list[str]]
    """`token_ids` as text."""
    probability: mx.array
    """float32 `[layers, T]`: probability of `token_ids`."""
    final_probability: mx.array
    """float32 `[layers, T]`: probability of the whole model's likeliest token."""
    entropy: mx.array
    """float32 `[layers, T]`, in nats."""

    def __repr__(self) -> str:
        answer = f", which ends in {self.texts[-1][-1]!r}" if self.texts and self.texts[-1] else ""
        return f"LogitLens({counted(len(self.layers), 'layer')}, {counted(len(self.tokens), 'token')}{answer})"


class Trace:
    """Activations of one prompt. `t["residual"][layer]` and the like are evaluated float32 arrays:

    - `"residual"`: the stream that enters a layer, `[T, hidden]`. Layer 0 is the embedding. One layer more than the model has is the
      stream after the last one, before the last norm. (transformers' `hidden_states`, whose last entry is normed.)
    - `"attention"`: attention weights after the softmax, `[heads, T, T]`, computed from unquantized keys
    - `"attention_out"`, `"mlp"`: outputs of a layer's mixer and feed-forward part, `[T, hidden]`, which are added to the stream
    - `"heads"`: each head's result before the output projection, `[heads, T, dim]`
    - `"router"`: the router's logits, `[T, experts]`
    - `"kv"`: a pair of keys (normed and rotated) and values, `[T, kv_heads, dim]` each, before they are quantized
    - `"logits"`: `[T, vocab]`, without a layer
    """

    def __init__(
        self,
        model: Decoder,
        token_ids: list[int],
        tokens: list[str],
        values: Mapping[str, Any],
        decode: Callable[[int], str],
        compute: Computing[Any],
        images: tuple[TracedImage, ...] = (),
    ) -> None:
        self.token_ids = token_ids
        self.tokens = tokens
        """The text of each token; "[image 1 (row, column)]" for rows of images."""
        self.images = images
        """The images of the prompt, in order."""
        self._model, self._values, self._decode, self._compute = model, values, decode, compute

    def __getitem__(self, what: str) -> Any:
        if what not in self._values:
            raise SettingError(f"the trace has no {what!r}, but {', '.join(self._values)}: ask for it with trace(..., what=[{what!r}])")
        return self._values[what]

    def __contains__(self, what: object) -> bool:
        return what in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self.token_ids)

    def __repr__(self) -> str:
        return f"Trace({counted(len(self.token_ids), 'token')}: {', '.join(self._values)})"

    @property
    def model(self) -> Decoder:
        """The traced model."""
        return self._model

    def save(self, path: Union[str, Path]) -> Path:
        """Write all arrays to a safetensors file, and return its path. `LLM.load_trace` and other readers of the format can read it: an
        array is named after its place and layer, such as `residual.3`. Raises `SettingError` if the file cannot be written."""
        saved = SavedTrace(model_kind(self._model), self.token_ids, self.tokens, dict(self._values), self.images)
        return save(saved, Path(path))

    def logit_lens(self) -> LogitLens:
        """Predictions after each layer. Needs "residual", with its last layer."""
        held = self._streams()
        return self._compute(lambda: self._lens(held))  # type: ignore[no-any-return]

    def _lens(self, held: Mapping[int, mx.array]) -> LogitLens:
        best, chances, final, entropies = [], [], [], []
        answer = mx.argmax(self._logits_of(held[max(held)]), axis=-1)
        for layer in held:
            logprobs = _log_softmax(self._logits_of(held[layer]))
            best.append(mx.argmax(logprobs, axis=-1).astype(mx.int32))
            chances.append(mx.exp(logprobs.max(axis=-1)))
            final.append(mx.exp(mx.take_along_axis(logprobs, answer[:, None], axis=-1)[:, 0]))
            entropies.append(_entropy(logprobs))
            mx.eval(best[-1], chances[-1], final[-1], entropies[-1])  # otherwise the logits of all layers would exist at once
        stacked = [mx.stack(rows) for rows in (best, chances, final, entropies)]
        mx.eval(stacked)
        ids = cast("list[list[int]]", stacked[0].tolist())
        texts = [[self._decode(token) for token in row] for row in ids]
        return LogitLens(list(self.tokens), tuple(held), stacked[0], texts, *stacked[1:])

    def entropy(self) -> mx.array:
        """Entropy of the token after each, float32 `[T]`, in nats. Needs "logits"."""
        logits = self["logits"]
        return self._compute(lambda: _evaluated(_entropy(_log_softmax(logits))))  # type: ignore[no-any-return]

    def surprisal(self) -> mx.array:
        """Negative log-probability of each token from the second on, float32 `[T - 1]`, in nats; NaN for image rows. Needs "logits"."""
        logits, last = self["logits"], self._model.vocab_size - 1
        following = mx.array([min(token, last) for token in self.token_ids[1:]])
        if following.size == 0:
            raise SettingError("a single token follows nothing: trace a longer prompt")

        def surprise() -> mx.array:
            found = -mx.take_along_axis(_log_softmax(logits[:-1]), following[:, None], axis=-1)[:, 0]
            for image in self.images:
                found[mx.array(image.rows.reshape(-1) - 1)] = mx.nan
            return _evaluated(found)

        return self._compute(surprise)  # type: ignore[no-any-return]

    def residual_norms(self) -> mx.array:
        """Norm of the stream that enters each traced layer, float32 `[layers, T]`. Needs "residual"."""
        held = self["residual"]
        return self._compute(lambda: _evaluated(mx.stack([mx.linalg.norm(x, axis=-1) for x in held.values()])))  # type: ignore[no-any-return]

    def attribution(self, token: int | None = None, position: int = -1) -> dict[str, float]:
        """Direct logit attribution: contributions of the embedding and of each part of each layer to the logit of `token` (an id; None: the
        likeliest) after the token at `position`. The last norm's factor is fixed, and the logit is taken before scaling and cap, so that
        the contributions sum up to it. Needs "residual", "attention_out" and "mlp" of all layers. (Elhage et al.,
        transformer-circuits.pub, 2021)"""
        streams, mixed, fed = self._streams(), self[ATTENTION_OUT], self[MLP]
        layers = range(len(self._model.blocks))
        if any(layer not in part for layer in layers for part in (mixed, fed)) or 0 not in streams:
            raise SettingError("an attribution needs all layers: trace without `layers`")
        if type(self._model.norm) is not RMSNorm:
            raise SettingError("an attribution is only known for models whose last norm is an RMS norm")
        names = ["embedding", *(f"{part} {layer}" for layer in layers for part in ("attention", "mlp"))]
        parts = [streams[0], *(part[layer] for layer in layers for part in (mixed, fed))]
        place = _place(position, len(self.token_ids))
        shares = self._compute(lambda: self._shares(mx.stack([part[place] for part in parts]), streams[max(streams)][place], token))
        return dict(zip(names, shares, strict=True))

    def _shares(self, parts: mx.array, stream: mx.array, token: int | None) -> list[float]:
        norm = self._model.norm
        scale = mx.rsqrt(mx.square(stream).mean() + norm.eps) * norm.weight.astype(mx.float32)
        rows = mx.concatenate([parts, stream[None]]) * scale
        logits = self._model.unembed(rows.astype(self._model.embedding.dtype))
        if token is None:
            token = cast("int", mx.argmax(logits[-1]).item())
        elif not 0 <= token < self._model.vocab_size:
            raise SettingError(f"{token!r} is not one of the model's token ids (0 to {self._model.vocab_size - 1})")
        return cast("list[float]", logits[:-1, token].tolist())

    def _streams(self) -> dict[int, mx.array]:
        held: dict[int, mx.array] = self[RESIDUAL]
        if len(self._model.blocks) not in held:
            raise SettingError(
                f"this needs the stream that leaves the last layer: trace with layers that include {len(self._model.blocks)}"
            )
        return held

    def _logits_of(self, stream: mx.array) -> mx.array:
        rows = stream.astype(self._model.embedding.dtype)
        return self._model.logits(self._model.norm(rows) if self._model.joined else rows)


def read(recorder: Recorder, model: Decoder, wanted: Mapping[str, Sequence[int]], logits: mx.array) -> dict[str, Any]:
    """Evaluated values of a trace."""
    values: dict[str, Any] = {}
    for place, layers in wanted.items():
        values[place] = logits if place == LOGITS else {layer: recorder.found(place, layer) for layer in layers}
    if KV in wanted:
        values[KV] = {layer: _keys_and_values(values[KV][layer], model.layers[layer]) for layer in wanted[KV]}
    mx.eval(values)
    return values


def _keys_and_values(rows: mx.array, spec: object) -> tuple[mx.array, mx.array]:
    assert isinstance(spec, AttentionSpec)
    width = spec.kv_heads * spec.key_dim
    return mx.unflatten(rows[:, :width], 1, (spec.kv_heads, spec.key_dim)), mx.unflatten(
        rows[:, width:], 1, (spec.kv_heads, spec.value_dim)
    )


def _place(position: int, count: int) -> int:
    if not -count <= position < count:
        raise SettingError(f"position {position} is not one of the {count} that were traced")
    return position % count


def _log_softmax(logits: mx.array) -> mx.array:
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def _entropy(logprobs: mx.array) -> mx.array:
    return -(mx.exp(logprobs) * mx.where(mx.isfinite(logprobs), logprobs, 0)).sum(axis=-1)


def _evaluated(x: mx.array) -> mx.array:
    mx.eval(x)
    return x
