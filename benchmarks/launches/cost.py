"""Computes seconds from launches. This is a model, not a measurement: mark every figure from it as computed.

A launch takes as long as the slowest of three: memory, which moves each byte read once and each byte written; instructions; products of
tiles. Each dependent stage adds the cost of starting and ending a launch. Each drain adds the time in which the GPU waits for the host.
"""

from __future__ import annotations

from .chips import Chip
from .ledger import Ledger
from .primitives import Launch

BANDWIDTH_SHARE = 0.8
"""Share of the stated bandwidth that kernels reach when they stream weights. An assumption."""
ARITHMETIC_SHARE = 0.6
"""The same for instructions and products of tiles. An assumption."""
STAGE_S = (1.5e-6, 5e-6)
"""Least and most seconds of a launch that waits for the launch before it. Others measured about 1.7 us for each saved one on an M3 Ultra
(github.com/jundot/omlx/pull/2787), 5.2 us for each of 832 launches added to a token (github.com/antonellof/ferrox/issues/149), and 5.9 us
for each of 986 removed ones on an M3 Ultra (github.com/Blaizzy/mlx-vlm/pull/2105)."""
PARALLEL_S = 1e-6
"""A launch that runs while another does. An assumption."""
DRAIN_S = 2e-4
"""From the end of a launch until the host notices, plus from a submission to the next start. An assumption."""
UNPACKING = 2
"""Instructions per number of a quantized matrix: a mask and a conversion (`qdot` in mlx/backend/metal/kernels/quantized.h)."""


def seconds(ledger: Ledger, chip: Chip, stage_s: float, *, drains: float = 0, host_s: float = 0) -> float:
    """Computed seconds of the GPU: for the launches, and for `drains`, after which the host takes `host_s` in all until its next
    submissions. `stage_s` is the cost of a stage."""
    busy = sum(launch_s(launch, chip) for launch in ledger.launches)
    waiting = ledger.stages * stage_s + (ledger.count - ledger.stages) * PARALLEL_S
    return busy + waiting + drains * DRAIN_S + host_s


def launch_s(launch: Launch, chip: Chip) -> float:
    """Computed seconds of a launch, without starting it."""
    memory = (launch.reads - launch.repeated + launch.writes) / (chip.bandwidth * BANDWIDTH_SHARE)
    speed = chip.instructions * ARITHMETIC_SHARE
    products = launch.operations / 2
    instructions = launch.unpacked * UNPACKING + (0 if launch.on_matrix_units else products)
    tiles = products / chip.matrix if launch.on_matrix_units else 0
    return max(memory, instructions / speed, tiles / speed)
