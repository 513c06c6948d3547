"""Scheduling of sequences: no tensors, no text."""
