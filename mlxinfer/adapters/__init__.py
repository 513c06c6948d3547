"""Adapters (LoRA): low-rank updates of a model's projections, selected per request."""
