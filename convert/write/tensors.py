"""Writes the tensors of a plan that an interrupted run has not written yet, and verifies the result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx

from ...errors import ConversionError, MLXInferError
from ...loading.checkpoint import Checkpoint
from ...loading.directory import SafetensorsCheckpoint
from ...loading.formats import format_text
from ...loading.vision import prepare_vision
from ...loading.weights import MetaWeights, Progress
from ...models import build
from ..calibrate.importance import Importance
from ..encode.gptq_pipeline import Encodings
from ..encode.quantizer import Quantizer
from ..plan.weight_map import ConversionPlan, OutputTensor
from ..report import Action, TensorReport
from .journal import Journal
from .reader import SourceFiles, blocks
from .writer import ShardWriter


def write_tensors(
    checkpoint: Checkpoint,
    planned: ConversionPlan,
    importance: Importance,
    writer: ShardWriter,
    journal: Journal,
    files: SourceFiles,
    progress: Progress | None,
    block: int | None = None,
    encoded: Encodings | None = None,
) -> list[TensorReport]:
    """Write all tensors, and return what was done with each in the order of the plan.

    `progress` gets (bytes written, total bytes), earlier runs included; `block` is the size of `reader.blocks`. Raises `WeightsError` for
    NaN, `CheckpointError` if the source changes, OSError.
    """
    reports = []
    done = 0
    for output in planned.outputs:
        unit, parts = f"tensor {output.name}", output.parts()
        values = journal.done(unit)
        if values is None:
            values = _write_encoded(encoded, output, writer) if encoded else None
            if values is None:
                values = _write(checkpoint, output, importance.get(output.request.name), writer, block)
            files.check()
            journal.record(unit, values, writer.spans(parts))
            if encoded:
                encoded.forget(output)
            mx.clear_cache()
        else:
            writer.skip(parts)
        reports.append(_report(output, values))
        done += reports[-1].nbytes
        if progress:
            progress(done, planned.nbytes)
    return reports


def _write(
    checkpoint: Checkpoint, output: OutputTensor, importance: mx.array | None, writer: ShardWriter, size: int | None
) -> dict[str, Any]:
    """Encode and write a tensor; return its relative errors for the journal."""
    quantizer, parts = Quantizer(output, importance), output.parts()
    for block in blocks(checkpoint, output.request, size):
        for part, array in zip(parts, quantizer(block), strict=True):
            writer.append(part, array)
    return {"error": quantizer.error, "weighted_error": quantizer.weighted_error}


def _write_encoded(encoded: Encodings, output: OutputTensor, writer: ShardWriter) -> dict[str, Any] | None:
    """Write a tensor that was encoded before, and return its relative errors; None if it was not."""
    found = encoded.pieces(output)
    if found is None:
        return None
    pieces, errors = found
    for piece in pieces:
        for part, array in zip(output.parts(), piece, strict=True):
            writer.append(part, array)
    return errors


def _report(output: OutputTensor, values: dict[str, Any]) -> TensorReport:
    request, error = output.request, float(values["error"])
    action: Action = "cast" if output.action == "kept" and error else output.action
    nbytes = sum(part.nbytes for part in output.parts())
    return TensorReport(
        output.name,
        request.sources,
        request.shape,
        action,
        format_text(output.target),
        nbytes,
        error,
        output.kind,
        values.get("weighted_error"),
    )


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
            if plan.whole:
                prepare_vision(checkpoint, weights.index, mx.float32, "on")
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
