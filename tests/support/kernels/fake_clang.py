"""Compilers that refuse what a test wants refused."""

from __future__ import annotations

import sys
from pathlib import Path

# A compiler whose programs say "ok" or fail; what it cannot link ends with a reason as linkers give them.
COMPILER = """#!{python} -SE
import os, sys
version, refused, crashing = {version!r}, {refused!r}, {crashing!r}
arguments = " ".join(sys.argv[1:])
with open({log!r}, "a") as log:
    log.write(arguments + chr(10))
if "--version" in arguments:
    print("clang version", version)
elif "-print-libgcc-file-name" in arguments:
    print({builtins!r})
elif refused and refused in arguments and not ("{cure}" and "{cure}" in arguments):
    sys.exit("/tmp/it.o: in function main: undefined reference to 'what_is_not_there'")
else:
    program = sys.argv[-1]
    with open(program, "w") as file:
        file.write("#!/bin/sh" + chr(10))
        file.write("echo ERROR: no memory there >&2; exit 66" if crashing and crashing in arguments else "echo ok")
    os.chmod(program, 0o755)
"""


def install_compiler(
    folder: Path, name: str, version: str, *, builtins: bool = True, refused: str = "", crashing: str = "", cure: str = ""
) -> Path:
    """A compiler that cannot link what has `refused` in it (unless `cure` is there too), and whose programs with `crashing` fail."""
    library = folder / "libclang_rt.builtins.a"
    for other in ("ld", "llvm-symbolizer"):
        (folder / other).touch()
        (folder / other).chmod(0o755)
    if builtins:
        library.touch()
    log = folder / f"{name}.log"
    values = {"version": version, "refused": refused, "crashing": crashing, "cure": cure, "builtins": str(library), "log": str(log)}
    (folder / name).write_text(COMPILER.format(python=sys.executable, **values))
    (folder / name).chmod(0o755)
    return log
