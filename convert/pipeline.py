"""Converts a checkpoint: plan, calibrate, encode, write and verify. One tensor is in memory at a time."""

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
from ..loading.find.converted import remember_converted
from ..loading.find.resolve import Resolved, resolve
from ..loading.formats import dtype_name
from ..loading.gguf import GGUFCheckpoint
from ..loading.gguf.mlx_formats import ALIKE, PACKINGS, SAME_BITS, SHARED
from ..loading.gguf.types import QUANTIZED
from ..loading.load import load_tokenizer, open_checkpoint
from ..loading.weights import Progress
from ..models import architecture
from ..models.blockwise import BATCH
from ..models.config_reader import check_ignored, ignored_note, ignoring
from ..tokenizer.no_tokenizer import NoTokenizer
from .args import CheckedArgs, ConvertArgs
from .calibrate.importance import BATCH as IMPORTANCE_BATCH
from .calibrate.importance import TOKENS, Importance
from .calibrate.importance import measure as measure_importance
from .calibrate.texts import default_tokens, random_ids, texts_to_read
from .encode.gptq_pipeline import Encodings, encode_all
from .plan.resources import ConversionEstimate, Pieces, needs_importance, pieces
from .plan.weight_map import ConversionPlan, natural_dtype
from .plan.weight_map import plan as plan_formats
from .report import Report, measure_loss, tokens_to_measure, write_documents
from .write.destination import Staging, check_destination, check_room, made_parents, staged
from .write.journal import Journal
from .write.merged import open_merged
from .write.reader import SourceFiles
from .write.sidecars import differences_in_mlx_lm, write_sidecars
from .write.tensors import verify, write_tensors
from .write.towers import FILE, feature_error, tower_parts, write_towers
from .write.writer import ShardWriter

_MOST_GROWTH = 1.5
"""Largest size of a result over its source, unless bits or a dtype are given."""


@dataclass(frozen=True, slots=True)
class _Callbacks:
    """Progress callbacks of `convert`."""

    written: Progress | None = None
    read: Progress | None = None
    measured: Progress | None = None
    estimated: Callable[[ConversionEstimate], None] | None = None


