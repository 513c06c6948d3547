"""From logits to tokens."""

from .logprobs import TokenLogprobs
from .noise import KeptNoise
from .rows import Drafts, Row
from .sampler import SAMPLED_ROWS_AT_ONCE, Noise, Sampled, SamplingBatch, sample_seed

__all__ = ["SAMPLED_ROWS_AT_ONCE", "Drafts", "KeptNoise", "Noise", "Row", "Sampled", "SamplingBatch", "TokenLogprobs", "sample_seed"]
