"""The shape of the source tree: its files, lines and imports, and the picture of its layers in docs/layers.svg."""

from __future__ import annotations

import ast
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import click

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "layers.svg"
LINKED = ("convert", "kernels_metal", "kernels_cpu")
"""Top-level folders that are packaged as `mlxinfer.NAME` through links."""
SMALL = 80
"""Lines below which a file counts as small."""


@dataclass(frozen=True, slots=True)
class Module:
    """A source file of the package."""

    name: str
    """Dotted, from `mlxinfer`; a package's own file is named as the package."""
    path: Path
    tree: ast.Module
    lines: int

    @property
    def folder(self) -> str:
        """The folder below mlxinfer/; "" for a file directly in it."""
        parts = self.name.split(".")
        is_package = self.path.name == "__init__.py"
        return parts[1] if len(parts) > 2 or (is_package and len(parts) == 2) else ""


def modules(root: Path = ROOT, *, linked: bool = True) -> list[Module]:
    """All modules, ordered by name; without the linked folders if `linked` is False."""
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
    """The tree and all statements, handlers and cases in it: no expressions, which are most of its nodes."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        for name in ("body", "orelse", "handlers", "finalbody", "cases"):
            inner = getattr(node, name, None)
            if isinstance(inner, list):
                waiting += inner


def imports(module: Module, known: set[str]) -> Iterator[str]:
    """The package's own modules that this one imports, at the top or in a function."""
    package = module.name.split(".") if module.path.name == "__init__.py" else module.name.split(".")[:-1]
    for node in statements(module.tree):
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        base = [*package[: len(package) - node.level + 1], *(node.module.split(".") if node.module else [])]
        for alias in node.names:
            name = ".".join([*base, alias.name])
            yield name if name in known else ".".join(base)


def arrows(found: Iterable[Module]) -> dict[tuple[str, str], int]:
    """How many imports lead from one folder (or root file) to another."""
    found = list(found)
    known = {module.name for module in found}
    counts: Counter[tuple[str, str]] = Counter()
    for module in found:
        for target in set(imports(module, known)):
            room = _room(target)
            if room and room != _room(module.name):
                counts[_room(module.name), room] += 1
    return dict(counts)


def _room(name: str) -> str:
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else ""


def docstrings(found: Iterable[Module]) -> Iterator[tuple[str, str]]:
    """(place, text) of every docstring: of modules, classes and functions, and below attributes and constants."""
    for module in found:
        for node in statements(module.tree):
            body = getattr(node, "body", None)
            for statement in body if isinstance(body, list) else ():
                if _is_text(statement):
                    yield f"{module.path}:{statement.lineno}", statement.value.value


def undocumented_fields(found: Iterable[Module]) -> Iterator[str]:
    """Public fields of public dataclasses without a docstring below them."""
    for module in found:
        for node in statements(module.tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and any(map(_is_dataclass, node.decorator_list)):
                for statement, after in zip(node.body, [*node.body[1:], None], strict=True):
                    if _is_public_field(statement) and not _is_text(after):
                        assert isinstance(statement, ast.AnnAssign)
                        yield f"{module.path}:{statement.lineno}: {node.name}.{ast.unparse(statement.target)}"


def _is_dataclass(decorator: ast.expr) -> bool:
    return "dataclass" in ast.unparse(decorator)


def _is_public_field(statement: ast.stmt) -> bool:
    """Not those of `EngineArgs`, which their metadata explains."""
    if not isinstance(statement, ast.AnnAssign) or ast.unparse(statement.target).startswith("_"):
        return False
    return not (statement.value and "metadata=about(" in ast.unparse(statement.value))


def _is_text(statement: ast.stmt | None) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant) and isinstance(statement.value.value, str)


