"""Architectures that run on mlx-lm's graphs."""
