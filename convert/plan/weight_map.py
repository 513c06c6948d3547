"""Maps the headers of a source to the tensors of the destination (names, shapes, formats) before any weight is read."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from ...errors import ConversionError
from ...loading.checkpoint import Checkpoint
from ...loading.formats import AFFINE_GROUPS, format_text, main_dtype, packed_shapes
from ...loading.gguf import GGUFCheckpoint
from ...loading.gguf.mlx_formats import PACKINGS, lossy
from ...loading.load import model_type
from ...loading.weights import MetaWeights, PlannedTensor, TensorRequest, can_quantize
from ...models import build, supports
from ...models.vlm_text import TEXT_MODELS, graph_name, text_config
from ...nn.weights import Format
from ...util.words import counted
from ..report import Action
from .stored_part import StoredPart
from .towers import TowerPlan, plan_towers, whole_config

_SOURCE_NAMES = ("idefics3", "smolvlm")
"""Families whose text model has a prefix of its own in mlx-vlm. Others have `language_model.`, in mlx-lm too."""
_ST_NAMES = {mx.float32: "F32", mx.float16: "F16", mx.bfloat16: "BF16", mx.uint32: "U32", mx.uint8: "U8"}


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """One tensor of the graph, as read and as written."""

    request: TensorRequest
    """Request of the graph."""
    stored: Format | mx.Dtype
    """Format as read: one that MLX shares with the source, or the dtype of plain numbers."""
    target: Format | mx.Dtype
    """Format as written."""
    dtype: mx.Dtype
    """Dtype of the floating-point parts as written: the numbers, or the scales of an affine format."""
    kind: str = ""
    """Format in the source, as its tool calls it."""
    unpacked_from: str | None = None
    """Quantized type in the source if its numbers are read in float32, such as "Q6_K"."""
    codes_of: str | None = None
    """Quantized type in the source if codes are kept and scales may be rounded, such as "Q4_K"."""
    place: str | None = None
    """Prefix of names in a whole model; empty for the source's names, None for a text model alone."""

    @property
    def name(self) -> str:
        """Name in the destination. A text model alone has no prefix of the larger model."""
        name = self.request.name
        return name if self.place == "" else (self.place or "") + graph_name(name)

    @property
    def action(self) -> Action:
        """Treatment of the tensor."""
        if isinstance(self.target, Format):
            if self.stored == self.target:
                return "kept"
            return "requantized" if self.quantized_before else "quantized"
        if self.quantized_before:
            return "dequantized"
        if self.stored != self.target:
            return "cast"
        return "kept" if self.request.recipe is None else "made"

    @property
    def is_rounded(self) -> bool:
        """True if codes and scales must be found for it."""
        return isinstance(self.target, Format) and self.action in ("quantized", "requantized")

    @property
    def quantized_before(self) -> str | None:
        """Quantization in the source, in words; None for a plain tensor."""
        return self.codes_of or format_text(self.stored) if isinstance(self.stored, Format) else self.unpacked_from

    def parts(self) -> list[StoredPart]:
        """Return the stored tensors: for a quantized matrix, codes, scales and biases."""
        shape = self.request.shape
        if not isinstance(self.target, Format):
            return [_part(self.name, self.target, shape)]
        packed, groups = packed_shapes(shape, self.target)
        base = self.name.removesuffix("weight")
        if self.target.mode != "affine":
            return [_part(self.name, mx.uint32, packed), _part(base + "scales", mx.uint8, groups)]
        scales = [_part(base + name, self.dtype, groups) for name in ("scales", "biases")]
        return [_part(self.name, mx.uint32, packed), *scales]


def _part(name: str, dtype: mx.Dtype, shape: tuple[int, ...]) -> StoredPart:
    return StoredPart(name, _ST_NAMES[dtype], shape, math.prod(shape) * dtype.size)


@dataclass(frozen=True, slots=True)
class ConversionPlan:
    """Everything that a conversion will write."""

    config: dict[str, Any]
    """Config of the text model."""
    outputs: tuple[OutputTensor, ...]
    """Tensors in the order of writing."""
    skipped: dict[str, str]
    """Tensors of the source that are not written, with the reason."""
    dtype: mx.Dtype
    """Dtype of what is not quantized."""
    default: Format | None
    """First format of the config's quantization block; None without quantization."""
    notes: tuple[str, ...]
    """Messages for the user."""
    towers: TowerPlan
    """Towers of the source."""
    whole: dict[str, Any] | None = None
    """Config of the whole model, if the destination has its vision tower; None for a text model."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors to be written."""
        return sum(part.nbytes for output in self.outputs for part in output.parts())


def plan(checkpoint: Checkpoint, asked: Format | None, any_group: bool, dtype: mx.Dtype | None, towers: str = "16") -> ConversionPlan:
    """Plan a conversion from headers alone. `towers` is `ConvertArgs.towers`.

    `asked` is the format for matrices, None to keep stored formats. With `any_group`, matrices stored in its bits and mode keep their group
    size. `dtype` applies to unquantized tensors; None keeps the source's. Raises `MLXInferError`.
    """
    architecture = model_type(checkpoint)
    if not supports(architecture):
        raise ConversionError(f"{architecture!r} has no graph here, so that its tensors cannot be accounted for: use mlx_lm.convert")
    planned = MetaWeights(checkpoint)
    build(checkpoint.config, planned, mtp=None)
    planned.finish()
    widen = asked is None and dtype is None
    dtype = dtype or natural_dtype(checkpoint)
    skipped = dict(planned.skipped)
    tower = plan_towers(checkpoint, planned.index, towers)
    place = None if not tower.loads else "" if architecture in _SOURCE_NAMES else "language_model."
    outputs = tuple(
        replace(_output(tensor, checkpoint, asked, any_group, dtype, widen), place=place) for tensor in planned.tensors.values()
    )
    config = text_config(checkpoint.config) if architecture in TEXT_MODELS else checkpoint.config
    whole = whole_config(checkpoint.config, config) if tower.loads else None
    default = _commonest(outputs) or next(iter(tower.formats.values()), None)
    return ConversionPlan(config, outputs, skipped, dtype, default, tuple(_notes(outputs, asked)), tower, whole)