def measures(root: Path = ROOT) -> dict[str, str]:
    """The table of `structure`, for mlxinfer/ without the linked folders."""
    found = modules(root, linked=False)
    everything = modules(root)
    lines = sorted(module.lines for module in found)
    importers = Counter(target for m in found for target in set(imports(m, {x.name for x in found})) - {m.name})
    sizes = {"files": str(len(found)), "lines": f"{sum(lines):,}"}
    sizes |= {
        "median file": f"{statistics.median(lines):.0f}",
        "p90 file": str(lines[int(len(lines) * 0.9)]),
        "longest file": str(lines[-1]),
    }
    sizes[f"files under {SMALL} lines"] = str(sum(1 for count in lines if count < SMALL))
    sizes["files with one importer"] = str(sum(1 for m in found if importers[m.name] == 1))
    sizes["imports between folders"] = str(sum(arrows(found).values()))
    sizes['docstrings that begin with "Of"'] = str(sum(1 for _, text in docstrings(everything) if re.match(r"Of\b", text.strip())))
    sizes["public dataclass fields without a docstring"] = str(sum(1 for _ in undocumented_fields(everything)))
    inner = Counter(a for (a, b), count in arrows(found).items() for _ in range(count))
    sizes |= {
        f"imports that leave {folder}/": str(inner[folder])
        for folder in ("engine", "loading", "cache", "server", "cli", "models", "tokenizer")
    }
    return sizes


def layers(edges: Iterable[tuple[str, str]]) -> list[list[str]]:
    """Folders from the lowest layer up: each is below everything that imports it, and no lower than necessary."""
    importers: dict[str, set[str]] = {}
    for above, below in edges:
        importers.setdefault(below, set()).add(above)
        importers.setdefault(above, set())
    rows: list[list[str]] = []
    placed: set[str] = set()
    while len(placed) < len(importers):
        row = sorted(room for room, above in importers.items() if room not in placed and above <= placed)
        if not row:
            raise ValueError(f"these import one another: {sorted(set(importers) - placed)}")
        rows.insert(0, row)
        placed |= set(row)
    return rows


BASE = "errors, types, config, device"
"""The files directly in mlxinfer/, drawn as one box."""
BOX = (124, 34)
GAP = (26, 44)


def picture(found: list[Module]) -> str:
    """An SVG of the layers: a box for each folder, above everything that it imports, with lines to those in the next layer."""
    folders = {module.folder for module in found} - {""}
    edges = {(a, b if b in folders else BASE) for a, b in arrows(found) if a in folders}
    rows = layers(edges)
    width = max(len(row) for row in rows) * (BOX[0] + GAP[0]) + GAP[0]
    height = len(rows) * (BOX[1] + GAP[1]) + GAP[1]
    at = {}
    for level, row in enumerate(rows):
        left = (width - len(row) * (BOX[0] + GAP[0]) + GAP[0]) / 2
        for number, room in enumerate(row):
            at[room] = (left + number * (BOX[0] + GAP[0]), height - (level + 1) * (BOX[1] + GAP[1]))
    parts = [_line(at[a], at[b]) for a, b in sorted(edges) if at[b][1] - at[a][1] == sum(BOX[1:] + GAP[1:])] + [
        _box(room, *place) for room, place in sorted(at.items())
    ]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="13">'
    return "\n".join([head, f'<rect width="{width}" height="{height}" fill="#fff"/>', *parts, "</svg>"]) + "\n"


def _line(above: tuple[float, float], below: tuple[float, float]) -> str:
    (x1, y1), (x2, y2) = above, below
    half = BOX[0] / 2
    return f'<line x1="{x1 + half:.0f}" y1="{y1 + BOX[1]:.0f}" x2="{x2 + half:.0f}" y2="{y2:.0f}" stroke="#8a94a6" stroke-width="1.2"/>'


def _box(room: str, x: float, y: float) -> str:
    label, size = (room, ' font-size="8"') if room == BASE else (f"{room}/", "")
    return (
        f'<rect x="{x:.0f}" y="{y:.0f}" width="{BOX[0]}" height="{BOX[1]}" rx="6" fill="#eef3fb" stroke="#4a6fa5"/>'
        f'<text x="{x + BOX[0] / 2:.0f}" y="{y + BOX[1] / 2 + 4:.0f}" text-anchor="middle" fill="#1d2b40"{size}>{label}</text>'
    )


@click.command()
@click.option(
    "--root", type=click.Path(path_type=Path, exists=True, file_okay=False), default=ROOT, help="Another checkout.  [default: this one]"
)
@click.option("--draw", is_flag=True, help="Write docs/layers.svg as well.")
def structure(root: Path, draw: bool) -> None:
    """Count files, lines and imports of the package, and draw its layers."""
    for name, value in measures(root).items():
        click.echo(f"{name:46}{value:>10}")
    if draw:
        PICTURE.write_text(picture(modules(root)), encoding="utf-8")
