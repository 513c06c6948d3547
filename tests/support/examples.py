"""How many random examples of a property are tried: all of them in `make test`, fewer in the shorter loops."""

from __future__ import annotations

import os

_SHARES = {"quick": 4, "smoke": 20}


def examples(most: int) -> int:
    """`most`, or the part of it that the profile of Hypothesis in use has time for, two at least."""
    return max(most // _SHARES.get(os.environ.get("HYPOTHESIS_PROFILE", ""), 1), 2)
