"""Reader, mapper, quantizer, writer, verifier: one tensor at a time, so the largest one bounds the memory."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx

from .. import kernels_cpu
from .._version import __version__
from ..errors import ConversionError, MLXInferError
from ..loading.checkpoint import Checkpoint
from ..loading.files import to_json
from ..loading.find.resolve import Resolved, resolve
from ..loading.formats import dtype_name
from ..loading.gguf import GGUFCheckpoint
from ..loading.gguf.mlx_formats import ALIKE, PACKINGS, SAME_BITS, SHARED
from ..loading.gguf.types import QUANTIZED
from ..loading.ignored import ignoring
from ..loading.load import load_tokenizer, open_checkpoint
from ..models.blockwise import BATCH
from ..models.config_reader import check_ignored, ignored_note
from ..tokenizer.no_tokenizer import NoTokenizer
from ..tokenizer.tokenizer import Tokenizer
from .args import CheckedArgs, ConvertArgs
from .calibrate.importance import BATCH as WEIGHED_AT_ONCE
from .calibrate.importance import TOKENS, Importance, random_texts
from .calibrate.importance import measure as measure_importance
from .encode.gptq_pipeline import Encodings
from .plan.multimodal_towers import tower_bytes, write_towers
from .plan.preparation import default_tokens, encodings, weighed_alike
from .plan.resources import Estimate, Pieces, needs_importance, pieces
from .plan.weight_map import ConversionPlan, natural_dtype
from .plan.weight_map import plan as plan_formats
from .quality import measure_loss, tokens_to_measure
from .report import Report
from .verify import verify
from .write.config import destination_config, differences_in_mlx_lm
from .write.destination import Staging, check_destination, check_room, made_parents, staged
from .write.journal import Journal
from .write.merged import open_merged
from .write.model_card import write_documents
from .write.sidecars import copy_sidecars, sidecars
from .write.source_files import SourceFiles
from .write.tensors import Progress, write_tensors
from .write.writer import Writer

_MOST_GROWTH = 1.5
"""How many times as large as its source a result may be without being asked for."""


@dataclass(frozen=True, slots=True)
class _Told:
    """Who is told how it goes."""

    written: Progress | None
    read: Progress | None
    measured: Progress | None
    estimated: Callable[[Estimate], None] | None


def convert(
    src: str | Path,
    dst: str | Path,
    args: ConvertArgs | None = None,
    *,
    progress: Progress | None = None,
    weighing: Progress | None = None,
    measuring: Progress | None = None,
    estimated: Callable[[Estimate], None] | None = None,
    **keywords: Any,
) -> Report:
    """Write a model (directory, GGUF file, alias or hub id) as an MLX directory, which mlx-lm loads as well.

    Settings come as `args` or as its fields by keyword, such as `bits=4`. Without `bits` (and with mode "affine"), formats that MLX shares
    with the source are kept exactly. Block types of GGUF with groups of 32 keep their codes; types with groups of 16 get more bits in
    groups of 32 (`PACKINGS`). Nothing else is quantized. `dtype` applies to what is not quantized; without `bits`, a given `dtype` unpacks
    block types. `encoder` rounds to affine formats: "fit" (the default) minimises the error of each layer's outputs, after the model read
    random tokens; "gptq" also lets columns compensate for each other's errors, after the model read `calibration`; "minmax" rounds within
    the range of each group, as `mx.quantize` does. `calibration` is a text file, "samples" (the model's own, the default), "random", or a
    `Calibration`. Instead of bits, `bpw` sets the bits per weight of everything written, `target_kl` the expected loss, and `plan` names a
    file with the format of each matrix. `max_memory` bounds resident GB. Keys in `ignore_config_keys` are left out of the result's config,
    and its model card names them.

    The callbacks get (done, total): `weighing` in bytes while the model reads texts, `progress` in bytes written, `measuring` in positions
    of the comparison. `estimated` gets the sizes before the conversion starts. Faults are found before a weight is read, except NaN. The
    destination is complete or absent; its parents are created. An interrupted conversion resumes when it is called again. Raises
    `MLXInferError`, `UnknownKeywordError`.
    """
    args = ConvertArgs.of(args, keywords)
    options = args.check()
    destination = Path(os.path.abspath(os.path.expanduser(dst)))
    check_destination(destination)
    found, told = resolve(src), _Told(progress, weighing, measuring, estimated)
    with made_parents(destination), ignoring(found.path, args.ignore_config_keys):
        if args.adapter is not None:
            return _convert_merged(found, args.adapter, destination, options, told)
        with closing(open_checkpoint(found.path)) as checkpoint:
            check_ignored(args.ignore_config_keys, checkpoint.config)
            return _convert(checkpoint, found.name, destination, options, told)


def _convert_merged(found: Resolved, adapter: str | Path, destination: Path, options: CheckedArgs, told: _Told) -> Report:
    """Merge an adapter, and convert what comes out; where that is quantized, it is a model of its own first, which the encoders read."""
    with closing(open_merged(found.path, adapter, options.dtype)) as checkpoint:
        named, unmeasured = {**options.settings, "adapter": checkpoint.adapter.digest}, replace(options.args, measure=False)
        if options.form is None and options.budget is None:
            report = _convert(checkpoint, found.name, destination, replace(options, args=unmeasured, settings=named), told)
        else:
            dtype = options.dtype or natural_dtype(checkpoint)
            settings = {**named, "bits": None}
            plain = replace(options, args=unmeasured, form=None, budget=None, encoder="minmax", dtype=dtype, settings=settings)
            with TemporaryDirectory(dir=destination.parent, prefix=f".{destination.name}.merged-") as folder:
                merged = Path(folder) / "model"
                _convert(checkpoint, found.name, merged, plain, _Told(None, None, None, None))
                with closing(open_checkpoint(merged)) as source:
                    report = _convert(source, found.name, destination, replace(options, settings=named), told)
            report.source = found.path
    report.notes.insert(0, f"merged with the adapter {adapter}")
    return report


def _convert(checkpoint: Checkpoint, name: str, destination: Path, options: CheckedArgs, told: _Told) -> Report:
    files = SourceFiles(checkpoint.path)
    planned = _plan(checkpoint, options)
    check_room(destination, planned.nbytes + tower_bytes(checkpoint, planned.skipped))
    sizes = _pieces(checkpoint, planned, options, told)
    tokenizer = load_tokenizer(checkpoint)
    report = Report(checkpoint.path, destination, skipped=planned.skipped, name=name, settings=options.settings)
    report.notes = [*ignored_note(checkpoint.config), *planned.notes, *differences_in_mlx_lm(planned.config)]
    report.source_nbytes = _bytes_of(checkpoint)
    with staged(destination, _key(files, options, sizes)) as staging:
        journal = staging.journal
        if options.budget:
            planned = options.budget.decide(
                checkpoint, planned, options.args.calibration, journal, told.read, gptq=options.encoder == "gptq"
            )
            options.budget.write(staging.files)
        _write_small_files(checkpoint, tokenizer, planned, staging.files, report)
        importance = _importance(checkpoint.path, planned, options, sizes, journal, told.read)
        encoded = _encoded(checkpoint, planned, options, sizes, journal, told.read)
        report.notes += encoded.notes if encoded else ()
        _write_tensors(checkpoint, planned, importance, encoded, report, staging, files, options, sizes, told.written)
        report.skipped = write_towers(checkpoint, planned.skipped, staging.files, journal)
        verify(staging.files, planned)
        files.check(headers=True)
        _describe(report, staging.files, tokenizer, options, told.measured)
        report.notes += _notes_of(journal)
    return report


def _plan(checkpoint: Checkpoint, options: CheckedArgs) -> ConversionPlan:
    """What will be written. Raises `MLXInferError`."""
    if isinstance(checkpoint, GGUFCheckpoint) and (options.form or options.dtype is None):
        checkpoint.pack(SAME_BITS if options.form else PACKINGS.keys() - SHARED)
    planned = plan_formats(checkpoint, options.form, options.args.group_size is None, options.dtype)
    if options.form is None and options.dtype is None:
        _check_growth(checkpoint, planned, _bytes_of(checkpoint))
    return options.budget.replay(planned) if options.budget else planned


def _bytes_of(checkpoint: Checkpoint) -> int:
    return sum(checkpoint.nbytes(name) for name in checkpoint.names())


def _pieces(checkpoint: Checkpoint, planned: ConversionPlan, options: CheckedArgs, told: _Told) -> Pieces:
    reads, gptq = _reads(planned, options), options.encoder == "gptq"
    parameters = sum(math.prod(output.request.shape) for output in planned.outputs)
    tokens = 0 if not reads else default_tokens(parameters) if gptq else TOKENS
    batch = BATCH if gptq else WEIGHED_AT_ONCE
    sizes = pieces(checkpoint, planned, tokens=tokens, batch=batch, max_memory=options.args.max_memory, factors=gptq)
    if told.estimated:
        told.estimated(Estimate(planned.nbytes, sizes.peak, planned.nbytes * 8 / max(parameters, 1)))
    return sizes


def _reads(planned: ConversionPlan, options: CheckedArgs) -> bool:
    """True if the model reads a text for the encoder. Inputs hardly matter for formats that lose nothing of the source."""
    return options.encoder != "minmax" and needs_importance(planned) and (options.quantizes or options.encoder == "gptq")


def _key(files: SourceFiles, options: CheckedArgs, sizes: Pieces) -> dict[str, Any]:
    """Everything that the result depends on."""
    kernels = kernels_cpu.isa_name() if kernels_cpu.in_use() else ""
    program = {"version of mlxinfer": __version__, "version of mlx": mx.__version__, "device": str(mx.default_device()), "kernels": kernels}  # type: ignore[attr-defined]
    return {"options": {**options.settings, "tokens at once": sizes.batch}, "files": files.key(), **program}


def _notes_of(journal: Journal) -> list[str]:
    if journal.changed:
        return [f"an interrupted run was not continued: {journal.changed}"]
    return [f"continued an interrupted run: {journal.found} steps were done already"] if journal.resumed else []


def _check_growth(checkpoint: Checkpoint, planned: ConversionPlan, source_nbytes: int) -> None:
    """Raise `ConversionError` if formats that MLX does not have would make a much larger model without being asked for."""
    if planned.nbytes <= _MOST_GROWTH * source_nbytes:
        return
    if isinstance(checkpoint, GGUFCheckpoint):
        kinds = sorted(kind for kind in checkpoint.kinds() - ALIKE.keys() if kind[:1] in QUANTIZED)
    else:
        kinds = sorted({output.unpacked_from for output in planned.outputs if output.unpacked_from})
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


def _importance(
    path: Path, planned: ConversionPlan, options: CheckedArgs, sizes: Pieces, journal: Journal, progress: Progress | None
) -> Importance:
    """What the matrices to be rounded are weighed with; nothing if there are none."""
    alike = {} if options.encoder == "minmax" else weighed_alike(planned)
    if options.encoder != "fit" or not _reads(planned, options):
        return alike
    checkpoint = open_checkpoint(path, raw_blocks=kernels_cpu.in_use())
    try:
        return alike | measure_importance(checkpoint, random_texts(checkpoint.config), progress, journal, sizes.batch)
    finally:
        checkpoint.close()


def _encoded(
    checkpoint: Checkpoint, planned: ConversionPlan, options: CheckedArgs, sizes: Pieces, journal: Journal, progress: Progress | None
) -> Encodings | None:
    if options.encoder != "gptq":
        return None
    return encodings(checkpoint, planned, options.args.calibration, journal, progress, sizes.batch)


def _write_tensors(
    checkpoint: Checkpoint,
    planned: ConversionPlan,
    importance: Importance,
    encoded: Encodings | None,
    report: Report,
    staging: Staging,
    files: SourceFiles,
    options: CheckedArgs,
    sizes: Pieces,
    progress: Progress | None,
) -> None:
    report.parameters = sum(math.prod(output.request.shape) for output in planned.outputs)
    writer = Writer(staging.files, [output.parts() for output in planned.outputs], shard_bytes=options.args.shard_bytes)
    try:
        report.tensors = write_tensors(checkpoint, planned, importance, writer, staging.journal, files, progress, sizes.block, encoded)
        report.nbytes = sum(tensor.nbytes for tensor in report.tensors)
        writer.finish(report.parameters)
    finally:
        writer.close()


def _describe(report: Report, written: Path, tokenizer: Tokenizer, options: CheckedArgs, progress: Progress | None) -> None:
    """Compare what was written with its source, if it lost anything, and write what there is to say about it."""
    if any(tensor.error for tensor in report.tensors) and options.args.measure is not False:
        _measure(report, written, tokenizer, options, progress)
    report.notes += options.budget.notes(report) if options.budget else []
    report.copied += write_documents(written, report)


def _positions(parameters: int, options: CheckedArgs) -> int:
    """Positions at which a lossy result is compared with its source; 0 if it is not."""
    if options.args.measure is False:
        return 0
    return tokens_to_measure(parameters, required=options.args.measure is True, quantized=options.quantizes)


def _measure(report: Report, written: Path, tokenizer: Tokenizer, options: CheckedArgs, progress: Progress | None) -> None:
    count = _positions(report.parameters, options)
    if isinstance(tokenizer, NoTokenizer) or not count:
        why = "there is no tokenizer" if isinstance(tokenizer, NoTokenizer) else "that would take long"
        report.notes.append(f"not compared with the source on a text: {why}")
        return
    try:
        report.quality = measure_loss(
            report.source, written, report.parameters, count, memory_gb=options.args.max_memory, progress=progress
        )
    except MLXInferError as error:
        report.notes.append(f"not compared with the source on a text: {error}")
