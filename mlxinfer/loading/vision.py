"""Vision towers of checkpoints: found and checked in the headers, then read with the weights."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx

from ..errors import MLXInferError, SettingError, UnsupportedModelError, WeightsError
from ..models.towers import TOWERS, Tower, tower_of
from ..models.vlm_text import TEXT_ONLY, is_more_than_text
from ..nn.packing import arrays, settle
from ..nn.weights import Format
from ..util.dataclass import dataclass
from ..vision.families import open_processor
from ..vision.processor import DEFAULT_BUDGET, Budget, ImageProcessor
from .checkpoint import Checkpoint
from .find.resolve import find_mmproj, mmproj_files
from .gguf import GGUFCheckpoint
from .gguf.mmproj.checkpoint import MMProjCheckpoint
from .skipped import OF_TOWERS, reason_to_skip_in_tower
from .weights import CheckpointWeights, MetaWeights, Progress, TensorIndex


@dataclass(frozen=True, slots=True, eq=False)
class Vision:
    """A vision tower with its weights in memory, and the pre-processing of its pictures."""

    processor: ImageProcessor
    tower: Tower
    weight_bytes: int
    """Bytes of the tower's weights in memory."""
    dtype: mx.Dtype
    """Dtype of the tower's activations and features."""


class PreparedVision:
    """A vision tower of which only headers were read."""

    def __init__(self, checkpoint: Checkpoint, index: TensorIndex, dtype: mx.Dtype, processor: ImageProcessor) -> None:
        """`index` has the tensors of the tower, of `checkpoint`. Raises `WeightsError` with every problem, `UnsupportedModelError` for the
        config."""
        self.processor, self.dtype = processor, dtype
        self._checkpoint, self._index = checkpoint, index
        meta = MetaWeights(checkpoint, dtype, index=index)
        self.tower = tower_of(checkpoint.config, meta)
        """The graph, whose weights have shapes only."""
        meta.finish()
        sizes = [tensor.nbytes for tensor in meta.tensors.values()]
        self.weight_bytes = sum(sizes)
        """Bytes of the weights in memory."""
        self.load_bytes = max(sizes, default=0)
        """Bytes needed besides the weights while they are read."""

    @property
    def matrices(self) -> list[str]:
        """Names of the checkpoint's matrices that may be quantized."""
        requests = self._index.requests.values()
        return [request.name for request in requests if request.kind == "matrix" and request.quantizable and request.recipe is None]

    def close(self) -> None:
        """Close the file of a tower that has one of its own; harmless otherwise, and when called again."""
        if isinstance(self._checkpoint, MMProjCheckpoint):
            self._checkpoint.close()

    def read(self, progress: Progress | None = None) -> Vision:
        """Read the weights. `progress` counts the tower's bytes. Raises `WeightsError` for values that are NaN or infinite."""
        weights = CheckpointWeights(self._checkpoint, self.dtype, progress=progress, index=self._index)
        tower = tower_of(self._checkpoint.config, weights)
        settle(tower, dtype=self.dtype)
        weights.finish()
        return Vision(self.processor, tower, sum(array.nbytes for array in arrays(tower)), self.dtype)


def unseen(reason: str) -> str:
    """Return the sentence for a model without images."""
    return f"the model cannot see images: {reason}"


def vision_notes(checkpoint: Checkpoint, vision: Vision | PreparedVision | str) -> list[str]:
    """Return a note if a model that could see images was loaded without a tower."""
    could = is_more_than_text(checkpoint.config) or (isinstance(checkpoint, GGUFCheckpoint) and bool(mmproj_files(checkpoint.path)))
    return [vision] if isinstance(vision, str) and could else []


def vision_bytes(vision: Vision | PreparedVision | str) -> int:
    """Return the bytes of a tower's weights; 0 without one."""
    return 0 if isinstance(vision, str) else vision.weight_bytes


