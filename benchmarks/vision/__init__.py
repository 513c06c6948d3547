"""Seconds of vision towers on a CPU, compared with plain MLX and with llama.cpp."""
