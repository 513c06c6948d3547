"""Encoders from floating-point matrices to MLX's quantized formats."""
