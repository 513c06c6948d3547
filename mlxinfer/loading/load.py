"""From a path, alias or hub id to a model that is ready to run: read the headers, then the weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

import mlx.core as mx

from .. import kernels_cpu
from ..cache.kv_format import KVFormat
from ..errors import DraftError, UnsupportedModelError
from ..models import supports
from ..nn.small_batch_matmul import block_kinds
from ..nn.weights import Format
from ..util.device import is_gpu
from ..util.garbage import no_garbage_collection
from .checkpoint import Checkpoint
from .draft_head import with_head
from .find.resolve import resolve
from .formats import check_format, compute_dtype
from .gguf import GGUFCheckpoint
from .gguf.mlx_formats import PACKINGS, lossy
from .memory.images import image_memory
from .memory.plan import plan_memory, usable_memory
from .prepared_model import LoadedModel, OwnModel, PreparedModel, generation_config, load_tokenizer, model_type
from .repack_cache import open_copies
from .weights import Progress

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "LoadedModel",
    "PrepareOptions",
    "PreparedModel",
    "generation_config",
    "load",
    "load_tokenizer",
    "meta_model",
    "model_type",
    "open_checkpoint",
    "prepare",
]


class PrepareOptions(TypedDict, total=False):
    """Options of loading a model."""

    dtype: str | mx.Dtype | None
    """Dtype of the activations; None for the fastest on this device."""
    bits: int | None
    """Quantize matrices that are stored plain; None leaves them."""
    group_size: int | None
    """Weights that share a scale, with `bits`."""
    mode: str
    """Quantization mode of MLX, by default "affine". Another mode takes effect without `bits` too."""
    gguf_exact: bool
    """Unpack types of GGUF that a GPU would otherwise hold rounded."""
    kv: KVFormat | None
    ignore_config_keys: Sequence[str]
    """Unknown keys of config.json, or of a GGUF file's metadata, to ignore."""
    memory_gb: float | None
    """The caller's limit, in GB of 10^9 bytes."""
    mtp: bool | Path
    """Load the checkpoint's draft head, or that in another directory."""
    vision: str
    """Load the vision tower: "auto", the default, "on" or "off"; see `EngineArgs`."""
    mmproj: str | Path | None
    """GGUF file with the vision tower."""
    pooled: bool
    """True if the caller limits the memory of routed experts, so that weights take less than their file."""


@contextmanager
def prepare(path_or_id: str | Path, **options: Unpack[PrepareOptions]) -> Iterator[PreparedModel]:
    """Open a model directory (Hugging Face or MLX), a GGUF file, an alias or a hub id, and check its headers.

    `PreparedModel.read` reads weights inside the `with` block. Raises `MLXInferError`.
    """
    bits, mode = options.get("bits"), options.get("mode", "affine")
    quantize = check_format(bits, options.get("group_size"), mode) if bits is not None or mode != "affine" else None
    found = resolve(path_or_id)
    copies = open_copies(found.path) if quantize is None and found.path.is_file() else None
    fresh = quantize is None and not (copies and copies.found) and not options.get("pooled")
    with no_garbage_collection(), kernels_cpu.weight_memory(_packed_bytes(found.path, options.get("memory_gb")) if fresh else 0):
        raw = quantize is None and not is_gpu()
        checkpoint = open_checkpoint(found.path, raw_blocks=raw, ignore_config_keys=options.get("ignore_config_keys", ()))
        try:
            dtype, own, head = compute_dtype(checkpoint, options.get("dtype")), supports(model_type(checkpoint)), options.get("mtp", False)
            if quantize is None and is_gpu() and isinstance(checkpoint, GGUFCheckpoint):
                _pack_for_gpu(checkpoint, dtype, exact=options.get("gguf_exact", False), blocks=own)
            if not own:
                borrowed = _borrowed(found.name, checkpoint, dtype, quantize, options)
                borrowed.open_vision(options.get("vision", "auto"), options.get("mmproj"))
                yield borrowed
                return
            with nullcontext((checkpoint, head)) if isinstance(head, bool) else with_head(checkpoint, head) as (whole, mtp):
                model = OwnModel(found.name, checkpoint, dtype, quantize, copies, whole, mtp)
                model.open_vision(options.get("vision", "auto"), options.get("mmproj"))
                try:
                    yield model
                finally:
                    model.close_vision()
        finally:
            checkpoint.close()


