"""Variables that importing the package sets for MLX."""

import os
import subprocess
import sys

import pytest

CODE = """
import os, sys
sys.platform = {platform!r}
os.uname = lambda: os.uname_result(("Darwin", "mac", "25.0", "root:xnu-1/RELEASE_ARM64_{chip}", "arm64"))
os.sysconf = {{"SC_PAGE_SIZE": 16384, "SC_PHYS_PAGES": {memory} * 2**30 // 16384}}.get
import mlxinfer
assert "mlx" not in sys.modules
print(os.environ.get("MLX_MAX_MB_PER_BUFFER"), os.environ.get("MLX_MAX_OPS_PER_BUFFER"))
"""
NAMES = ("MLX_MAX_MB_PER_BUFFER", "MLX_MAX_OPS_PER_BUFFER")


def variables(platform: str, memory: int, chip: str, own: dict[str, str]) -> list[str]:
    """Return what `NAMES` are after the import, on a machine with `memory` GB."""
    environment = {name: value for name, value in os.environ.items() if name not in NAMES} | own
    code = CODE.format(platform=platform, memory=memory, chip=chip)
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    return found.stdout.split()


@pytest.mark.parametrize(
    ("platform", "memory", "own", "expected"),
    [
        ("darwin", 16, {}, "171"),
        ("darwin", 128, {}, "1374"),
        ("darwin", 4, {}, "50"),
        ("darwin", 16, {"MLX_MAX_MB_PER_BUFFER": "64"}, "64"),
        ("linux", 16, {}, "None"),
    ],
)
def test_command_buffers_of_a_mac_may_read_large_pools(platform, memory, own, expected):
    """By its memory in GB; set before MLX is imported, and left alone where it is set."""
    assert variables(platform, memory, "T8132", own)[0] == expected


@pytest.mark.parametrize(
    ("platform", "chip", "own", "expected"),
    [
        ("darwin", "T8103", {}, "500"),
        ("darwin", "T6041", {}, "500"),
        ("darwin", "T8142", {}, "None"),
        ("darwin", "VMAPPLE", {}, "None"),
        ("darwin", "T8103", {"MLX_MAX_OPS_PER_BUFFER": "40"}, "40"),
        ("linux", "T8103", {}, "None"),
    ],
)
def test_command_buffers_before_m5_are_long(platform, chip, own, expected):
    assert variables(platform, 16, chip, own)[1] == expected
