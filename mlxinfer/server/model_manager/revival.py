"""Brings a model back whose engine has failed for good, so that a router which looks at `/health` finds it healthy again."""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING

from ..errors import APIError
from ..log import notice

if TYPE_CHECKING:
    from .manager import Keeper
    from .model_slot import Slot

WITHIN_S = 3600.0
"""Seconds for which a death is remembered."""
MOST_S = 1800.0
"""Longest wait before a new attempt."""
_AGAIN_S = 1.0
"""Seconds before a new attempt where the last one was refused at once: too many requests wait, or the server ends."""


def back_off_s(deaths: list[float], now: float, first_s: float) -> float:
    """Seconds to wait after the last of these `deaths`, in seconds of `time.monotonic`: twice as long for each within the hour. Forgets
    the older ones."""
    deaths[:] = [at for at in deaths if now - at < WITHIN_S]
    return min(first_s * 2.0 ** max(len(deaths) - 1, 0), MOST_S)


async def revive(keeper: Keeper, slot: Slot, ended: Future[None], loads: int) -> None:
    """Wait for the end of an engine, which was loaded as the `loads`th of its slot. If it was not unloaded but has failed, load it again
    when its back-off is over, as often as it takes. Ends where others have loaded it, or it is to stay unloaded."""
    await asyncio.wait([asyncio.wrap_future(ended)])
    if slot.state == "ready" and slot.loads == loads:
        keeper.bury(slot)
    while slot.died and slot.state == "failed" and slot.loads == loads:
        wait_s = slot.retry_at - time.monotonic()
        if wait_s > 0:
            await asyncio.sleep(wait_s)
            continue
        try:
            await keeper.hold(slot)
        except APIError as error:
            notice(error.message, level=logging.WARNING, model=slot.name)
            if slot.retry_at <= time.monotonic():
                await asyncio.sleep(_AGAIN_S)
        else:
            keeper.let_go(slot)
