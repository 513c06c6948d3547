"""Prints the wheels that pip has chosen: `python -m benchmarks.mac_report.wheels`. Another wheel of mlx-metal has other kernels."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution

_PACKAGES = ("mlx", "mlx-metal", "mlx-lm", "mlxinfer")


def wheel_lines() -> Iterator[str]:
    """Yield the version and the tags of each package."""
    for name in _PACKAGES:
        try:
            package = distribution(name)
        except PackageNotFoundError:
            yield f"{name} is not installed"
            continue
        wheel = package.read_text("WHEEL") or ""
        yield " ".join([name, package.version, *(line.removeprefix("Tag: ") for line in wheel.splitlines() if line.startswith("Tag: "))])
    yield f"Python {sys.version}"


if __name__ == "__main__":
    print("\n".join(wheel_lines()))
