"""Families that mix attention with recurrent layers."""
