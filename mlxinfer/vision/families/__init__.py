"""Image processors by family, one file each. `open_processor` returns that of a model directory."""

from __future__ import annotations

from pathlib import Path

from ...errors import UnsupportedModelError
from ...util.typed_reader import shown
from ..processor import ImageProcessor, ProcessorFiles, read_object
from .gemma3 import Gemma3Processor
from .gemma4 import Gemma4Processor, Gemma4UnifiedProcessor
from .idefics3 import Idefics3Processor
from .internvl import InternVLChatProcessor, InternVLProcessor
from .lfm2_vl import Lfm2VLProcessor
from .pixtral import PixtralProcessor
from .qwen import QwenProcessor

PROCESSORS: dict[str, type[ImageProcessor]] = {
    "gemma3": Gemma3Processor,
    "gemma4": Gemma4Processor,
    "gemma4_unified": Gemma4UnifiedProcessor,
    "idefics3": Idefics3Processor,
    "internvl": InternVLProcessor,
    "internvl_chat": InternVLChatProcessor,
    "lfm2_vl": Lfm2VLProcessor,
    "mistral3": PixtralProcessor,
    "qwen2_5_vl": QwenProcessor,
    "qwen2_vl": QwenProcessor,
    "qwen3_5": QwenProcessor,
    "qwen3_5_moe": QwenProcessor,
    "qwen3_vl": QwenProcessor,
    "qwen3_vl_moe": QwenProcessor,
    "smolvlm": Idefics3Processor,
}
"""Image processor by `model_type` of the config."""


def open_processor(directory: Path) -> ImageProcessor:
    """Return the image processor of a model directory.

    Raises `UnsupportedModelError` for families without one and for unsupported settings, and `CheckpointError` for missing files.
    """
    kind = read_object(directory / "config.json").get("model_type")
    made = PROCESSORS.get(kind) if isinstance(kind, str) else None
    if made is None:
        raise UnsupportedModelError(f"images are not supported for model_type {shown(kind)}, only for {', '.join(sorted(PROCESSORS))}")
    return made(ProcessorFiles.read(directory))
