"""Benchmarks of models whose experts do not all fit in memory."""
