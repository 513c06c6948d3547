"""Writes the tensors of a plan one by one, those that an interrupted run has not written yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from ...loading.checkpoint import Checkpoint
from ...loading.formats import format_text
from ..calibrate.importance import Importance
from ..encode.gptq_pipeline import Encodings
from ..encode.quantizer import Quantizer
from ..plan.weight_map import ConversionPlan, Output
from ..report import Action, TensorReport
from .journal import Journal
from .reader import blocks
from .source_files import SourceFiles
from .writer import Writer

Progress = Callable[[int, int], None]


def write_tensors(
    checkpoint: Checkpoint,
    planned: ConversionPlan,
    importance: Importance,
    writer: Writer,
    journal: Journal,
    files: SourceFiles,
    progress: Progress | None,
    block: int | None = None,
    encoded: Encodings | None = None,
) -> list[TensorReport]:
    """What was done with each tensor, in the order of the plan. `progress` is called with (bytes written, bytes in all), those of earlier
    runs included; `block` is the size in `reader.blocks`. Raises `WeightsError` for NaN, `CheckpointError` if the source changes
    meanwhile, OSError."""
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


def _write(checkpoint: Checkpoint, output: Output, importance: mx.array | None, writer: Writer, size: int | None) -> dict[str, Any]:
    """The relative errors, for the journal."""
    quantizer, parts = Quantizer(output, importance), output.parts()
    for block in blocks(checkpoint, output.request, size):
        for part, array in zip(parts, quantizer(block), strict=True):
            writer.append(part, array)
    return {"error": quantizer.error, "weighted_error": quantizer.weighted_error}


def _write_encoded(encoded: Encodings, output: Output, writer: Writer) -> dict[str, Any] | None:
    """The relative errors, for the journal; None where it was not encoded before."""
    found = encoded.pieces(output)
    if found is None:
        return None
    pieces, errors = found
    for piece in pieces:
        for part, array in zip(output.parts(), piece, strict=True):
            writer.append(part, array)
    return errors


def _report(output: Output, values: dict[str, Any]) -> TensorReport:
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
