"""Finds what Metal rejects and C++ for OpenCL accepts, in the compiler's syntax tree.

Until Metal 4.0 there is practically no generic address space: user code whose type has one lacks a `device`, `constant`, `threadgroup` or
`thread`. Since Metal 4.1 (macOS 27), `this` of a member function without one is generic. Constructors of matrices take `thread` alone, so a
struct with matrices has no default constructor (github.com/ml-explore/mlx/pull/3963, github.com/pytorch/executorch/issues/22981). Metal
does not have lambdas, goto or recursion either.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_NODE = re.compile(r"^(?P<indent>[ |`-]*)(?P<kind>\w+) 0x[0-9a-f]+ (?P<rest>.*)$")
_PLACE = re.compile(r"(?:(?<=<)|(?<=, )|(?<=> ))(?:(?P<file>line|<[^<>]*>|[^<>,:]+):(?P<line>\d+):\d+|col:\d+)")
_DECLARATION = re.compile(r"^(?:ParmVar|Var|Field)Decl$")
_CAST = re.compile(r"^(?:CStyleCast|CXXStaticCast|CXXReinterpretCast|CXXFunctionalCast)Expr$")
_MATRIX = re.compile(r"^(?:\w+ )*(?:metal::)?simdgroup_(?:matrix<[^<>]*>|(?:float|half|bfloat)8x8)(?:\[[^\]]*\])*$")
"""A type that is a matrix, or an array of them."""
_ALIAS = re.compile(r"(\w+) '")
_MEMBER_TYPE = re.compile(r"^(?:.*[\s:])?(\w+)(?:\[[^\]]*\])*$")
_IMPLICIT_MEMBER = re.compile(r"^CXX(?:Constructor|Method|Destructor)Decl$")
_MISSING = {"LambdaExpr": "Metal has no lambdas", "GotoStmt": "Metal has no goto"}
_BRANCHES = " |`-"
_IMPLICIT_MEMBERS = ("CXXConstructorDecl ", "CXXMethodDecl ", "CXXDestructorDecl ")
_ALIASES = ("TypedefDecl ", "TypeAliasDecl ")
_DECLARATIONS_AND_CASTS = (
    *("ParmVarDecl ", "VarDecl ", "FieldDecl "),
    *("CStyleCastExpr ", "CXXStaticCastExpr ", "CXXReinterpretCastExpr ", "CXXFunctionalCastExpr "),
)


@dataclass(frozen=True)
class Problem:
    """A construct that Metal rejects."""

    file: str
    """Name of the user's file."""
    line: int
    """Line in it, from 1."""
    text: str
    """Description of the fault."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}"


def problems(tree: str, files: frozenset[str]) -> list[Problem]:
    """Findings in `tree`, the output of -ast-dump; `files` are the names of the user's files."""
    start = min(at for file in files if (at := tree.find(f"{file}:")) >= 0)  # earlier nodes are the prelude's
    lines = tree[tree.rfind("\n", 0, start) + 1 :].split("\n")
    return list(dict.fromkeys(_problems(lines, files))) if _may_have_problems(lines) else []


def _may_have_problems(lines: list[str]) -> bool:
    """False if `_problems` would find nothing in any file. Most trees are clean, and tracking places takes long."""
    skip = 1 << 30
    for text in lines:
        if skip < 1 << 30:
            if len(text) - len(text.lstrip(_BRANCHES)) > skip:
                continue
            skip = 1 << 30
        node = text.lstrip(_BRANCHES)
        if " implicit " in node and node.startswith(_IMPLICIT_MEMBERS):
            skip = len(text) - len(node)
        elif ("__generic" in node and node.startswith(_DECLARATIONS_AND_CASTS)) or node.startswith(tuple(_MISSING)):
            return True
        if "simdgroup_" in node and node.startswith(("FieldDecl ", *_ALIASES)):
            return True
    return False


def _problems(lines: list[str], files: frozenset[str]) -> Iterator[Problem]:
    file, line, skip = "", 0, 1 << 30
    aliases: set[str] = set()
    for text in lines:
        node = _NODE.match(text)
        if not node:
            continue
        rest, depth, kind = node["rest"], len(node["indent"]), node["kind"]
        own_file, own_line, file, line = _places(rest, file, line)
        if depth > skip:
            continue
        skip = 1 << 30
        if _IMPLICIT_MEMBER.match(kind) and " implicit " in rest:
            skip = depth
        elif own_file in files:
            yield from _of_node(kind, rest, own_file, own_line)
            yield from _of_matrices(kind, rest, aliases, own_file, own_line)


def _places(rest: str, file: str, line: int) -> tuple[str, int, str, int]:
    """Start of a node, and the last place named. A dump names a file or line only if it differs from the last one."""
    own = None
    for match in _PLACE.finditer(rest.split("'", 1)[0]):
        if match["file"]:
            line = int(match["line"])
            file = file if match["file"] == "line" else match["file"]
        own = own or (file, line)
    return (*(own or (file, line)), file, line)


def _of_node(kind: str, rest: str, file: str, line: int) -> Iterator[Problem]:
    if kind in _MISSING:
        yield Problem(file, line, _MISSING[kind])
    types = re.findall(r"'([^']*)'", rest)
    if not types or "__generic" not in types[0]:
        return
    if _DECLARATION.match(kind):
        name = re.search(r"(\w+) '", rest)
        yield Problem(file, line, f"{name[1] if name else 'a pointer'} needs device, constant, threadgroup or thread")
    elif _CAST.match(kind):
        yield Problem(file, line, f"a cast to {types[0].replace('__generic ', '')} needs device, constant, threadgroup or thread")


def _of_matrices(kind: str, rest: str, aliases: set[str], file: str, line: int) -> Iterator[Problem]:
    """Find members that are matrices. Adds other names of their types to `aliases`."""
    types = re.findall(r"'([^']*)'", rest)
    if f"{kind} " in _ALIASES and any(map(_MATRIX.match, types)):
        name = _ALIAS.search(rest)
        aliases.update([name[1]] if name else [])
    elif kind == "FieldDecl":
        names = (_MEMBER_TYPE.match(found) for found in types)
        if any(map(_MATRIX.match, types)) or any(name and name[1] in aliases for name in names):
            yield Problem(file, line, "a struct with a matrix has no default constructor in Metal 4.1: keep matrices in local arrays")
