from __future__ import annotations

import pytest

from mlxinfer.kernels_metal import emulator


@pytest.fixture(autouse=True)
def _the_emulator_itself(request: pytest.FixtureRequest) -> None:
    """Here a GPU is no substitute."""
    if request.node.get_closest_marker("emulator") and (lack := emulator.why_not()):
        pytest.skip(lack)
