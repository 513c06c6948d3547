"""From logits to tokens."""

from .logprobs import TokenLogprobs
from .rows import Drafts, Row
from .sampler import SAMPLED_ROWS_AT_ONCE, Sampled, SamplingBatch, sample_seed

__all__ = ["SAMPLED_ROWS_AT_ONCE", "Drafts", "Row", "Sampled", "SamplingBatch", "TokenLogprobs", "sample_seed"]
