"""Makes a picture of a terminal: `tmux capture-pane -ep | python docs/site/screen.py > docs/chat.svg`."""

from __future__ import annotations

import io
import re
import sys

from rich.console import Console
from rich.text import Text

COLUMNS = 84


def picture(screen: str) -> str:
    """An SVG of what is on a screen, given with its escape sequences. It names no font of the web."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text.from_ansi(screen.rstrip("\n")), end="")
    svg = console.export_svg(title="mlxinfer", unique_id="chat")
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL).replace("Fira Code, monospace", "Fira Code, Menlo, monospace")


if __name__ == "__main__":
    sys.stdout.write(picture(sys.stdin.read()))
