"""Looking inside a model: what each layer computes for a prompt, and what becomes of the answer when that is changed."""

from .interventions import ablation, patch, steering
from .trace import LogitLens, Trace

__all__ = ["LogitLens", "Trace", "ablation", "patch", "steering"]
