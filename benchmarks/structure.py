"""Counts the files, lines and imports of the package, and draws its layers in docs/layers.svg."""

from __future__ import annotations

import ast
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path

import click

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "layers.svg"
LINKED = ("convert", "kernels_metal", "kernels_cpu")
"""Top-level folders that are packaged as `mlxinfer.NAME` through links."""
BASE = "types, config, errors"
"""The files directly in mlxinfer/, drawn as one box."""
WIDTH, HEIGHT, GAP, LEVEL = 124, 34, 26, 78
"""Size of a box, horizontal gap, distance of two layers."""


@dataclass(frozen=True, slots=True)
class Module:
    """A source file of the package. Its `name` is dotted; `__init__.py` has the name of its package."""

    name: str
    path: Path
    tree: ast.Module
    lines: int

    @property
    def folder(self) -> str:
        """Folder below mlxinfer/; "" for a file directly in mlxinfer/."""
        parts = self.name.split(".")
        is_package = self.path.name == "__init__.py"
        return parts[1] if len(parts) > 2 or (is_package and len(parts) == 2) else ""


def modules(root: Path = ROOT, *, linked: bool = True) -> list[Module]:
    """All modules, in the order of their paths; without the linked folders if `linked` is False."""
    folders = {"mlxinfer": "mlxinfer"} | ({name: f"mlxinfer.{name}" for name in LINKED} if linked else {})
    found = []
    for folder, package in folders.items():
        for path in sorted((root / folder).rglob("*.py")):
            inner = path.relative_to(root / folder).with_suffix("").parts
            name = ".".join([package, *(inner[:-1] if inner[-1] == "__init__" else inner)])
            text = path.read_text(encoding="utf-8")
            found.append(Module(name, path, ast.parse(text, str(path)), len(text.splitlines())))
    return found


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the tree and its statements, handlers and cases, but not its expressions, which are most of the nodes."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        for name in ("body", "orelse", "handlers", "finalbody", "cases"):
            inner = getattr(node, name, None)
            if isinstance(inner, list):
                waiting += inner


def imports(module: Module, known: set[str]) -> set[str]:
    """The modules of the package that this module imports, at the top or in a function."""
    found = set()
    package = module.name.split(".") if module.path.name == "__init__.py" else module.name.split(".")[:-1]
    for node in statements(module.tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = [*package[: len(package) - node.level + 1], *(node.module.split(".") if node.module else [])]
            names = [".".join([*base, alias.name]) for alias in node.names]
            found |= {name if name in known else ".".join(base) for name in names}
    return found


def arrows(found: Sequence[Module]) -> Counter[tuple[str, str]]:
    """Count the imports from one folder (or root file) to another."""
    known = {module.name for module in found}
    counts: Counter[tuple[str, str]] = Counter()
    for module in found:
        counts.update(
            (above, below)
            for above, below in ((_folder(module.name), _folder(target)) for target in imports(module, known))
            if below and below != above
        )
    return counts


def _folder(name: str) -> str:
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else ""


def measures(root: Path = ROOT) -> dict[str, str]:
    """The table of the command, for mlxinfer/ without the linked folders."""
    found = modules(root, linked=False)
    lines = sorted(module.lines for module in found)
    known = {module.name for module in found}
    importers = Counter(target for module in found for target in imports(module, known) - {module.name})
    return {
        "files": str(len(found)),
        "lines": f"{sum(lines):,}",
        "median file": f"{statistics.median(lines):.0f}",
        "p90 file": str(lines[int(len(lines) * 0.9)]),
        "longest file": str(lines[-1]),
        "files under 80 lines": str(sum(count < 80 for count in lines)),
        "files with one importer": str(sum(importers[name] == 1 for name in known)),
        "imports between folders": str(arrows(found).total()),
    }


def module_tests(root: Path = ROOT) -> dict[str, list[str]]:
    """Test files that are named after each module: `test_MODULE.py` or `test_PACKAGE_MODULE.py`, perhaps with `_topic`."""
    files = sorted((root / "tests").rglob("test_*.py"))
    found: dict[str, list[str]] = {}
    for module in modules(root):
        package, name = module.name.split(".")[-2:] if "." in module.name else ("", module.name)
        starts = (f"test_{name}_", f"test_{package}_{name}_")
        own = [file for file in files if module.folder in file.parts and f"{file.stem}_".startswith(starts)]
        if own:
            found[module.name] = [file.relative_to(root).as_posix() for file in own]
    return found


def layers(edges: Iterable[tuple[str, str]]) -> list[list[str]]:
    """Folders by layer, the lowest first; each below all its importers, no lower than necessary. Raises `ValueError` for a circle."""
    sorter = TopologicalSorter[str]()
    for above, below in edges:
        sorter.add(below, above)
    sorter.prepare()
    rows: list[list[str]] = []
    while sorter.is_active():
        rows.insert(0, sorted(sorter.get_ready()))
        sorter.done(*rows[0])
    return rows


def picture(found: list[Module]) -> str:
    """An SVG of the layers: a box for each folder, above all its imports, with lines to its imports in the next layer."""
    folders = {module.folder for module in found} - {""}
    edges = {(a, b if b in folders else BASE) for a, b in arrows(found) if a in folders}
    rows = layers(edges)
    width, height = max(len(row) for row in rows) * (WIDTH + GAP) + GAP, len(rows) * LEVEL + LEVEL - HEIGHT
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="13">']
    parts.append(f'<rect width="{width}" height="{height}" fill="#fff"/>')
    at = {}
    for level, row in enumerate(rows):
        for number, folder in enumerate(row):
            at[folder] = (width - len(row) * (WIDTH + GAP) + GAP) / 2 + number * (WIDTH + GAP), height - (level + 1) * LEVEL
    for (x1, y1), (x2, y2) in ((at[a], at[b]) for a, b in sorted(edges)):
        if y2 - y1 == LEVEL:
            ends = f'x1="{x1 + WIDTH / 2:.0f}" y1="{y1 + HEIGHT:.0f}" x2="{x2 + WIDTH / 2:.0f}" y2="{y2:.0f}"'
            parts.append(f'<line {ends} stroke="#8a94a6" stroke-width="1.2"/>')
    for folder, (x, y) in sorted(at.items()):
        label, size = (folder, ' font-size="8"') if folder == BASE else (f"{folder}/", "")
        place = f'x="{x + WIDTH / 2:.0f}" y="{y + HEIGHT / 2 + 4:.0f}"'
        parts.append(
            f'<rect x="{x:.0f}" y="{y:.0f}" width="{WIDTH}" height="{HEIGHT}" rx="6" fill="#eef3fb" stroke="#4a6fa5"/>'
            f'<text {place} text-anchor="middle" fill="#1d2b40"{size}>{label}</text>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


@click.command()
@click.option("--root", type=click.Path(path_type=Path, exists=True, file_okay=False), default=ROOT, help="Another checkout.")
@click.option("--draw", is_flag=True, help="Write docs/layers.svg as well.")
@click.option("--tests", is_flag=True, help="List the tests that are named after each module instead.")
def structure(root: Path, draw: bool, tests: bool) -> None:
    """Count files, lines and imports of the package, and draw its layers."""
    if tests:
        click.echo("\n".join(f"{name}: {', '.join(files)}" for name, files in module_tests(root).items()))
        return
    click.echo("\n".join(f"{name:46}{value:>10}" for name, value in measures(root).items()))
    if draw:
        PICTURE.write_text(picture(modules(root)), encoding="utf-8")
