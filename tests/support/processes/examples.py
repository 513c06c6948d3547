"""Number of random examples of a property: all with `HYPOTHESIS_PROFILE=full`, a third in `make test`, fewer in quicker loops."""

from __future__ import annotations

import os

_SHARES = {"full": 1, "quick": 4, "smoke": 20}


def examples(most: int) -> int:
    """The part of `most` that the profile of Hypothesis in use has time for, two at least."""
    return max(most // _SHARES.get(os.environ.get("HYPOTHESIS_PROFILE", ""), 3), 2)
