"""Makes one site of all that README and docs/ link to: pages elsewhere in the repository, notebooks with their pictures, and single files.

Links stay as they are for whoever reads the repository itself; here they are pointed at the places in the site.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
from html import escape
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
_LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\])*\]\()([^)\s]+)(\))")
_FENCE = re.compile(r"^(```|~~~).*?^\1\s*$", re.MULTILINE | re.DOTALL)
_PLACES: dict[str, str] = {}
"""Where what lies elsewhere in the repository is in the site, both relative to their roots."""


def on_files(files: Files, config: Any) -> Files:
    """Add README as the first page, and all that can be reached from the pages."""
    _PLACES.clear()
    waiting = [f"docs/{each.src_uri}" for each in files.documentation_pages()]
    _PLACES.update({page: page.removeprefix("docs/") for page in waiting})
    _PLACES["README.md"] = "index.md"
    waiting.append("README.md")
    while waiting:
        page = waiting.pop()
        if not page.endswith(".md"):
            continue
        for link in _links((ROOT / page).read_text(encoding="utf-8")):
            target = _target(page, link)
            if target not in _PLACES and (ROOT / target).is_file():
                _PLACES[target] = _place(target)
                waiting.append(target)
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        _PLACES[f"notebooks/{path.name}"] = f"notebooks/{path.stem}.md"
    for source, place in _PLACES.items():
        if files.get_file_from_path(place) is None:
            files.append(_file(source, place, config))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Point links at the places in the site; what has none there loses its link and keeps its text."""
    here = next((source for source, place in _PLACES.items() if place == page.file.src_uri), "docs/" + page.file.src_uri)

    def moved(found: re.Match[str]) -> str:
        before, link, after = found.groups()
        if "://" in link or link.startswith(("#", "mailto:", "data:")):
            return found.group()
        path, hash_, anchor = link.partition("#")
        target = _target(here, path)
        if target in _PLACES:
            place = posixpath.relpath(_PLACES[target], posixpath.dirname(page.file.src_uri) or ".")
            return f"{before}{place}{hash_}{anchor}{after}"
        if (ROOT / target).is_dir():
            return re.sub(r"^!?\[|\]\($", "", before)
        return found.group()

    pieces, last = [], 0
    for fence in _FENCE.finditer(markdown):
        pieces += [_LINK.sub(moved, markdown[last : fence.start()]), fence.group()]
        last = fence.end()
    return "".join([*pieces, _LINK.sub(moved, markdown[last:])])


def _links(text: str) -> list[str]:
    return [link.partition("#")[0] for _, link, _ in _LINK.findall(_FENCE.sub("", text)) if "://" not in link and not link.startswith("#")]


def _target(page: str, link: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), link))


def _place(target: str) -> str:
    """Pages elsewhere keep their folders; what is no page is served as it is."""
    return target.removeprefix("docs/") if target.startswith("docs/") else f"repository/{target}"


def _file(source: str, place: str, config: Any) -> File:
    path = ROOT / source
    if source.endswith(".ipynb"):
        return File.generated(config, place, content=_notebook(path))
    if place.endswith(".md"):
        return File.generated(config, place, content=path.read_text(encoding="utf-8"))
    return File.generated(config, place, abs_src_path=os.fspath(path))


def _notebook(path: Path) -> str:
    """A notebook as a page: its text, its code, and what came out of it."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        parts += [_output(output) for output in cell.get("outputs", ())]
    return "\n\n".join(parts) + "\n"


def _output(output: dict[str, Any]) -> str:
    if output["output_type"] == "stream":
        return f'<pre class="output">{escape("".join(output["text"]))}</pre>'
    data = output.get("data", {})
    if "image/png" in data:
        image = "".join(data["image/png"]).replace("\n", "")
        return f'<img class="output" alt="What the cell above shows" src="data:image/png;base64,{image}">'
    if "text/html" in data:
        return f'<div class="output">{"".join(data["text/html"])}</div>'
    return f'<pre class="output">{escape("".join(data.get("text/plain", "")))}</pre>'
