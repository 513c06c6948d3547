"""Packed matrices of GGUF files, cached on disk: the next start maps them instead of packing again."""

from __future__ import annotations

from .cache import RepackCache, open_copies
from .layout import CacheUsage, cache_usage, directory, kept_bytes, limit_bytes

__all__ = ["CacheUsage", "RepackCache", "cache_usage", "directory", "kept_bytes", "limit_bytes", "open_copies"]
