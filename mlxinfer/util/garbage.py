"""Keeps the garbage collector away from work that allocates much and frees little."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Loading a model and importing the engine allocate hundreds of thousands of objects and free few: scanning them again and again
    would cost a fifth of the tokenizer's load time. Even once, right after the collector is back, it takes 20 ms."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            if not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()  # into the oldest generation, which is scanned once it has grown by a quarter
            gc.enable()
