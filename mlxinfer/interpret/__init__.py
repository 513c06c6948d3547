"""Reads and changes the activations of a model: traces and interventions."""

from .interventions import ablation, patch, steering
from .trace import LogitLens, Trace

__all__ = ["LogitLens", "Trace", "ablation", "patch", "steering"]