def convert(
    src: str | Path,
    dst: str | Path,
    args: ConvertArgs | None = None,
    *,
    progress: Progress | None = None,
    weighing: Progress | None = None,
    measuring: Progress | None = None,
    estimated: Callable[[ConversionEstimate], None] | None = None,
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
    found, callbacks = resolve(src), _Callbacks(progress, weighing, measuring, estimated)
    with made_parents(destination), ignoring(found.path, args.ignore_config_keys):
        if args.adapter is not None:
            report = _convert_merged(found, args.adapter, destination, options, callbacks)
        else:
            with closing(open_checkpoint(found.path)) as checkpoint:
                check_ignored(args.ignore_config_keys, checkpoint.config)
                report = _Conversion(checkpoint, found.name, destination, options, callbacks).run()
    remember_converted(destination)
    return report


def _convert_merged(found: Resolved, adapter: str | Path, destination: Path, options: CheckedArgs, callbacks: _Callbacks) -> Report:
    """Merge an adapter and convert the result. To be quantized, it is first written as a model of its own, which encoders read."""
    with closing(open_merged(found.path, adapter, options.dtype)) as checkpoint:
        named, unmeasured = {**options.settings, "adapter": checkpoint.adapter.digest}, replace(options.args, measure=False)
        if not options.quantizes:
            report = _Conversion(checkpoint, found.name, destination, replace(options, args=unmeasured, settings=named), callbacks).run()
        else:
            dtype = options.dtype or natural_dtype(checkpoint)
            settings = {**named, "bits": None}
            plain = replace(options, args=unmeasured, form=None, budget=None, encoder="minmax", dtype=dtype, settings=settings)
            with TemporaryDirectory(dir=destination.parent, prefix=f".{destination.name}.merged-") as folder:
                merged = Path(folder) / "model"
                _Conversion(checkpoint, found.name, merged, plain, _Callbacks()).run()
                with closing(open_checkpoint(merged)) as source:
                    report = _Conversion(source, found.name, destination, replace(options, settings=named), callbacks).run()
            report.source = found.path
    report.notes.insert(0, f"merged with the adapter {adapter}")
    return report


class _Conversion:
    """One conversion of one open checkpoint."""

    def __init__(self, checkpoint: Checkpoint, name: str, destination: Path, options: CheckedArgs, callbacks: _Callbacks) -> None:
        """Plan from headers and check memory and disk. Raises `MLXInferError`."""
        self.checkpoint, self.destination, self.options, self.callbacks = checkpoint, destination, options, callbacks
        self.files = SourceFiles(checkpoint.path)
        self.source_nbytes = sum(checkpoint.nbytes(tensor) for tensor in checkpoint.names())
        self.planned = self._plan()
        self.parameters = sum(math.prod(output.request.shape) for output in self.planned.outputs)
        check_room(destination, self.planned.nbytes + self.planned.towers.nbytes(checkpoint))
        self.pieces = self._pieces()
        self.tokenizer = load_tokenizer(checkpoint)
        self.report = Report(checkpoint.path, destination, skipped=self.planned.skipped, name=name, settings=options.settings)
        self.report.notes = [*ignored_note(checkpoint.config), *self.planned.notes, *differences_in_mlx_lm(self.planned.config)]
        self.report.parameters, self.report.source_nbytes = self.parameters, self.source_nbytes
        self.report.sees = self.planned.towers.loads

    def run(self) -> Report:
        """Write, verify and describe the destination. Raises `MLXInferError`."""
        report, checkpoint, options = self.report, self.checkpoint, self.options
        with staged(self.destination, self._key()) as staging:
            journal = staging.journal
            if options.budget:
                gptq = options.encoder == "gptq"
                texts, read = options.args.calibration, self.callbacks.read
                self.planned = options.budget.decide(checkpoint, self.planned, texts, journal, read, gptq=gptq)
                options.budget.write(staging.files)
            report.copied, notes = write_sidecars(checkpoint, self.tokenizer, self.planned, staging.files)
            report.notes += notes
            self._write_tensors(staging, self._importance(journal), self._encodings(journal))
            report.skipped = write_towers(checkpoint, self.planned, staging.files, journal)
            verify(staging.files, self.planned)
            self.files.check(headers=True)
            if any(tensor.error for tensor in report.tensors) and options.args.measure is not False:
                self._measure(staging.files)
            report.notes += options.budget.notes(report) if options.budget else []
            report.notes += self._notes_of_towers(staging.files)
            report.copied += write_documents(staging.files, report)
            report.notes += _notes_of(journal)
        return report

    def _plan(self) -> ConversionPlan:
        """Return a format for each tensor, from headers alone."""
        checkpoint, options = self.checkpoint, self.options
        if isinstance(checkpoint, GGUFCheckpoint) and (options.form or options.dtype is None):
            checkpoint.pack(SAME_BITS if options.form else PACKINGS.keys() - SHARED)
        planned = plan_formats(checkpoint, options.form, options.args.group_size is None, options.dtype, options.args.towers)
        if options.form is None and options.dtype is None:
            _check_growth(checkpoint, planned, self.source_nbytes)
        return options.budget.replay(planned) if options.budget else planned

    def _pieces(self) -> Pieces:
        gptq = self.options.encoder == "gptq"
        tokens = 0 if not self._reads() else default_tokens(self.parameters) if gptq else TOKENS
        batch, memory = BATCH if gptq else IMPORTANCE_BATCH, self.options.args.max_memory
        found = pieces(self.checkpoint, self.planned, tokens=tokens, batch=batch, max_memory=memory, factors=gptq)
        if self.callbacks.estimated:
            bits = self.planned.nbytes * 8 / max(self.parameters, 1)
            self.callbacks.estimated(ConversionEstimate(self.planned.nbytes, found.peak, bits))
        return found

    def _reads(self) -> bool:
        """True if the model reads a text for the encoder. Inputs hardly matter for formats that lose nothing of the source."""
        encoder = self.options.encoder
        return encoder != "minmax" and needs_importance(self.planned) and (self.options.quantizes or encoder == "gptq")

    def _key(self) -> dict[str, Any]:
        """Return everything that the result depends on."""
        program = {
            "version of mlxinfer": __version__,
            "version of mlx": mx.__version__,  # type: ignore[attr-defined]
            "device": str(mx.default_device()),
            "kernels": kernels_cpu.isa_name() if kernels_cpu.in_use() else "",
        }
        return {"options": {**self.options.settings, "tokens at once": self.pieces.batch}, "files": self.files.key(), **program}

    def _importance(self, journal: Journal) -> Importance:
        """Return the weights of the inputs of rounded matrices: equal ones, replaced for the encoder "fit" by measured ones.

        Equal weights remain for embeddings that are not also the head, and for inputs that no token reached.
        """
        if self.options.encoder == "minmax":
            return {}
        rounded = [output.request for output in self.planned.outputs if output.is_rounded]
        equal = {request.name: mx.ones((request.shape[-1],)) for request in rounded}
        if self.options.encoder != "fit" or not self._reads():
            return equal
        with closing(self._open_to_compute()) as checkpoint:
            texts = random_ids(architecture(checkpoint.config).sizes.vocab, TOKENS).texts
            return equal | measure_importance(checkpoint, texts, self.callbacks.read, journal, self.pieces.batch)

    def _encodings(self, journal: Journal) -> Encodings | None:
        """Encode all matrices by GPTQ; None with another encoder."""
        if self.options.encoder != "gptq":
            return None
        texts, read = texts_to_read(self.checkpoint, self.options.args.calibration, journal), self.callbacks.read
        with closing(self._open_to_compute()) as forward:
            found = encode_all(self.checkpoint, forward, self.planned, texts, journal, read, batch=self.pieces.batch)
        mx.clear_cache()
        self.report.notes += found.notes
        return found

    def _open_to_compute(self) -> Checkpoint:
        return open_checkpoint(self.checkpoint.path, raw_blocks=kernels_cpu.in_use())

    def _write_tensors(self, staging: Staging, importance: Importance, encodings: Encodings | None) -> None:
        report, planned = self.report, self.planned
        parts = [output.parts() for output in planned.outputs]
        with closing(ShardWriter(staging.files, parts, shard_bytes=self.options.args.shard_bytes)) as writer:
            journal, files, block = staging.journal, self.files, self.pieces.block
            written = self.callbacks.written
            report.tensors = write_tensors(self.checkpoint, planned, importance, writer, journal, files, written, block, encodings)
            report.nbytes = sum(tensor.nbytes for tensor in report.tensors)
            towers = tower_parts(self.checkpoint, planned)
            writer.finish(report.parameters, {FILE: towers} if towers else {})

    def _notes_of_towers(self, written: Path) -> list[str]:
        towers = self.planned.towers
        if not towers.loads:
            return []
        size = towers.nbytes(self.checkpoint) / 1e6
        notes = [f"the vision tower takes {size:.3g} MB more ({FILE}), which bits per weight do not count"]
        if towers.formats:
            error = feature_error(self.checkpoint.path, written)
            notes.append(f"8 bits change the features of the vision tower by {error:.2%} (relative, on one picture)")
        elif self.options.args.towers == "8":
            notes.append("no matrix of the vision tower can be quantized to 8 bits: its rows do not divide into groups of 32")
        return notes

    def _measure(self, written: Path) -> None:
        """Compare the result with its source on a text, or note why not."""
        args = self.options.args
        count = tokens_to_measure(self.parameters, required=args.measure is True, quantized=self.options.quantizes)
        if isinstance(self.tokenizer, NoTokenizer) or not count:
            why = "there is no tokenizer" if isinstance(self.tokenizer, NoTokenizer) else "that would take long"
            self.report.notes.append(f"not compared with the source on a text: {why}")
            return
        memory, progress = args.max_memory, self.callbacks.measured
        try:
            source = self.report.source
            self.report.quality = measure_loss(source, written, self.parameters, count, memory_gb=memory, progress=progress)
        except MLXInferError as error:
            self.report.notes.append(f"not compared with the source on a text: {error}")


def _notes_of(journal: Journal) -> list[str]:
    if journal.changed:
        return [f"an interrupted run was not continued: {journal.changed}"]
    return [f"continued an interrupted run: {journal.found} steps were done already"] if journal.resumed else []


def _check_growth(checkpoint: Checkpoint, planned: ConversionPlan, source_nbytes: int) -> None:
    """Raise `ConversionError` if formats that MLX lacks would make a much larger model unasked."""
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
