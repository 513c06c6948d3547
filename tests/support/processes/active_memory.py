"""MLX's active memory, measured independently of the machine's load."""

import mlx.core as mx


def active_memory() -> int:
    """Bytes that are alive when the stream's thread has let go of what it computed with: on a busy machine, after `eval` returns."""
    mx.synchronize()
    return mx.get_active_memory()