def image_budget(vision: Vision | PreparedVision | str, max_pixels: int | None, min_pixels: int | None) -> Budget:
    """Return the limits of images for requests that name none. Raises `SettingError` for limits that the model cannot follow."""
    given = {"max_pixels": max_pixels, "min_pixels": min_pixels}
    for name, value in given.items():
        if value is not None and isinstance(vision, str):
            raise SettingError(f"{name} is for images, but {vision}")
        if value is not None and not isinstance(vision, str) and name not in vision.processor.limits:
            raise SettingError(f"{name} does not apply to this model: its images have a fixed size; remove the setting")
    return Budget(max_pixels, min_pixels) if any(given.values()) else DEFAULT_BUDGET


def prepare_vision(
    checkpoint: Checkpoint, text: TensorIndex, dtype: mx.Dtype, mode: str = "auto", mmproj: str | Path | None = None
) -> PreparedVision | str:
    """Find the vision tower of a checkpoint, or return a sentence with the reason why the model cannot see images.

    `text` is the finished index of the text model, which computes in `dtype`. The tower's tensors no longer count as skipped in it.
    `mode` is `EngineArgs.vision`. With "on", raises `UnsupportedModelError`, `WeightsError` or `CheckpointError` instead of returning
    a reason.
    """
    if mmproj is not None:
        if not isinstance(checkpoint, GGUFCheckpoint):
            raise SettingError("mmproj belongs to a GGUF model: the towers of other models are in their own files; leave it out")
        return _in_file(checkpoint, Path(mmproj), dtype)
    if mode == "off":
        return unseen("it was loaded without its vision tower (vision=off, --no-vision)")
    try:
        return _found(checkpoint, text, dtype)
    except MLXInferError as error:
        reason = unseen(str(error))
        if mode == "on":
            raise type(error)(reason) from error
        return reason


def _found(checkpoint: Checkpoint, text: TensorIndex, dtype: mx.Dtype) -> PreparedVision:
    if isinstance(checkpoint, GGUFCheckpoint) and (beside := find_mmproj(checkpoint.path)):
        return _in_file(checkpoint, beside, dtype)
    config, names = checkpoint.config, [name for name, reason in text.skipped.items() if reason == OF_TOWERS]
    kind = config.get("model_type")
    if config.get(TEXT_ONLY):
        raise UnsupportedModelError(
            "the tower of a GGUF model is a file of its own: put its mmproj file beside the model, or name it with --mmproj"
        )
    if not is_more_than_text(config):
        raise UnsupportedModelError("it is a text model")
    if not names:
        raise WeightsError("its files have no vision tower")
    if kind not in TOWERS:
        raise UnsupportedModelError(f"vision towers of {kind} are not supported")
    processor = open_processor(checkpoint.path)
    index = TensorIndex(checkpoint, names, reason_to_skip_in_tower)
    found = PreparedVision(checkpoint, index, _tower_dtype(checkpoint, names, dtype), processor)
    text.leave(names)
    return found


def _in_file(text: GGUFCheckpoint, path: Path, dtype: mx.Dtype) -> PreparedVision:
    tokens = text.metadata.get("tokenizer.ggml.tokens")
    tower = MMProjCheckpoint(path, text.config, tokens if isinstance(tokens, list) else [])
    try:
        names = list(tower.names())
        index = TensorIndex(tower, names, reason_to_skip_in_tower)
        return PreparedVision(tower, index, _tower_dtype(tower, names, dtype), tower.processor)
    except BaseException:
        tower.close()
        raise


def _tower_dtype(checkpoint: Checkpoint, names: list[str], dtype: mx.Dtype) -> mx.Dtype:
    """Return the dtype of the tower's activations. float16 only for towers stored in it: activations of others leave its range."""
    if dtype != mx.float16:
        return dtype
    stored = [checkpoint.stored(name) for name in names]
    return mx.float16 if all(form == mx.float16 or isinstance(form, Format) for form in stored) else mx.bfloat16
