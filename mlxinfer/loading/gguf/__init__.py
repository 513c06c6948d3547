"""GGUF checkpoints: header, tensors, and a Hugging Face style config and names rebuilt from them."""

from .checkpoint import GGUFCheckpoint

__all__ = ["GGUFCheckpoint"]
