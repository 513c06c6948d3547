"""Syntax trees of the package and its tests, for rules that a program can check."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from benchmarks.structure import statements as non_expressions

ROOT = Path(__file__).parents[3]
# Globbing does not walk through the links in mlxinfer/, so the top-level folders are listed beside it.
LINKED = ("convert", "kernels_metal", "kernels_cpu")
FOLDERS = {"mlxinfer": "mlxinfer", **{name: f"mlxinfer.{name}" for name in LINKED}}


@cache
def syntax_tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@cache
def all_nodes(tree: ast.AST) -> tuple[ast.AST, ...]:
    """All nodes of a tree, cached because each rule visits them."""
    return tuple(ast.walk(tree))


@cache
def all_statements(tree: ast.AST) -> tuple[ast.AST, ...]:
    """Nodes of a tree that are not expressions."""
    return tuple(non_expressions(tree))


def package_sources() -> list[tuple[str, Path]]:
    """(dotted module name, file) of everything that is packaged."""
    found = []
    for folder, package in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = [package, *path.relative_to(ROOT / folder).with_suffix("").parts]
            found.append((".".join(parts), path))
    return found


SOURCES = package_sources()
TESTS = [(f"tests/{path.relative_to(ROOT / 'tests')}", path) for path in sorted((ROOT / "tests").rglob("*.py"))]


def imports_of(module: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of every import, at the top or in a function; for `from x import y`, `x.y`."""
    for node in all_statements(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".")[: -node.level] if node.level else []
            if node.module:
                base = [*base, node.module]
            yield from ((node.lineno, ".".join([*base, alias.name])) for alias in node.names)


def layer_of(dotted: str) -> str | None:
    """The folder or root module of mlxinfer that a dotted name lies in; None outside mlxinfer."""
    parts = dotted.split(".")
    if parts[0] != "mlxinfer":
        return None
    return parts[1] if len(parts) > 1 else "__init__"


def assert_none(problems: list[str]) -> None:
    assert not problems, "\n" + "\n".join(problems)


def functions_of(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in all_statements(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))


def clear_caches() -> None:
    """Drop the cached trees: the garbage collector would visit a million nodes for the rest of the process."""
    for cached in (syntax_tree, all_nodes, all_statements):
        cached.cache_clear()
