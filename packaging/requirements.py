"""Prints what a checkout of mlxinfer needs, one requirement a line: `python requirements.py [EXTRA,...]`.

pip can then install it while the checkout's own kernels are compiled, which takes as long.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:  # pip brings it
    from pip._vendor import tomli as tomllib


def requirements(project: dict[str, Any], extras: list[str]) -> list[str]:
    """The dependencies, and those of extras, which may name others as `mlxinfer[a,b]`. Raises KeyError for an extra that there is not."""
    lines = list(project["dependencies"])
    for extra in extras:
        for line in project["optional-dependencies"][extra]:
            own = re.fullmatch(rf"{project['name']}\[(.*)\]", line)
            lines += requirements(project, own[1].split(",")) if own else [line]
    return list(dict.fromkeys(lines))


if __name__ == "__main__":
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    wanted = sys.argv[1].split(",") if sys.argv[1:] else []
    sys.stdout.write("\n".join(requirements(tomllib.loads(text)["project"], wanted)) + "\n")
