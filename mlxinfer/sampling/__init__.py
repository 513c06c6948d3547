"""From logits to tokens."""

from .noise import sample_seed
from .sampler import Row, Sampled, SamplingBatch

__all__ = ["Row", "Sampled", "SamplingBatch", "sample_seed"]