def natural_dtype(checkpoint: Checkpoint) -> mx.Dtype:
    """Return the stored dtype, or 16 bits for a GGUF file, whose plain tensors are norms in float32.

    That is float16, the dtype of its scales, or bfloat16 for Gemma, whose activations exceed float16's range.
    """
    main = main_dtype(checkpoint) or mx.bfloat16
    if main != mx.float32 or not isinstance(checkpoint, GGUFCheckpoint):
        return main
    return mx.bfloat16 if model_type(checkpoint).startswith("gemma") else mx.float16


def _output(
    tensor: PlannedTensor, checkpoint: Checkpoint, asked: Format | None, any_group: bool, dtype: mx.Dtype, widen: bool
) -> OutputTensor:
    """Return the output of a tensor. `widen` gives types that MLX lacks a format with more bits that holds them."""
    request, stored = tensor.request, tensor.stored
    kind, packs = checkpoint.kind(request.sources[0]), isinstance(checkpoint, GGUFCheckpoint)
    if isinstance(stored, Format):
        keep = asked is None or _as_good(stored, asked, any_group)
        target = stored if keep else _fitting(request, asked) or stored
        again = kind in lossy(dtype) if packs else kind != format_text(stored) and stored.mode == "affine"
        return OutputTensor(request, stored, target, dtype, kind, codes_of=kind if again else None)
    own = stored if request.dtype is not None and stored in _ST_NAMES else request.dtype or dtype
    asked = PACKINGS[kind].format if packs and widen and kind in PACKINGS else asked
    return OutputTensor(request, stored, _fitting(request, asked) or own, dtype, kind, checkpoint.unpacked_from(request.sources[0]))


def _as_good(stored: Format, asked: Format, any_group: bool) -> bool:
    """True if the stored format is kept: more bits would add size, but no precision."""
    if stored.mode != asked.mode or stored.bits > asked.bits:
        return False
    return stored.bits < asked.bits or any_group or stored.group_size == asked.group_size


def _fitting(request: TensorRequest, asked: Format | None) -> Format | None:
    """Return the requested format, or the same with smaller groups if it does not divide the rows; None for plain tensors."""
    if asked is None or not request.quantizable or request.kind != "matrix" or not request.name.endswith(".weight"):
        return None
    if can_quantize(request.shape, asked):
        return asked
    smaller = [Format(asked.bits, g) for g in sorted(AFFINE_GROUPS, reverse=True) if g < asked.group_size and asked.mode == "affine"]
    return next((form for form in smaller if can_quantize(request.shape, form)), None)


def _commonest(outputs: tuple[OutputTensor, ...]) -> Format | None:
    formats = [output.target for output in outputs if isinstance(output.target, Format)]
    return max(formats, key=formats.count, default=None)


def _notes(outputs: tuple[OutputTensor, ...], asked: Format | None) -> list[str]:
    kept = [o for o in outputs if isinstance(o.stored, Format) and o.action == "kept" and o.target != asked]
    again = [o for o in outputs if o.action == "requantized"]
    alike = _counted([o for o in kept if not o.codes_of])
    notes = [f"{_matrices(count, ' keep their', ' keeps its')} format: {form}" for form, count in alike]
    codes = Counter(f"{o.codes_of}, written as {format_text(o.target)}: the same codes, scales in 16 bits" for o in kept if o.codes_of)
    notes += [f"{_matrices(count)} of {how}" for how, count in codes.most_common()]
    if asked and kept and not any(o.action in ("quantized", "requantized") for o in outputs):
        notes.insert(0, f"asking for {asked.bits} bits changed nothing: more bits than are stored would add size, but no precision")
    unpacked = Counter(f"to {format_text(o.target)}: from {o.kind}" for o in outputs if o.action == "dequantized")
    notes += [f"{_matrices(count)} unpacked {how}" for how, count in unpacked.most_common()]
    if not asked:
        wider = Counter(f"{o.unpacked_from}, written as {format_text(o.target)}, as MLX has no groups of 16" for o in again)
        notes += [f"{_matrices(count)} of {how}" for how, count in wider.most_common()]
    else:
        notes += [f"{_matrices(count)} requantized, which loses more than quantizing once: from {form}" for form, count in _counted(again)]
        plain = [o for o in outputs if o.request.kind == "matrix" and o.request.quantizable and not isinstance(o.target, Format)]
        smaller = [o for o in outputs if o.action == "quantized" and o.target != asked]
        why = f"their rows cannot be divided into groups of {asked.group_size}"
        notes += [f"{_matrices(len(plain), ' stay', ' stays')} unquantized: {why}"] if plain else []
        notes += [f"{_matrices(len(smaller), ' have', ' has')} smaller groups: {why}"] if smaller else []
    return notes


def _matrices(count: int, verb: str = "", verb_of_one: str = "") -> str:
    return counted(count, "matrix", "matrices") + (verb_of_one if count == 1 else verb)


def _counted(outputs: list[OutputTensor]) -> list[tuple[str, int]]:
    return Counter(str(output.quantized_before) for output in outputs).most_common()
