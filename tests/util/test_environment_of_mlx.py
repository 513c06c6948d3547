"""Variables that importing the package sets for MLX."""

import os
import subprocess
import sys

import pytest

CODE = """
import os, sys
sys.platform = {platform!r}
os.sysconf = {{"SC_PAGE_SIZE": 16384, "SC_PHYS_PAGES": {memory} * 2**30 // 16384}}.get
import mlxinfer
assert "mlx" not in sys.modules
print(os.environ.get("MLX_MAX_MB_PER_BUFFER"))
"""


@pytest.mark.parametrize(
    ("platform", "memory", "own", "expected"),
    [
        ("darwin", 16, None, "171"),
        ("darwin", 128, None, "1374"),
        ("darwin", 4, None, "50"),
        ("darwin", 16, "64", "64"),
        ("linux", 16, None, "None"),
    ],
)
def test_command_buffers_of_a_mac_may_read_large_pools(platform, memory, own, expected):
    """By its memory in GB; set before MLX is imported, and left alone where it is set."""
    environment = {name: value for name, value in os.environ.items() if name != "MLX_MAX_MB_PER_BUFFER"}
    environment |= {"MLX_MAX_MB_PER_BUFFER": own} if own else {}
    code = CODE.format(platform=platform, memory=memory)
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert found.stdout.strip() == expected, found.stderr
