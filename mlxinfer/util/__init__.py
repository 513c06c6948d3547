"""Helpers without knowledge of models, used by all layers."""
