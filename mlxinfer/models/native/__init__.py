"""Decoder blocks as programs of the CPU kernels."""
