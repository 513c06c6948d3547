"""Helpers for Jupyter: answers that stream into a cell, and pictures of them."""

from .display import logprobs_picture, stream

__all__ = ["logprobs_picture", "stream"]
