"""GGUF checkpoints: header and tensors, with a Hugging Face config and names rebuilt from them."""

from .checkpoint import GGUFCheckpoint

__all__ = ["GGUFCheckpoint"]
