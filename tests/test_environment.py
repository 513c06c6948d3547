"""What importing the package sets for MLX."""

import os
import subprocess
import sys

import pytest

CODE = """
import sys
sys.platform = {platform!r}
import mlxinfer, os
assert "mlx" not in sys.modules
print(os.environ.get("MLX_MAX_MB_PER_BUFFER"))
"""


@pytest.mark.parametrize(
    ("platform", "own", "expected"),
    [("darwin", None, "2000"), ("darwin", "64", "64"), ("linux", None, "None")],
    ids=["mac", "own", "linux"],
)
def test_command_buffers_of_a_mac_may_read_whole_pools(platform, own, expected):
    """Set before MLX is imported, for it may read the limit only once; who has set it keeps it."""
    environment = {name: value for name, value in os.environ.items() if name != "MLX_MAX_MB_PER_BUFFER"}
    environment |= {"MLX_MAX_MB_PER_BUFFER": own} if own else {}
    code = CODE.format(platform=platform)
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert found.stdout.strip() == expected, found.stderr
