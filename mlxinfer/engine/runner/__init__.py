"""Execution of one scheduled step on the model."""