def load(path_or_id: str | Path, progress: Progress | None = None, **options: Unpack[PrepareOptions]) -> LoadedModel:
    """Prepare a model, plan its memory with the engine's defaults, and read it. Raises `MLXInferError`."""
    with prepare(path_or_id, **options) as prepared:
        plan_memory(prepared, kv=options.get("kv"), memory_gb=options.get("memory_gb"), images=image_memory(prepared.vision))
        return prepared.read(prepared.load_tokenizer(), progress)


def meta_model(path_or_id: str | Path, dtype: str | mx.Dtype | None = None, *, ignore_config_keys: Sequence[str] = ()) -> PreparedModel:
    """Prepare a model and close its files: it can be planned, but not read. Raises `MLXInferError`."""
    with prepare(path_or_id, dtype=dtype, ignore_config_keys=ignore_config_keys) as prepared:
        return prepared


def _packed_bytes(path: Path, memory_gb: float | None) -> int:
    """Bytes to reserve for a GGUF file's weights, which hardly exceed the file once packed.

    0 for a file above a quarter of the memory: its plan has to succeed first.
    """
    size = path.stat().st_size if path.is_file() else 0
    return size if size and size <= usable_memory(memory_gb) // 4 else 0


def _pack_for_gpu(checkpoint: GGUFCheckpoint, dtype: mx.Dtype, *, exact: bool, blocks: bool) -> None:
    """Choose how the file's matrices are read, for a model that computes in `dtype` on a GPU.

    Types that packing rounds stay in their blocks if `blocks` allows it and this machine multiplies such blocks fast enough. Others are
    packed, or with `exact` unpacked.
    """
    kept = block_kinds(dtype, checkpoint.kinds() & lossy(mx.float16)) if blocks else ()
    checkpoint.pack(PACKINGS.keys() - lossy(dtype) if exact else PACKINGS.keys(), kept)


def _borrowed(name: str, checkpoint: Checkpoint, dtype: mx.Dtype, quantize: Format | None, options: PrepareOptions) -> PreparedModel:
    """Prepare a model on mlx-lm's graph. Raises `UnsupportedModelError` and `DraftError` for options that this graph does not have."""
    kind, kv = model_type(checkpoint), options.get("kv")
    if options.get("mtp"):
        raise DraftError(f"{kind} runs on mlx-lm's graph, which hands no hidden rows to a head: name a draft model")
    from .borrowed_model import BorrowedModel  # imports mlx-lm, and with it transformers, which takes seconds

    borrowed = BorrowedModel(name, checkpoint, dtype)
    if quantize:
        raise UnsupportedModelError("a model that runs on mlx-lm's graph cannot be quantized while it is loaded: use mlx_lm.convert first")
    if kv and kv.quantized:
        raise UnsupportedModelError(f"{kind} has no graph of its own here: it runs with mlx-lm's cache, which is not quantized: use kv 16")
    return borrowed


def open_checkpoint(path: Path, *, raw_blocks: bool = False, ignore_config_keys: Sequence[str] = ()) -> Checkpoint:
    """Open the checkpoint at a resolved path: a directory, or a GGUF file. Raises `CheckpointError`, `UnsupportedModelError`.

    `raw_blocks` allows forms that only the CPU kernels multiply, `RawBlocks` and `FLOAT8`. Set it if `nn.packing.settle` packs every
    matrix. `ignore_config_keys` are unknown keys of the config to ignore.
    """
    if not path.is_dir():
        return GGUFCheckpoint(path, raw_blocks=raw_blocks, ignore_config_keys=ignore_config_keys)
    from .directory import SafetensorsCheckpoint  # a GGUF file does not need it

    return SafetensorsCheckpoint(path, ignore_config_keys, float8=raw_blocks and kernels_cpu.packs_float8())
