"""Packed matrices of GGUF files, kept on disk so that the next start maps them instead of packing once more."""

from .copies import PackedCopies, open_copies
from .place import directory, kept_bytes, limit_bytes
from .writer import finish_writing

__all__ = ["PackedCopies", "directory", "finish_writing", "kept_bytes", "limit_bytes", "open_copies"]
