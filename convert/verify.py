"""Opens the written directory again like any other model, and checks it."""

from __future__ import annotations

from pathlib import Path

from ..errors import ConversionError, MLXInferError
from ..loading.directory import SafetensorsCheckpoint
from ..loading.formats import format_text
from ..loading.weights import MetaWeights
from ..models import build
from .plan.weight_map import ConversionPlan


def verify(directory: Path, plan: ConversionPlan) -> None:
    """Check that the directory builds the same graph from its headers, and that every tensor is stored as planned.

    Raises `ConversionError`: a failure here is a bug of the conversion, and nothing is published.
    """
    try:
        checkpoint = SafetensorsCheckpoint(directory)
        try:
            weights = MetaWeights(checkpoint)
            build(checkpoint.config, weights, mtp=None)
            weights.finish()
        finally:
            checkpoint.close()
    except MLXInferError as error:
        raise ConversionError(f"the converted model cannot be opened: {error}") from error
    expected = {output.name: output for output in plan.outputs}
    for name, tensor in weights.tensors.items():
        output = expected.pop(name, None)
        if output is None or tensor.request.shape != output.request.shape or _stored_as(weights, name) != output.target:
            raise ConversionError(f"{name} was not written as planned ({format_text(output.target) if output else 'not at all'})")
    if expected:
        raise ConversionError(f"{next(iter(expected))} was written, but no graph asks for it")


def _stored_as(weights: MetaWeights, name: str) -> object:
    return weights.index.checkpoint.stored(name) if weights.has(name) else None
