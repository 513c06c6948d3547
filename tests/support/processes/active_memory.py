"""What MLX holds, measured so that a busy machine does not change it."""

import mlx.core as mx


def active_memory() -> int:
    """Bytes that are alive when the stream's thread has let go of what it computed with: on a busy machine, after `eval` returns."""
    mx.synchronize()
    return mx.get_active_memory()
