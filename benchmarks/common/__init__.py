"""Shared parts: options of commands, processes of engines, samples, tables and pictures."""
