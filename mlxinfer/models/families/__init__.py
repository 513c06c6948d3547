"""Families of architectures, one file each. A function named after a `model_type` converts its config to an `Architecture`."""
