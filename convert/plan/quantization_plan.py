"""A format per tensor, as a JSON file to read, edit and replay."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...errors import ConversionError, UnsupportedModelError, one_line
from ...loading.formats import check_format
from ...loading.weights import can_quantize
from ...nn.weights import Format
from .weight_map import ConversionPlan, OutputTensor

NAME = "quantization_plan.json"
"""Name of the file in the destination."""


@dataclass(frozen=True, slots=True)
class QuantizationPlan:
    """A format for each matrix."""

    formats: Mapping[str, Format | None]
    """By the tensor's name in the destination; None leaves it unquantized."""
    bpw: float = math.nan
    """Bits per weight of everything written; NaN if unknown."""
    kl: float = math.nan
    """Expected KL divergence with the encoder it was made for, in nats; NaN if unknown."""

    def to_json(self) -> str:
        """Return the text of the file, which `read_plan` reads."""
        entries = {name.removesuffix(".weight"): _format_entry(form) for name, form in self.formats.items()}
        about = {"bits_per_weight": self.bpw, "predicted_kl": self.kl}
        about = {key: round(value, 6) for key, value in about.items() if not math.isnan(value)}
        lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in entries.items())
        head = "".join(f"{json.dumps(key)}: {json.dumps(value)},\n" for key, value in about.items())
        return "{" + head + '"tensors": {\n' + lines + "\n}}\n"

    def apply(self, planned: ConversionPlan) -> ConversionPlan:
        """Return the conversion in these formats. Raises `ConversionError` if they do not fit the model."""
        matrices = {output.name: output for output in planned.outputs if is_planned(output)}
        unknown = [name for name in self.formats if name not in matrices]
        if unknown:
            raise ConversionError(f"the plan names {_few_names(unknown)}, which the model does not have as a matrix to quantize")
        missing = [name for name in matrices if name not in self.formats]
        if missing:
            raise ConversionError(
                f"the plan says nothing about {_few_names(missing)}: add bits and group_size, or false to leave it as it is"
            )
        outputs = tuple(
            _with_target(output, self.formats.get(output.name)) if output.name in matrices else output for output in planned.outputs
        )
        formats = [output.target for output in outputs if isinstance(output.target, Format)]
        return replace(planned, outputs=outputs, default=max(formats, key=formats.count, default=None))

    def summary(self) -> str:
        """Return the number of matrices by format, in words."""
        counts = Counter(f"{form.bits}/{form.group_size}" if form else "plain" for form in self.formats.values())
        return ", ".join(f"{count} of {form}" for form, count in sorted(counts.items()))


def is_planned(output: OutputTensor) -> bool:
    """True if a plan decides the tensor's format."""
    return output.is_rounded and isinstance(output.target, Format) and output.target.mode == "affine"


def read_plan(path: str | Path) -> QuantizationPlan:
    """Read a plan written by a conversion or by hand. Raises `ConversionError`."""
    try:
        found = json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConversionError(f"the plan {path} cannot be read: {one_line(error)}") from None
    tensors = found.get("tensors") if isinstance(found, dict) else None
    if not isinstance(tensors, dict) or not tensors:
        raise ConversionError(f'the plan {path} has no "tensors", an object of names with bits and group_size')
    formats = {f"{name.removesuffix('.weight')}.weight": _parse_format(name, entry) for name, entry in tensors.items()}
    return QuantizationPlan(formats, _optional_float(found, "bits_per_weight"), _optional_float(found, "predicted_kl"))


def _optional_float(found: dict[str, Any], key: str) -> float:
    value = found.get(key)
    return float(value) if isinstance(value, (int, float)) else math.nan


def _parse_format(name: str, entry: object) -> Format | None:
    if entry is False:
        return None
    bits, size = (entry.get(key) for key in ("bits", "group_size")) if isinstance(entry, dict) else (None, None)
    if not isinstance(bits, int) or not isinstance(size, int) or (isinstance(entry, dict) and entry.get("mode", "affine") != "affine"):
        raise ConversionError(f'the plan gives {name} {json.dumps(entry)}, not {{"bits": 4, "group_size": 64}} or false')
    try:
        return check_format(bits, size, "affine")
    except UnsupportedModelError as error:
        raise ConversionError(f"the plan gives {name} a format that there is not: {error}") from None


def _with_target(output: OutputTensor, form: Format | None) -> OutputTensor:
    if form is None:
        plain = output.stored if not isinstance(output.stored, Format) and output.request.dtype is not None else output.dtype
        return replace(output, target=plain)
    if not can_quantize(output.request.shape, form):
        raise ConversionError(f"{output.name} has rows of {output.request.shape[-1]}, which groups of {form.group_size} do not divide")
    return replace(output, target=form)


def _format_entry(form: Format | None) -> dict[str, int] | bool:
    return {"bits": form.bits, "group_size": form.group_size} if form else False


def _few_names(names: list[str]) -> str:
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return " and ".join(names[:2]) + more if not more else ", ".join(names[:2]) + more
