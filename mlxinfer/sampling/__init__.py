"""From logits to tokens."""

from .logprobs import TokenLogprobs
from .noise import sample_seed
from .sampler import Row, Sampled, SamplingBatch
from .spread import Drafts

__all__ = ["Drafts", "Row", "Sampled", "SamplingBatch", "TokenLogprobs", "sample_seed"]
