"""How kernels run when the call does not say: so that code which launches them through something else can be run in every mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

MODES = ("fast", "asan", "tsan", "msan", "trace")
ORDERS = ("forward", "reversed", "random")


@dataclass(frozen=True)
class Settings:
    """mode: see `MODES`; order: of threads, simdgroups and threadgroups; seed: of the random order; timeout: seconds per launch."""

    mode: str = "fast"
    order: str = "forward"
    seed: int = 0
    timeout: float = 120.0

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"mode is one of {', '.join(MODES)}, not {self.mode!r}")
        if self.order not in ORDERS:
            raise ValueError(f"order is one of {', '.join(ORDERS)}, not {self.order!r}")

    def but(self, mode: str | None, order: str | None, seed: int | None) -> Settings:
        given = {"mode": mode, "order": order, "seed": seed}
        return replace(self, **{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]


_current = Settings()


def current() -> Settings:
    return _current


@contextmanager
def settings(
    mode: str | None = None, order: str | None = None, seed: int | None = None, timeout: float | None = None
) -> Iterator[Settings]:
    """Launches inside use these, in whatever thread, where the call itself does not say otherwise."""
    global _current
    before = _current
    chosen = before.but(mode, order, seed)
    _current = chosen if timeout is None else replace(chosen, timeout=timeout)
    try:
        yield _current
    finally:
        _current = before
