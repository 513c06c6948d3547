"""Figures of tokens, engines and models for notebooks."""
