"""Conversion of checkpoints to MLX directories, and what it costs."""

from .pipeline import convert
from .report import Quality, Report, TensorReport

__all__ = ["Quality", "Report", "TensorReport", "convert"]
