"""Routed experts in a file: those in use are in memory, the others are read when a router chooses them."""

from __future__ import annotations

from .file_format import ArraySpec, ExpertFile, LayerRecord
from .pool import ExpertPool
from .reader import ExpertReader
from .scores import ExpertScores
from .store import ExpertStore, OffloadStats, slots_within
from .writer import ExpertFileWriter, experts_folder, experts_path

__all__ = [
    "ArraySpec",
    "ExpertFile",
    "ExpertFileWriter",
    "ExpertPool",
    "ExpertReader",
    "ExpertScores",
    "ExpertStore",
    "LayerRecord",
    "OffloadStats",
    "experts_folder",
    "experts_path",
    "slots_within",
]
