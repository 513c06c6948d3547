"""From logits to tokens."""

from .logprobs import TokenLogprobs
from .rows import Drafts, SampledSequence
from .sampler import SAMPLED_ROWS_AT_ONCE, KeptNoise, Noise, Sampled, SamplingBatch, sample_seed

__all__ = [
    "SAMPLED_ROWS_AT_ONCE",
    "Drafts",
    "KeptNoise",
    "Noise",
    "Sampled",
    "SampledSequence",
    "SamplingBatch",
    "TokenLogprobs",
    "sample_seed",
]
