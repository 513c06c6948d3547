"""Facts about a Mac, read from stubs of macOS's commands and of packages' metadata."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from pathlib import Path

import pytest

from mlxinfer.util import mac

KERNEL = "Darwin Kernel Version 24.0.0: Wed Aug  7 03:08:06 PDT 2024; root:xnu-11215.1.9~22/RELEASE_ARM64_"
BATTERY = "Now drawing from 'Battery Power'\n -InternalBattery-0 (id=1)\t80%; discharging; 5:01 remaining present: true\n"
MAINS = "Now drawing from 'AC Power'\n"
SETTINGS = "System-wide power settings:\nCurrently in use:\n standby              1\n Sleep On Power Button 1\n"


@pytest.mark.parametrize(
    ("chip", "generation"),
    [("T8101", 1), ("T8103", 1), ("T6000", 1), ("T8112", 2), ("T6020", 2), ("T8122", 3), ("T6031", 3), ("T8132", 4), ("T6041", 4),
     ("T8142", 5), ("T6050", 5), ("VMAPPLE", None), ("T7000", None), ("", None)],
)  # fmt: skip
def test_a_kernel_names_its_chip(chip: str, generation: int | None) -> None:
    assert mac.chip_generation(KERNEL + chip) == generation


def test_another_system_has_no_chip_of_apple() -> None:
    assert mac.chip_generation("#1 SMP PREEMPT_DYNAMIC Debian 6.1.0") is None


@pytest.fixture
def pmset(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Put a stub of `pmset` into PATH, which answers by its arguments."""

    def put(batt: str, settings: str = SETTINGS, therm: str = "") -> None:
        for name, text in {"batt": batt, "settings": settings, "therm": therm}.items():
            (tmp_path / name).write_text(text)
        stub = tmp_path / "pmset"
        stub.write_text(f'#!/bin/sh\ncat "{tmp_path}/${{2:-settings}}"\n')
        stub.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        monkeypatch.setattr(sys, "platform", "darwin")

    return put


@pytest.mark.parametrize(
    ("batt", "mode", "text", "limited"),
    [
        (MAINS, "", "mains", False),
        (BATTERY, "", "battery", True),
        (MAINS, " lowpowermode         1\n", "mains, low power mode", True),
        (MAINS, " lowpowermode         0\n", "mains", False),
        (BATTERY, " powermode            1\n", "battery, low power mode", True),
        (MAINS, " powermode            2\n", "mains", False),
        ("", "", "source not known", False),
    ],
)
def test_power_is_read_from_pmset(pmset, batt: str, mode: str, text: str, limited: bool) -> None:
    pmset(batt, SETTINGS + mode)
    found = mac.power()
    assert (str(found), found.limited) == (text, limited)


def test_temperature_is_read_from_pmset(pmset) -> None:
    pmset(MAINS, therm="Note: No thermal warning level has been recorded\n\n\tCPU_Speed_Limit \t= 70\n")
    assert mac.thermal_lines() == ["Note: No thermal warning level has been recorded", "CPU_Speed_Limit \t= 70"]


def test_without_pmset_nothing_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert (mac.power(), mac.thermal_lines()) == (mac.Power(), [])


def _install(monkeypatch: pytest.MonkeyPatch, version: str, tag: str) -> None:
    """Pretend a version of macOS and a wheel of mlx-metal; "" for none."""

    class Wheel:
        def read_text(self, name: str) -> str:
            assert name == "WHEEL"
            return f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: py3-none-{tag}\n"

    def distribution(name: str) -> Wheel:
        if name != "mlx-metal" or not tag:
            raise importlib.metadata.PackageNotFoundError(name)
        return Wheel()

    monkeypatch.setattr(importlib.metadata, "distribution", distribution)
    monkeypatch.setattr(platform, "mac_ver", lambda: (version, ("", "", ""), "arm64"))


@pytest.mark.parametrize(
    ("architecture", "version", "tag", "expected"),
    [
        ("applegpu_g16s", "26.3", "macosx_26_0_arm64", "has none"),
        ("applegpu_g17p", "26.3", "macosx_26_0_arm64", "has none"),
        ("applegpu_g17s", "26.3", "macosx_26_0_arm64", "used"),
        ("applegpu_g17g", "26.1", "macosx_26_0_arm64", "not used: MLX needs macOS 26.2 for them, and this is macOS 26.1"),
        ("applegpu_g17s", "26.3", "macosx_15_0_arm64", "not used: the installed mlx-metal is for macosx_15_0_arm64"),
        ("applegpu_g17s", "26.3", "", "used"),
        ("Apple Paravirtual device", "26.3", "macosx_26_0_arm64", "has none"),
    ],
)
def test_matrix_units_have_a_reason(monkeypatch, architecture: str, version: str, tag: str, expected: str) -> None:
    _install(monkeypatch, version, tag)
    found = mac.matrix_units(architecture)
    assert expected in found
    assert (found == "used") == (expected == "used")


def test_a_wheel_has_its_platform(monkeypatch) -> None:
    _install(monkeypatch, "26.3", "macosx_15_0_arm64")
    assert mac.wheel_tag() == "macosx_15_0_arm64"
    assert mac.wheel_tag("other") == ""
