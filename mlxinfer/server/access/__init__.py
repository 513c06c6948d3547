"""Connections, origins and keys: decides which requests are accepted."""
