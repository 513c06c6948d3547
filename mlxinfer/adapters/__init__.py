"""Adapters (LoRA): small changes of a model's projections, which each request chooses for itself."""
