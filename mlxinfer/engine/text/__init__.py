"""Prompts in, text and vectors out."""
