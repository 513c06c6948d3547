"""What is found out about a model before its tensors are written: what each input counts, and the codes of encoders that need to read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Union

import mlx.core as mx

from ... import kernels_cpu
from ...loading.checkpoint import Checkpoint
from ...loading.load import open_checkpoint
from ...loading.weights import Progress
from ...models import architecture
from ..calibrate.importance import Importance
from ..encode.gptq_pipeline import Encodings, encode_all
from ..write.journal import Journal
from .weight_map import ConversionPlan

if TYPE_CHECKING:
    from ..calibrate.texts import Calibration

Texts = Union[str, Path, "Calibration", None]
"""What `--calibration` takes, or the sequences themselves; None for the model's own samples."""


def default_tokens(parameters: int) -> int:
    """How many tokens of its own samples a model of this size reads for GPTQ."""
    from ..calibrate.texts import default_tokens as tokens_of

    return tokens_of(parameters)


def weighed_alike(planned: ConversionPlan) -> Importance:
    """Equal weights for every matrix that is rounded: for embeddings that are not also the head, and for what no token reached."""
    return {output.request.name: mx.ones((output.request.shape[-1],)) for output in planned.outputs if output.is_rounded}


def encodings(
    checkpoint: Checkpoint, planned: ConversionPlan, texts: Texts, journal: Journal, progress: Progress | None, batch: int
) -> Encodings:
    """All matrices that are rounded to an affine format, encoded by GPTQ, `batch` tokens at once. Raises `MLXInferError`."""
    read = texts_to_read(checkpoint, texts, journal)
    forward = open_checkpoint(checkpoint.path, raw_blocks=kernels_cpu.in_use())
    try:
        return encode_all(checkpoint, forward, planned, read, journal, progress, batch=batch)
    finally:
        forward.close()
        mx.clear_cache()


def texts_to_read(checkpoint: Checkpoint, texts: Texts, journal: Journal, tokens: int | None = None) -> Sequence[Sequence[int]]:
    """Token ids to calibrate with, `tokens` of them, by default as many as GPTQ wants; kept in the journal, as sampling them takes a while.
    Raises `MLXInferError`."""
    from ..calibrate import texts as calibration

    kept = journal.done("calibration")
    if kept is None:
        if isinstance(texts, calibration.Calibration):
            found = texts
        else:
            sizes = architecture(checkpoint.config).sizes
            tokens = tokens or default_tokens(sum(math.prod(checkpoint.shape(name)) for name in checkpoint.names()))
            found = calibration.calibration(texts or "samples", checkpoint.path, sizes.vocab, tokens)
        kept = {"texts": [list(text) for text in found.texts], "name": found.name}
        journal.record("calibration", kept)
    read: list[list[int]] = kept["texts"]
    return read
