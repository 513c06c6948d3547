"""Default settings of launches: code that launches kernels indirectly can run in every mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

MODES = ("fast", "asan", "tsan", "msan", "trace")
ORDERS = ("forward", "reversed", "random")


@dataclass(frozen=True)
class Settings:
    """Settings of launches."""

    mode: str = "fast"
    """One of `MODES`."""
    order: str = "forward"
    """Order of threads, simdgroups and threadgroups: one of `ORDERS`."""
    seed: int = 0
    """Seed of the random order."""
    timeout: float = 120.0
    """Seconds per launch."""

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"mode is one of {', '.join(MODES)}, not {self.mode!r}")
        if self.order not in ORDERS:
            raise ValueError(f"order is one of {', '.join(ORDERS)}, not {self.order!r}")

    def but(self, mode: str | None, order: str | None, seed: int | None) -> Settings:
        """A copy with the values of `given` that are not None."""
        given = {"mode": mode, "order": order, "seed": seed}
        return replace(self, **{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]


_current = Settings()


def current() -> Settings:
    return _current


@contextmanager
def settings(
    mode: str | None = None, order: str | None = None, seed: int | None = None, timeout: float | None = None
) -> Iterator[Settings]:
    """Launches inside the block use these settings in every thread, unless the call has its own."""
    global _current
    before = _current
    chosen = before.but(mode, order, seed)
    _current = chosen if timeout is None else replace(chosen, timeout=timeout)
    try:
        yield _current
    finally:
        _current = before
