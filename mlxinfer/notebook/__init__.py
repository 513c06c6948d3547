"""Helpers for Jupyter: streaming answers, `%%chat`, tables, and plots of answers, models and the engine.

`%load_ext mlxinfer` adds the magics and the HTML display of models, answers and statistics.
"""

from .cache_errors import CacheErrors, cache_errors
from .cache_map import CacheMap, cache_map
from .compare import Comparison, compare
from .display import stream
from .formats import Html, show
from .frames import to_pandas
from .plots.engine import cache_errors_picture, cache_picture, timeline_picture
from .plots.figure import Picture
from .plots.tokens import (
    attention_picture,
    attribution_picture,
    heat_picture,
    image_picture,
    lens_picture,
    logprobs_picture,
    surprise_picture,
)
from .timeline import Timeline, recorded

__all__ = [
    "CacheErrors",
    "CacheMap",
    "Comparison",
    "Html",
    "Picture",
    "Timeline",
    "attention_picture",
    "attribution_picture",
    "cache_errors",
    "cache_errors_picture",
    "cache_map",
    "cache_picture",
    "compare",
    "heat_picture",
    "image_picture",
    "lens_picture",
    "logprobs_picture",
    "recorded",
    "show",
    "stream",
    "surprise_picture",
    "timeline_picture",
    "to_pandas",
]
