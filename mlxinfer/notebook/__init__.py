"""Helpers for Jupyter: answers that stream into a cell, and pictures of them."""

from .display import stream
from .picture import logprobs_picture

__all__ = ["logprobs_picture", "stream"]
