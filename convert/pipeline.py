"""Reader, mapper, quantizer, writer, verifier: one tensor at a time, so the largest one bounds the memory."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx

from .. import kernels_cpu
from ..errors import ConversionError
from ..loading.checkpoint import Checkpoint
from ..loading.files import to_json
from ..loading.formats import check_format, dtype_name, format_text, parse_dtype
from ..loading.gguf import GGUFCheckpoint
from ..loading.gguf.packings import ALIKE, PACKINGS, SAME_BITS, SHARED
from ..loading.load import load_tokenizer, open_checkpoint
from ..loading.resolve import resolve
from ..nn.weights import Format
from ..tokenizer.no_tokenizer import NoTokenizer
from ..tokenizer.tokenizer import Tokenizer
from .config import destination_config, differences_in_mlx_lm
from .destination import check_destination, check_room, staged
from .encoders import check_encoder
from .importance import Importance, random_texts
from .importance import measure as measure_importance
from .mapper import QUANTIZED, ConversionPlan, Output, plan
from .quality import LEAST_TOKENS, compare, tokens_to_measure
from .quantizer import Quantizer
from .reader import blocks
from .report import Action, Report, TensorReport
from .sidecars import copy_sidecars, sidecars
from .verifier import verify
from .writer import SHARD_BYTES, Writer

Progress = Callable[[int, int], None]

_MOST_GROWTH = 1.5
"""How many times as large as its source a result may be without being asked for."""


def convert(
    src: str | Path,
    dst: str | Path,
    *,
    bits: int | None = None,
    group_size: int | None = None,
    mode: str = "affine",
    dtype: str | mx.Dtype | None = None,
    progress: Progress | None = None,
    measure: bool | None = None,
    shard_bytes: int = SHARD_BYTES,
    encoder: str | None = None,
    weighing: Progress | None = None,
) -> Report:
    """Write a model (directory, GGUF file, alias or hub id) as an MLX directory, which mlx-lm loads as well.

    Without `bits` (and with mode "affine") formats that MLX shares with the source are kept exactly, block types of GGUF with groups of 32
    keep their codes, those with groups of 16 get more bits in groups of 32 (`PACKINGS`), and nothing else is quantized. `dtype` applies to
    what is not quantized; by default it stays, and without `bits` block types are unpacked to it. `progress` is called with (bytes
    written, total bytes). `measure` says whether to compare a lossy result with its source on a text; by default if that takes seconds.
    `shard_bytes` limits the size of a file. `encoder` says how matrices are rounded to affine formats: "fit" (the default) minimises the
    error of each layer's outputs, for which the model reads random tokens first (`weighing` is called with bytes read, total bytes);
    "minmax" rounds within the range of each group, as `mx.quantize` does. Everything that can be wrong is found before a weight is
    read, except NaN, and the destination is complete or absent. Raises `MLXInferError`.
    """
    if group_size is not None and bits is None and mode == "affine":
        raise ConversionError("a group size without bits quantizes nothing: give the bits as well")
    asked = check_format(bits, group_size, mode) if bits is not None or mode != "affine" else None
    target_dtype = None if dtype is None else parse_dtype(dtype)
    chosen = check_encoder(encoder)
    destination = Path(os.path.abspath(os.path.expanduser(dst)))
    check_destination(destination)
    checkpoint = open_checkpoint(resolve(src).path)
    try:
        if isinstance(checkpoint, GGUFCheckpoint) and (asked or target_dtype is None):
            checkpoint.pack(SAME_BITS if asked else PACKINGS.keys() - SHARED)
        planned = plan(checkpoint, asked, group_size is None, target_dtype)
        source_nbytes = sum(checkpoint.nbytes(name) for name in checkpoint.names())
        if asked is None and target_dtype is None:
            _check_growth(checkpoint, planned, source_nbytes)
        check_room(destination, planned.nbytes)
        tokenizer = load_tokenizer(checkpoint)
        importance = _importance(checkpoint.path, planned, weighing) if chosen == "fit" else {}
        report = Report(checkpoint.path, destination, skipped=planned.skipped)
        report.notes = [*planned.notes, *differences_in_mlx_lm(planned.config)]
        report.source_nbytes = source_nbytes
        with staged(destination) as directory:
            _write_small_files(checkpoint, tokenizer, planned, directory, report)
            writer = Writer(directory, [output.parts() for output in planned.outputs], shard_bytes=shard_bytes)
            _write_tensors(checkpoint, planned, importance, report, writer, progress)
            verify(directory, planned)
    finally:
        checkpoint.close()
    if any(tensor.error for tensor in report.tensors) and measure is not False:
        _measure(report, tokenizer, required=measure is True)
    return report


def _check_growth(checkpoint: Checkpoint, planned: ConversionPlan, source_nbytes: int) -> None:
    """Raise `ConversionError` if formats that MLX does not have would make a much larger model without being asked for."""
    if not isinstance(checkpoint, GGUFCheckpoint) or planned.nbytes <= _MOST_GROWTH * source_nbytes:
        return
    kinds = sorted(kind for kind in checkpoint.kinds() - ALIKE.keys() if kind[:1] in QUANTIZED)
    if kinds:
        raise ConversionError(
            f"{checkpoint.path.name} is quantized in formats that MLX does not have ({', '.join(kinds)}). In those that hold it, its "
            f"{source_nbytes / 1e9:.3g} GB would become {planned.nbytes / 1e9:.3g} GB. "
            f"Give bits (4, for example) to quantize it again, or dtype {dtype_name(planned.dtype)} to unpack it"
        )


def _write_small_files(checkpoint: Checkpoint, tokenizer: Tokenizer, planned: ConversionPlan, directory: Path, report: Report) -> None:
    config = directory / "config.json"
    config.write_text(to_json(destination_config(planned)), encoding="utf-8")
    if isinstance(checkpoint, GGUFCheckpoint):
        tokenizer.save(directory)
        # A tokenizer's files name one end token; models of several (end of text, end of turn) keep the list here.
        ends = {"eos_token_id": sorted(tokenizer.eos_token_ids)}
        (directory / "generation_config.json").write_text(to_json(ends), encoding="utf-8")
        report.copied = sorted(path.name for path in directory.iterdir() if path != config)
        return
    files, left = sidecars(checkpoint.path)
    report.copied = copy_sidecars(files, checkpoint.path, directory)
    report.notes += [f"{name} is not copied: {reason}" for name, reason in left.items()]


def _importance(path: Path, planned: ConversionPlan, progress: Progress | None) -> Importance:
    """What the matrices to be rounded are weighed with; nothing if there are none."""
    rounded = [o for o in planned.outputs if o.action in ("quantized", "requantized") and isinstance(o.target, Format)]
    if all(o.target.mode != "affine" for o in rounded if isinstance(o.target, Format)):
        return {}
    checkpoint = open_checkpoint(path, raw_blocks=kernels_cpu.in_use())
    try:
        return measure_importance(checkpoint, random_texts(checkpoint.config), progress)
    finally:
        checkpoint.close()


def _write_tensors(
    checkpoint: Checkpoint, planned: ConversionPlan, importance: Importance, report: Report, writer: Writer, progress: Progress | None
) -> None:
    report.parameters = sum(math.prod(output.request.shape) for output in planned.outputs)
    try:
        for output in planned.outputs:
            report.tensors.append(_write_tensor(checkpoint, output, importance.get(output.request.name), writer))
            report.nbytes += report.tensors[-1].nbytes
            mx.clear_cache()
            if progress:
                progress(report.nbytes, planned.nbytes)
        writer.finish(report.parameters)
    finally:
        writer.abandon()


def _write_tensor(checkpoint: Checkpoint, output: Output, importance: mx.array | None, writer: Writer) -> TensorReport:
    quantizer, parts = Quantizer(output, importance), output.parts()
    for block in blocks(checkpoint, output.request):
        for part, array in zip(parts, quantizer(block), strict=True):
            writer.append(part, array)
    request, error = output.request, quantizer.error
    action: Action = "cast" if output.action == "kept" and error else output.action
    nbytes = sum(part.nbytes for part in parts)
    return TensorReport(output.name, request.sources, request.shape, action, format_text(output.target), nbytes, error)


def _measure(report: Report, tokenizer: Tokenizer, *, required: bool) -> None:
    count = tokens_to_measure(report.parameters) or (LEAST_TOKENS if required else 0)
    if isinstance(tokenizer, NoTokenizer) or not count:
        why = "there is no tokenizer" if isinstance(tokenizer, NoTokenizer) else "that would take long"
        report.notes.append(f"not compared with the source on a text: {why}")
        return
    report.quality = compare(report.source, report.destination, tokenizer, count)
