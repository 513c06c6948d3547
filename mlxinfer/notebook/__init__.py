"""Helpers for Jupyter: answers that stream into a cell, `%%chat`, and pictures of answers and of a model's inside.

`%load_ext mlxinfer` adds the magics, and shows models, answers and statistics as HTML.
"""

from .compare import Comparison, compare
from .display import stream
from .pictures import attention_picture, attribution_picture, heat_picture, lens_picture, logprobs_picture, surprise_picture

__all__ = [
    "Comparison",
    "attention_picture",
    "attribution_picture",
    "compare",
    "heat_picture",
    "lens_picture",
    "logprobs_picture",
    "stream",
    "surprise_picture",
]
