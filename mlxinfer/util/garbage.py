"""Suspends the garbage collector during work that allocates many objects and frees few."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Suspend the collector and move new objects to the oldest generation.

    Loading a model and importing the engine allocate hundreds of thousands of objects. Repeated scans would cost a fifth of the
    tokenizer's load time; a single scan takes 20 ms.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            if not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()  # moves objects to the oldest generation, which is scanned after growth by a quarter
            gc.enable()
