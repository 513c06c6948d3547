"""Facts about a Mac that MLX does not report: the generation of its chip, its power source, and the wheel of MLX's Metal kernels.

Imports nothing of MLX, because some facts decide settings that MLX reads when it starts.
"""

from __future__ import annotations

import os
import sys

from .dataclass import dataclass

_SECONDS = 5.0
"""Maximum seconds of a system command."""
WITH_MATRIX_UNITS = 17
"""GPU generation of M5."""
_MATRIX_UNITS_FROM = (26, 2)
"""Lowest macOS on which MLX uses matrix units (`is_nax_available` in mlx/backend/metal/device.cpp)."""
_WHEEL_WITH_MATRIX_UNITS = 26
"""Lowest macOS in the tag of a wheel that has kernels for matrix units."""


def chip_generation(kernel: str | None = None) -> int | None:
    """Return the generation of Apple's chip, such as 4 for M4, M4 Pro and M4 Max; None on other machines, and in virtual ones.

    `kernel` is the kernel's version, by default this system's. It ends with the chip: `RELEASE_ARM64_T8132` is M4, `T6041` is M4 Max.
    """
    version = os.uname().version if kernel is None else kernel
    chip = version.rpartition("RELEASE_ARM64_T")[2]
    if len(chip) != 4 or not chip.isdigit() or chip[:2] not in ("81", "60"):
        return None
    return int(chip[2]) or 1 if chip[:2] == "60" else int(chip[2]) + 1


@dataclass(frozen=True, slots=True)
class Power:
    """Power of a machine. Both slow a laptop down."""

    source: str = ""
    """"mains" or "battery"; "" if not known."""
    low: bool = False
    """True in low power mode."""

    @property
    def limited(self) -> bool:
        """True if measured speeds may be lower than usual."""
        return self.low or self.source == "battery"

    def __str__(self) -> str:
        return f"{self.source or 'source not known'}{', low power mode' if self.low else ''}"


def power() -> Power:
    """Return the power of this Mac; `Power()` elsewhere."""
    if sys.platform != "darwin":
        return Power()
    source, modes = _pmset("-g", "batt"), _pmset("-g")
    low = any(line.split()[:2] in (["lowpowermode", "1"], ["powermode", "1"]) for line in modes.splitlines())
    return Power("mains" if "AC Power" in source else "battery" if "Battery Power" in source else "", low)


def thermal_lines() -> list[str]:
    """Return what this Mac reports about its temperature (`pmset -g therm`); empty elsewhere."""
    if sys.platform != "darwin":
        return []
    return [line.strip() for line in _pmset("-g", "therm").splitlines() if line.strip()]


def _pmset(*arguments: str) -> str:
    import subprocess

    try:
        done = subprocess.run(["pmset", *arguments], capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


def wheel_tag(package: str = "mlx-metal") -> str:
    """Return the platform of an installed wheel, such as `macosx_15_0_arm64`; "" if it is not known."""
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        text = distribution(package).read_text("WHEEL") or ""
    except PackageNotFoundError:
        return ""
    tags = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("Tag:")]
    return tags[0].rpartition("-")[2] if tags else ""


def macos_version() -> tuple[int, ...]:
    """Return the version of macOS, such as (26, 1); () elsewhere."""
    import platform

    numbers = platform.mac_ver()[0].split(".")
    return tuple(int(number) for number in numbers if number.isdigit())


def matrix_units(architecture: str) -> str:
    """Return whether MLX uses the GPU's matrix units, and the reason if not. `architecture` is MLX's, such as `applegpu_g17s`."""
    if gpu_generation(architecture) < WITH_MATRIX_UNITS + architecture.endswith("p"):
        return "this GPU has none (M5 and later have them)"
    tag, version = wheel_tag(), macos_version()
    if version and version < _MATRIX_UNITS_FROM:
        return f"not used: MLX needs macOS 26.2 for them, and this is macOS {'.'.join(map(str, version))}"
    if tag and _macos_of(tag) < _WHEEL_WITH_MATRIX_UNITS:
        again = "reinstall in an environment of a newer Python (python.org or uv)"
        return f"not used: the installed mlx-metal is for {tag}, and only the wheel for macosx_26_0 has kernels for them; {again}"
    return "used"


def gpu_generation(architecture: str) -> int:
    """Return the number in `applegpu_g17s`; 0 for other texts."""
    number = architecture.rpartition("applegpu_g")[2][:-1]
    return int(number) if architecture.startswith("applegpu_g") and number.isdigit() else 0


def _macos_of(tag: str) -> int:
    """Return the major version in `macosx_15_0_arm64`; 0 for other tags."""
    parts = tag.split("_")
    return int(parts[1]) if parts[0] == "macosx" and len(parts) > 1 and parts[1].isdigit() else 0
