"""From logits to tokens."""

from .logprobs import TokenLogprobs
from .sampler import Drafts, Row, Sampled, SamplingBatch, sample_seed

__all__ = ["Drafts", "Row", "Sampled", "SamplingBatch", "TokenLogprobs", "sample_seed"]
