"""From launches to seconds. A model, not a measurement: every figure that comes out of it is to be marked as computed.

A launch takes as long as the slowest of three: memory, which delivers what it reads, each byte once, and takes what it writes; its
instructions; its products of tiles. To that each dependent stage adds what starting and ending a launch costs, and each drain the time in
which the GPU waits for the host.
"""

from __future__ import annotations

from .chips import Chip
from .ledger import Ledger
from .primitives import Launch

BANDWIDTH_SHARE = 0.8
"""Of the stated bandwidth, what kernels that stream weights reach. An assumption."""
ARITHMETIC_SHARE = 0.6
"""The same for instructions and products of tiles. An assumption."""
STAGE_S = 5e-6
"""A launch that has to wait for the one before it. Measured by others: 5.2 us for each of 832 launches added to a token's
(github.com/antonellof/ferrox/issues/149), 5.9 us for each of 986 that were saved on an M3 Ultra (github.com/Blaizzy/mlx-vlm/pull/2105)."""
BESIDE_S = 1e-6
"""A launch that runs while another does. An assumption."""
DRAIN_S = 2e-4
"""From the end of a launch to the host noticing it, and from submitting to the next one's start. An assumption."""
UNPACKING = 2
"""Instructions to take one number out of a quantized matrix: a mask and a conversion (`qdot` in mlx/backend/metal/kernels/quantized.h)."""


def seconds(ledger: Ledger, chip: Chip, *, drains: float = 0, host_s: float = 0) -> float:
    """Computed seconds of these launches with so many drains, after which the host takes `host_s` in all until it submits more."""
    busy = sum(launch_s(launch, chip) for launch in ledger.launches)
    waiting = ledger.stages * STAGE_S + (ledger.count - ledger.stages) * BESIDE_S
    return busy + waiting + drains * DRAIN_S + host_s


def launch_s(launch: Launch, chip: Chip) -> float:
    """Computed seconds of one launch, apart from starting it."""
    memory = (launch.reads - launch.repeated + launch.writes) / (chip.bandwidth * BANDWIDTH_SHARE)
    speed = chip.instructions * ARITHMETIC_SHARE
    products = launch.operations / 2
    instructions = launch.unpacked * UNPACKING + (0 if launch.on_matrix_units else products)
    tiles = products / chip.matrix if launch.on_matrix_units else 0
    return max(memory, instructions / speed, tiles / speed)
