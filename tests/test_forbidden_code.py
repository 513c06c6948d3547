"""Code that the package must not have: execution of model files, broad handlers, long commands, foreign writes to a `Sequence`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.processes.syntax import ROOT, SOURCES, all_nodes, assert_none, clear_caches, functions_of, imports_of, syntax_tree


@pytest.fixture(autouse=True, scope="module")
def _clear_caches() -> Iterator[None]:
    yield
    clear_caches()


COMMAND_LINES = 15
SEQUENCE = ROOT / "mlxinfer" / "engine" / "core" / "sequence.py"
MUTATORS = {"append", "extend", "insert", "remove", "pop", "clear", "sort", "reverse"}


def _sequence_fields() -> tuple[set[str], set[str]]:
    """(all fields of `Sequence` and of its `Times`, those of them that hold lists)."""
    classes = [node for node in syntax_tree(SEQUENCE).body if isinstance(node, ast.ClassDef) and node.name in ("Sequence", "Times")]
    fields = [node for each in classes for node in each.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)]
    names = {field.target.id for field in fields if isinstance(field.target, ast.Name)}
    lists = {field.target.id for field in fields if isinstance(field.target, ast.Name) and "list" in ast.unparse(field.annotation)}
    return names, lists


def _is_own(node: ast.expr) -> bool:
    """Whether an attribute belongs to the object whose method this is, or to a class."""
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _targets(node: ast.AST) -> Iterator[ast.expr]:
    """Everything that a statement assigns or deletes, tuples and subscripts taken apart."""
    found: list[ast.expr] = []
    if isinstance(node, (ast.Assign, ast.Delete)):
        found = list(node.targets)
    elif isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.For, ast.NamedExpr, ast.comprehension)):
        found = [node.target]
    elif isinstance(node, ast.With):
        found = [item.optional_vars for item in node.items if item.optional_vars is not None]
    while found:
        target = found.pop()
        if isinstance(target, (ast.Tuple, ast.List)):
            found += target.elts
        elif isinstance(target, (ast.Starred, ast.Subscript)):
            found.append(target.value)
        else:
            yield target


def _written_fields(tree: ast.Module, fields: set[str], lists: set[str]) -> Iterator[tuple[int, str]]:
    """(line, field) wherever a field of some object other than `self` is assigned, deleted, or changed in place."""
    for node in all_nodes(tree):
        for target in _targets(node):
            if isinstance(target, ast.Attribute) and target.attr in fields and not _is_own(target.value):
                yield target.lineno, target.attr
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name) and node.func.id in ("setattr", "delattr"):
            yield node.lineno, node.func.id
        elif isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS and isinstance(node.func.value, ast.Attribute):
            place = node.func.value
            if place.attr in lists and not _is_own(place.value):
                yield node.lineno, f"{place.attr}.{node.func.attr}"


def _handles_sequences(path: Path) -> bool:
    """Whether a module imports `Sequence` from the engine, or works on what holds sequences."""
    return path.is_relative_to(ROOT / "mlxinfer" / "engine") or "engine" in {
        n for _, d in imports_of("x", syntax_tree(path)) for n in d.split(".")
    }


def test_sequence_is_the_only_writer_of_its_fields() -> None:
    fields, lists = _sequence_fields()
    assert {"slot", "drafts", "num_computed_tokens", "first_token"} <= fields
    assert {"tokens", "samples_to_fork"} <= lists
    benchmarks = sorted((ROOT / "benchmarks").rglob("*.py"))
    paths = [path for path in [*(path for _, path in SOURCES), *benchmarks] if path != SEQUENCE and _handles_sequences(path)]
    assert len(paths) > 20
    assert_none(
        [f"{p.relative_to(ROOT)}:{line}: writes {field}" for p in paths for line, field in _written_fields(syntax_tree(p), fields, lists)]
    )


@pytest.mark.parametrize(
    "code",
    [
        "sequence.slot = 1",
        "s.num_tokens += 1",
        "s.slot, other = 1, 2",
        "del work.sequence.drafts",
        "s.tokens.append(3)",
        "s.tokens[0] = 3",
        "s.times.first_token = 0.0",
        "setattr(s, name, 1)",
        "for s.slot in range(3): pass",
        "s.drafts: list[int] = []",
    ],
)
def test_a_writer_of_a_sequence_would_be_found(code: str) -> None:
    assert list(_written_fields(ast.parse(code), *_sequence_fields()))


def _is_command(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    calls = [d.func for d in function.decorator_list if isinstance(d, ast.Call)]
    return any(isinstance(call, ast.Attribute) and call.attr == "command" for call in calls)


def test_command_bodies_parse_call_and_print() -> None:
    problems, commands = [], 0
    for module, path in SOURCES:
        for function in filter(_is_command, functions_of(syntax_tree(path))):
            commands += 1
            body = function.body[1:] if ast.get_docstring(function) else function.body
            lines = (function.end_lineno or 0) - body[0].lineno + 1
            if lines > COMMAND_LINES:
                problems.append(f"{module}.{function.name}: {lines} lines (at most {COMMAND_LINES})")
    assert commands >= 6
    assert_none(problems)


def test_nothing_waits_for_a_stream_with_the_gil() -> None:
    """`mx.clear_cache` and `mx.set_cache_limit` do, and a step with experts in a file calls Python from a stream."""
    problems = []
    for _, path in SOURCES:
        if "convert" not in path.parts and path.name != "device.py":
            calls = [node.func for node in all_nodes(syntax_tree(path)) if isinstance(node, ast.Call)]
            names = [call.attr for call in calls if isinstance(call, ast.Attribute) and ast.unparse(call.value) == "mx"]
            problems += [f"{path.relative_to(ROOT)}: mx.{name}" for name in names if name in ("clear_cache", "set_cache_limit")]
    assert_none(problems)


FORBIDDEN_MODULES = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}


def test_nothing_from_a_model_is_ever_executed() -> None:
    problems = []
    for module, path in SOURCES:
        tree, where = syntax_tree(path), path.relative_to(ROOT)
        problems += [f"{where}:{line}: {name}" for line, name in imports_of(module, tree) if name.split(".")[0] in FORBIDDEN_MODULES]
        for node in all_nodes(tree):
            if not isinstance(node, ast.Call):
                continue
            if isinstance(node.func, ast.Name) and node.func.id in FORBIDDEN_CALLS:
                problems.append(f"{where}:{node.lineno}: {node.func.id}()")
            for keyword in node.keywords:
                trusting = keyword.arg in {"allow_pickle", "trust_remote_code"}
                if trusting and not (isinstance(keyword.value, ast.Constant) and keyword.value.value is False):
                    problems.append(f"{where}:{node.lineno}: {keyword.arg}")
    assert_none(problems)


def _names(handler: ast.ExceptHandler) -> set[str]:
    nodes = [handler.type] if not isinstance(handler.type, ast.Tuple) else handler.type.elts
    return {node.id for node in nodes if isinstance(node, ast.Name)} if handler.type else {"(bare)"}


def test_no_broad_except_unless_it_raises_again() -> None:
    problems = []
    for _, path in SOURCES:
        for node in all_nodes(syntax_tree(path)):
            if not isinstance(node, ast.ExceptHandler):
                continue
            broad = _names(node) & {"Exception", "BaseException", "(bare)"}
            if broad and not any(isinstance(inner, ast.Raise) for inner in ast.walk(node)):
                problems.append(f"{path.relative_to(ROOT)}:{node.lineno}: except {broad.pop()}")
    assert_none(problems)
