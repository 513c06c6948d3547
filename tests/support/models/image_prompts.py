"""Prompts with images of the golden checkpoints in tests/golden/vision, given to a text model as the engine gives them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlxinfer.cache.base import AttentionSpec, GivenRows, Segment
from mlxinfer.cache.paged import PagedCache
from mlxinfer.models import build
from mlxinfer.models.decoder import Decoder
from mlxinfer.nn.packing import settle
from mlxinfer.util.dataclass import dataclass

from ..oracles.plain_step import PlainCache, PlainStep
from .plain_weights import PlainWeights

GOLDEN = Path(__file__).parents[2] / "golden" / "vision"
STRIDE = 5
"""Every fifth logit is stored."""


@dataclass(frozen=True, eq=False)
class Prompt:
    """One case of a golden checkpoint."""

    tokens: np.ndarray
    """int32 `[n]`; an image row has token 0, as the engine passes on an id that every embedding has."""
    is_image: np.ndarray
    """bool `[n]`."""
    features: np.ndarray
    """`[image rows, hidden]`."""
    deepstack: np.ndarray
    """`[layers, image rows, hidden]`."""
    rope: np.ndarray | None
    """Positions int32 `[3, n]`; None for a family whose positions are indices."""
    shift: int
    """Position minus index after the prompt."""
    logits: np.ndarray
    """Every `STRIDE`th of each row, as transformers computes them."""
    greedy: list[int]
    """transformers' answer."""

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def images(self) -> list[tuple[int, int]]:
        """Ranges [first, end) of consecutive image rows."""
        edges = np.flatnonzero(np.diff(self.is_image.astype(np.int8), prepend=0, append=0))
        return [(int(first), int(end)) for first, end in edges.reshape(-1, 2)]


def config_of(family: str) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((GOLDEN / family / "config.json").read_text(encoding="utf-8"))
    return read


@cache
def prompt_of(family: str, case: str) -> Prompt:
    config = config_of(family)
    image = config.get("image_token_id", config.get("image_token_index"))
    with np.load(GOLDEN / family / "reference.npz") as data:
        found = {name.removeprefix(f"{case}_"): data[name] for name in data.files if name.startswith(f"{case}_")}
    ids = found["input_ids"]
    is_image = ids == image
    features = found["features"]
    return Prompt(
        np.where(is_image, 0, ids).astype(np.int32),
        is_image,
        features,
        found.get("deepstack", np.zeros((0, *features.shape), np.float32)),
        found.get("position_ids"),
        int(found["rope_delta"][0]) if "rope_delta" in found else 0,
        found["logits"],
        [int(token) for token in found["greedy"]],
    )


@cache
def text_model(family: str, *, packed: bool) -> Decoder:
    """The text model in float32; `packed` for the CPU kernels, if these are in use."""
    held = mx.load(str(GOLDEN / family / "model.safetensors"))
    assert isinstance(held, dict)
    weights = PlainWeights({name: tensor.astype(mx.float32) for name, tensor in held.items()})
    return build(config_of(family), weights, ready=settle) if packed else build(config_of(family), weights)


class ImageReader:
    """A text model that reads prompts with images, in plain MLX or with the cache of a running engine."""

    def __init__(self, model: Decoder, *, paged: bool) -> None:
        self.model = model
        self.cache = PagedCache(model.layers, dtype=mx.float32, kv_cache_tokens=2048, chunk=256) if paged else None
        self._plain = PlainCache(model.layers)
        self.spans = any(isinstance(spec, AttentionSpec) and spec.sees_spans for spec in model.layers)
        """True if rows of an image see one another in some layer. Chunks must not divide them then."""
        self._past: dict[int, int] = {}
        self._known: dict[int, list[int]] = {}

    def open(self) -> int:
        slot = len(self._past) if self.cache is None else self.cache.open()
        self._past[slot], self._known[slot] = 0, []
        return slot

    def read(self, *parts: tuple[int, Prompt | Sequence[int], int], shift: int | None = None) -> list[np.ndarray]:
        """Logits of the rows of each (slot, prompt or tokens of its answer, count or shift) in one step.

        `shift` replaces the shift of text in prompts.
        """
        segments: list[Segment] = []
        tokens: list[int] = []
        places: list[int] = []
        features: list[np.ndarray] = []
        deepstack: list[np.ndarray] = []
        for slot, what, number in parts:
            start, past = len(tokens), self._past[slot]
            if isinstance(what, Prompt):
                rows = slice(past, past + number)
                own, before = np.flatnonzero(what.is_image[rows]), int(what.is_image[:past].sum())
                places += (own + start).tolist()
                features.append(what.features[before : before + len(own)])
                deepstack.append(what.deepstack[:, before : before + len(own)])
                new = what.tokens[rows].tolist()
                spans = tuple((first, end) for first, end in what.images if past <= first < past + number) if self.spans else ()
                segment = Segment(slot, start, number, past, len(what), spans=spans)
                if what.rope is not None and len(own):
                    segment = Segment(slot, start, number, past, len(what), rope=what.rope[:, rows])
                elif what.rope is not None:
                    segment = Segment(
                        slot, start, number, past, len(what), shift=int(what.rope[0, past]) - past if shift is None else shift
                    )
            else:
                new = list(what)
                segment = Segment(slot, start, len(new), past, past + len(new), shift=number)
            segments.append(segment)
            tokens += new
            self._past[slot] += len(new)
            self._known[slot] += new
        step = PlainStep(self._plain, tuple(segments)) if self.cache is None else self.cache.begin(segments)
        if places:
            deep = tuple(mx.array(each) for each in np.concatenate(deepstack, axis=1))
            step.given = GivenRows(mx.array(places, dtype=mx.int32), mx.array(np.concatenate(features)), deep)
        logits = self.model.logits(self.model.hidden(mx.array(tokens, mx.int32), step))  # type: ignore[arg-type]
        if isinstance(step, PlainStep):
            mx.eval(logits)
        else:
            mx.eval(logits, step.state)
            assert self.cache is not None
            self.cache.commit(step, self._known)
        return [np.array(logits[s.start : s.start + s.count]) for s in segments]

    def read_prompt(self, prompt: Prompt, chunks: Sequence[int], shift: int | None = None) -> tuple[int, np.ndarray]:
        """Read a prompt in chunks: its slot and the logits of all rows."""
        assert sum(chunks) == len(prompt)
        slot = self.open()
        return slot, np.concatenate([self.read((slot, prompt, count), shift=shift)[0] for count in chunks])

    def answer(self, slot: int, logits: np.ndarray, count: int, shift: int) -> list[int]:
        """The greedy answer after a prompt whose last row has these logits."""
        found: list[int] = []
        for _ in range(count):
            found.append(int(logits[-1].argmax()))
            (logits,) = self.read((slot, [found[-1]], shift))
        return found


def relative_error(logits: np.ndarray, prompt: Prompt) -> float:
    """Largest difference to transformers' logits, relative to the largest of them."""
    return float(np.abs(logits[:, ::STRIDE] - prompt.logits).max() / np.abs(prompt.logits).max())
