"""A short text of several kinds, to read."""

from __future__ import annotations

TEXT = """\
The harbour was quiet before dawn. A fisherman checked his nets, counted the floats twice, and looked at the sky, which promised \
wind. "If it turns north," he said to his daughter, "we stay." She laughed: he had said so every morning for ten years, and every \
morning they had gone out.

Water boils at 100 degrees Celsius at sea level, but at only 90 degrees on a mountain of 3000 metres, because the pressure of the \
air is lower there. For the same reason, bread needs less yeast and more time in the oven.

def mean(values):
    if not values:
        raise ValueError("mean of nothing")
    return sum(values) / len(values)

1. Preheat the oven to 220 degrees. 2. Mix flour, salt and water. 3. Let the dough rest for an hour, then fold it four times.
"""
