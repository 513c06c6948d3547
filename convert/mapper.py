"""From the headers of a source to the tensors of the destination: their names, shapes and formats, before a weight is read."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..errors import ConversionError
from ..loading.checkpoint import Checkpoint
from ..loading.formats import AFFINE_GROUPS, dtype_name, main_dtype, packed_shapes
from ..loading.gguf import GGUFCheckpoint
from ..loading.load import model_type
from ..loading.weights import MetaWeights, Planned, Request, can_quantize
from ..models import build, supports
from ..models.vlm_text import TEXT_MODELS, text_config
from ..nn.weights import Format
from .report import Action

_TEXT_PREFIX = re.compile(r"^language_model\.|(?<=^model\.)language_model\.")
_ST_NAMES = {mx.float32: "F32", mx.float16: "F16", mx.bfloat16: "BF16", mx.uint32: "U32", mx.uint8: "U8"}


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of the destination's safetensors, `dtype` named as in its header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Output:
    """A tensor of the graph, as it comes (`stored`) and as it is to be written (`target`); `dtype` is that of its floating parts."""

    request: Request
    stored: Format | mx.Dtype
    target: Format | mx.Dtype
    dtype: mx.Dtype

    @property
    def name(self) -> str:
        """That of the text model by itself, also where the source has it inside a larger one."""
        return _TEXT_PREFIX.sub("", self.request.name)

    @property
    def action(self) -> Action:
        if isinstance(self.target, Format):
            if not isinstance(self.stored, Format):
                return "quantized"
            return "kept" if self.stored == self.target else "requantized"
        if isinstance(self.stored, Format):
            return "dequantized"
        if self.stored != self.target:
            return "cast"
        return "kept" if self.request.recipe is None else "made"

    def parts(self) -> list[Part]:
        shape = self.request.shape
        if not isinstance(self.target, Format):
            return [_part(self.name, self.target, shape)]
        packed, groups = packed_shapes(shape, self.target)
        base = self.name.removesuffix("weight")
        if self.target.mode != "affine":
            return [_part(self.name, mx.uint32, packed), _part(base + "scales", mx.uint8, groups)]
        scales = [_part(base + name, self.dtype, groups) for name in ("scales", "biases")]
        return [_part(self.name, mx.uint32, packed), *scales]


def _part(name: str, dtype: mx.Dtype, shape: tuple[int, ...]) -> Part:
    return Part(name, _ST_NAMES[dtype], shape, math.prod(shape) * dtype.size)


@dataclass(frozen=True, slots=True)
class Plan:
    """All that a conversion will write.

    `config` is that of the text model; `default` is the format that the quantization block names first, None without quantization.
    """

    config: dict[str, Any]
    outputs: tuple[Output, ...]
    skipped: dict[str, str]
    dtype: mx.Dtype
    default: Format | None
    notes: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for output in self.outputs for part in output.parts())


def plan(checkpoint: Checkpoint, asked: Format | None, any_group: bool, dtype: mx.Dtype | None) -> Plan:
    """Raises `MLXInferError` for whatever cannot be converted. With `any_group`, matrices that are stored in the bits and mode asked
    for keep their own group size."""
    architecture = model_type(checkpoint)
    if not supports(architecture):
        raise ConversionError(f"{architecture!r} has no graph here, so that its tensors cannot be accounted for: use mlx_lm.convert")
    planned = MetaWeights(checkpoint)
    build(checkpoint.config, planned)
    planned.finish()
    dtype = dtype or _natural_dtype(checkpoint)
    outputs = tuple(_output(tensor, asked, any_group, dtype) for tensor in planned.tensors.values())
    config = text_config(checkpoint.config) if architecture in TEXT_MODELS else checkpoint.config
    return Plan(config, outputs, planned.skipped, dtype, _commonest(outputs), tuple(_notes(outputs, asked)))


def _natural_dtype(checkpoint: Checkpoint) -> mx.Dtype:
    """The stored one. In a GGUF file what is plain is in float32 only because the rest is packed, or was until it was read; 16 bits are
    natural there: float16, as the scales have, but bfloat16 for Gemma, whose activations leave float16's range."""
    main = main_dtype(checkpoint) or mx.bfloat16
    if main != mx.float32 or not isinstance(checkpoint, GGUFCheckpoint):
        return main
    return mx.bfloat16 if model_type(checkpoint).startswith("gemma") else mx.float16


def _output(tensor: Planned, asked: Format | None, any_group: bool, dtype: mx.Dtype) -> Output:
    request, stored = tensor.request, tensor.stored
    if isinstance(stored, Format):
        keep = asked is None or _as_good(stored, asked, any_group)
        target = stored if keep else _fitting(request, asked) or stored
        return Output(request, stored, target, dtype)
    own = stored if request.dtype is not None and stored in _ST_NAMES else request.dtype or dtype
    return Output(request, stored, _fitting(request, asked) or own, dtype)


def _as_good(stored: Format, asked: Format, any_group: bool) -> bool:
    """More bits than are stored would add bytes and no precision."""
    if stored.mode != asked.mode or stored.bits > asked.bits:
        return False
    return stored.bits < asked.bits or any_group or stored.group_size == asked.group_size


def _fitting(request: Request, asked: Format | None) -> Format | None:
    """The format asked for, or the same in smaller groups where the rows cannot be divided into groups of that size."""
    if asked is None or not request.quantizable or request.kind != "matrix" or not request.name.endswith(".weight"):
        return None
    if can_quantize(request.shape, asked):
        return asked
    smaller = [Format(asked.bits, g) for g in sorted(AFFINE_GROUPS, reverse=True) if g < asked.group_size and asked.mode == "affine"]
    return next((form for form in smaller if can_quantize(request.shape, form)), None)


def _commonest(outputs: tuple[Output, ...]) -> Format | None:
    formats = [output.target for output in outputs if isinstance(output.target, Format)]
    return max(formats, key=formats.count, default=None)


def _notes(outputs: tuple[Output, ...], asked: Format | None) -> list[str]:
    kept = [o for o in outputs if isinstance(o.stored, Format) and o.action == "kept" and o.target != asked]
    again = [o for o in outputs if o.action == "requantized"]
    notes = [f"{count} matrices keep their format: {form}" for form, count in _counted(kept)]
    notes += [f"{count} matrices requantized, which loses more than quantizing once: from {form}" for form, count in _counted(again)]
    if asked:
        plain = [o for o in outputs if o.request.kind == "matrix" and o.request.quantizable and not isinstance(o.target, Format)]
        smaller = [o for o in outputs if o.action == "quantized" and o.target != asked]
        why = f"their rows cannot be divided into groups of {asked.group_size}"
        notes += [f"{len(plain)} matrices stay unquantized: {why}"] if plain else []
        notes += [f"{len(smaller)} matrices have smaller groups: {why}"] if smaller else []
    return notes


def _counted(outputs: list[Output]) -> list[tuple[str, int]]:
    return Counter(str_format(output.stored) for output in outputs).most_common()


def str_format(stored: Format | mx.Dtype) -> str:
    """In words, for notes and reports."""
    if isinstance(stored, Format):
        return f"{stored.bits}-bit {stored.mode} in groups of {stored.group_size}"
    return dtype_name(stored)
