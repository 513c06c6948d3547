"""Conversion of checkpoints to MLX directories, and its loss."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .args import ConvertArgs
    from .pipeline import convert
    from .report import Quality, Report, TensorReport

__all__ = ["ConvertArgs", "Quality", "Report", "TensorReport", "convert"]

_MODULES = {"convert": "pipeline", "ConvertArgs": "args", **dict.fromkeys(("Quality", "Report", "TensorReport"), "report")}
"""Module of each public name, imported at first use: the command line reads `ConvertArgs` without MLX."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_MODULES[name]}", __name__), name)
