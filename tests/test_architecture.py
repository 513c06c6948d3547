"""The rules of the house, read from the syntax trees: who may import whom, how long things may be, what is never done."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from benchmarks.structure import statements

ROOT = Path(__file__).parents[1]
# Globbing does not walk through the links in mlxinfer/, so the top-level folders are listed beside it.
LINKED = ("convert", "kernels_metal", "kernels_cpu")
FOLDERS = {"mlxinfer": "mlxinfer", **{name: f"mlxinfer.{name}" for name in LINKED}}

PLAIN = {"errors", "structure", "tools", "types", "config", "util", "_version"}
BELOW_MODELS = {"kernels_metal", "kernels_cpu", *PLAIN, "cache", "nn"}
BELOW_LOADING = BELOW_MODELS | {"models", "tokenizer", "sampling"}
BELOW_ENGINE = BELOW_LOADING | {"loading", "structured_output", "output_format", "interpret", "adapters"}
MAY_IMPORT: dict[str, set[str]] = {
    "kernels_metal": {"errors", "util"},
    "kernels_cpu": {"util"},
    **dict.fromkeys(PLAIN, PLAIN),
    "cache": BELOW_MODELS - {"cache", "nn"},
    "nn": BELOW_MODELS - {"nn"},
    "models": BELOW_MODELS,
    "tokenizer": BELOW_MODELS,
    "sampling": BELOW_MODELS,
    "output_format": {*PLAIN, "tokenizer"},
    "structured_output": {*PLAIN, "tokenizer", "output_format"},
    "loading": BELOW_LOADING,
    "interpret": BELOW_MODELS | {"models"},
    "adapters": BELOW_LOADING | {"loading"},
    "engine": BELOW_ENGINE,
    "evaluation": BELOW_ENGINE | {"engine"},
    "distributed": BELOW_ENGINE | {"engine"},
    "convert": BELOW_ENGINE | {"engine", "evaluation"},
    "server": BELOW_ENGINE | {"engine"},
    "notebook": BELOW_ENGINE | {"engine", "evaluation"},
    "bench": BELOW_ENGINE | {"engine"},
    "cli": BELOW_ENGINE | {"engine", "bench", "server", "notebook", "convert", "evaluation", "distributed"},
}
ROOT_MODULES = {"__init__": {*PLAIN, "engine", "notebook"}, "__main__": {"cli"}}

FILE_LINES, FUNCTION_LINES, COMMAND_LINES = 400, 60, 15
HEAVY = {"mlx", "mlx_lm", "transformers", "torch", "gguf", "tokenizers", "numpy", "huggingface_hub"}
HEAVY |= {"rich", "prompt_toolkit", "jinja2", "IPython", "asyncio", "starlette", "uvicorn", "pydantic", "prometheus_client"}


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@cache
def _nodes(tree: ast.AST) -> tuple[ast.AST, ...]:
    """Walked through once: each rule looks at all of them."""
    return tuple(ast.walk(tree))


@cache
def _statements(tree: ast.AST) -> tuple[ast.AST, ...]:
    """Those that are no expressions, which are most of them."""
    return tuple(statements(tree))


@pytest.fixture(autouse=True, scope="module")
def _nothing_stays() -> Iterator[None]:
    """A million nodes would be searched for garbage as long as the process runs."""
    yield
    for kept in (_tree, _nodes, _statements):
        kept.cache_clear()


def _sources() -> list[tuple[str, Path]]:
    """(dotted module name, file) of everything that is packaged."""
    found = []
    for folder, package in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = [package, *path.relative_to(ROOT / folder).with_suffix("").parts]
            found.append((".".join(parts), path))
    return found


SOURCES = _sources()
TESTS = [(f"tests/{path.relative_to(ROOT / 'tests')}", path) for path in sorted((ROOT / "tests").rglob("*.py"))]


def _imports(module: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of every import, at the top or in a function; for `from x import y`, `x.y`."""
    for node in _statements(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".")[: -node.level] if node.level else []
            if node.module:
                base = [*base, node.module]
            yield from ((node.lineno, ".".join([*base, alias.name])) for alias in node.names)


def _room(dotted: str) -> str | None:
    """The folder or root module of mlxinfer that a dotted name lies in; None outside mlxinfer."""
    parts = dotted.split(".")
    if parts[0] != "mlxinfer":
        return None
    return parts[1] if len(parts) > 1 else "__init__"


def _report(problems: list[str]) -> None:
    assert not problems, "\n" + "\n".join(problems)


def test_every_folder_has_a_place_in_the_order() -> None:
    rooms = {_room(module) for module, _ in SOURCES}
    assert rooms <= {*MAY_IMPORT, *ROOT_MODULES}
    assert {"cache", "nn", "models", "loading", "engine", "cli", "convert", "kernels_metal"} <= rooms


def test_imports_point_downwards() -> None:
    problems = []
    for module, path in SOURCES:
        room = _room(module)
        assert room is not None
        allowed = ROOT_MODULES.get(room) or MAY_IMPORT[room] | {room}
        for line, name in _imports(module, _tree(path)):
            target = _room(name)
            if target is None or target in allowed or target not in MAY_IMPORT:
                continue
            problems.append(f"{path.relative_to(ROOT)}:{line}: {room} may not import {target} ({name})")
    _report(problems)


def test_the_order_has_no_cycle() -> None:
    placed: set[str] = set()
    waiting = {room: needs - {room} - (PLAIN if room in PLAIN else set()) for room, needs in MAY_IMPORT.items()}
    while waiting:
        free = {room for room, needs in waiting.items() if needs <= placed}
        assert free, f"these import one another: {sorted(waiting)}"
        placed |= free
        waiting = {room: needs for room, needs in waiting.items() if room not in free}


def _who_imports(root: str) -> set[str]:
    return {module for module, path in SOURCES for _, name in _imports(module, _tree(path)) if name.split(".")[0] == root}


def test_only_the_zoo_imports_mlx_lm() -> None:
    assert _who_imports("mlx_lm") <= {"mlxinfer.models.fallback.mlx_lm"}


def test_the_scheduler_knows_no_tensors() -> None:
    tensors = {module for root in ("mlx", "numpy") for module in _who_imports(root)}
    assert "mlxinfer.engine.runner.model_runner" in tensors
    assert "mlxinfer.engine.core.scheduler" not in tensors


SEQUENCE = ROOT / "mlxinfer" / "engine" / "core" / "sequence.py"
MUTATORS = {"append", "extend", "insert", "remove", "pop", "clear", "sort", "reverse"}


def _sequence_fields() -> tuple[set[str], set[str]]:
    """(all fields of `Sequence` and of its `Times`, those of them that hold lists)."""
    classes = [node for node in _tree(SEQUENCE).body if isinstance(node, ast.ClassDef) and node.name in ("Sequence", "Times")]
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
    for node in _nodes(tree):
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
    return path.is_relative_to(ROOT / "mlxinfer" / "engine") or "engine" in {n for _, d in _imports("x", _tree(path)) for n in d.split(".")}


def test_sequence_is_the_only_writer_of_its_fields() -> None:
    fields, lists = _sequence_fields()
    assert {"slot", "drafts", "num_computed_tokens", "first_token"} <= fields
    assert {"tokens", "samples_to_fork"} <= lists
    benchmarks = sorted((ROOT / "benchmarks").rglob("*.py"))
    paths = [path for path in [*(path for _, path in SOURCES), *benchmarks] if path != SEQUENCE and _handles_sequences(path)]
    assert len(paths) > 20
    _report([f"{p.relative_to(ROOT)}:{line}: writes {field}" for p in paths for line, field in _written_fields(_tree(p), fields, lists)])


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


def test_convert_is_imported_by_the_cli_only() -> None:
    importers = {_room(m) for m, path in SOURCES for _, name in _imports(m, _tree(path)) if _room(name) == "convert"}
    assert importers <= {"convert", "cli"}


def test_linked_folders_are_imported_through_mlxinfer_only() -> None:
    problems = [
        f"{path.relative_to(ROOT)}:{line}: import mlxinfer.{name}"
        for module, path in SOURCES + TESTS
        for line, name in _imports(module, _tree(path))
        if name.split(".")[0] in LINKED
    ]
    _report(problems)


def test_imports_inside_the_package_are_relative() -> None:
    problems = []
    for _, path in SOURCES:
        for node in _nodes(_tree(path)):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            problems += [f"{path.relative_to(ROOT)}: {name}" for name in names if name.split(".")[0] == "mlxinfer"]
    _report(problems)


def _functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in _statements(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))


def _length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


@pytest.mark.parametrize("files", [SOURCES, TESTS], ids=["package", "tests"])
def test_files_and_functions_are_short(files: list[tuple[str, Path]]) -> None:
    problems = []
    for _, path in files:
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > FILE_LINES:
            problems.append(f"{path.relative_to(ROOT)}: {lines} lines (at most {FILE_LINES})")
        problems += [
            f"{path.relative_to(ROOT)}:{f.lineno}: {f.name} has {_length(f)} lines (at most {FUNCTION_LINES})"
            for f in _functions(_tree(path))
            if _length(f) > FUNCTION_LINES
        ]
    _report(problems)


def _is_command(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    calls = [d.func for d in function.decorator_list if isinstance(d, ast.Call)]
    return any(isinstance(call, ast.Attribute) and call.attr == "command" for call in calls)


def test_command_bodies_parse_call_and_print() -> None:
    problems, commands = [], 0
    for module, path in SOURCES:
        for function in filter(_is_command, _functions(_tree(path))):
            commands += 1
            body = function.body[1:] if ast.get_docstring(function) else function.body
            lines = (function.end_lineno or 0) - body[0].lineno + 1
            if lines > COMMAND_LINES:
                problems.append(f"{module}.{function.name}: {lines} lines (at most {COMMAND_LINES})")
    assert commands >= 6
    _report(problems)


FORBIDDEN_MODULES = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}


def test_nothing_from_a_model_is_ever_executed() -> None:
    problems = []
    for module, path in SOURCES:
        tree, where = _tree(path), path.relative_to(ROOT)
        problems += [f"{where}:{line}: {name}" for line, name in _imports(module, tree) if name.split(".")[0] in FORBIDDEN_MODULES]
        for node in _nodes(tree):
            if not isinstance(node, ast.Call):
                continue
            if isinstance(node.func, ast.Name) and node.func.id in FORBIDDEN_CALLS:
                problems.append(f"{where}:{node.lineno}: {node.func.id}()")
            for keyword in node.keywords:
                trusting = keyword.arg in {"allow_pickle", "trust_remote_code"}
                if trusting and not (isinstance(keyword.value, ast.Constant) and keyword.value.value is False):
                    problems.append(f"{where}:{node.lineno}: {keyword.arg}")
    _report(problems)


def _names(handler: ast.ExceptHandler) -> set[str]:
    nodes = [handler.type] if not isinstance(handler.type, ast.Tuple) else handler.type.elts
    return {node.id for node in nodes if isinstance(node, ast.Name)} if handler.type else {"(bare)"}


def test_no_broad_except_unless_it_raises_again() -> None:
    problems = []
    for _, path in SOURCES:
        for node in _nodes(_tree(path)):
            if not isinstance(node, ast.ExceptHandler):
                continue
            broad = _names(node) & {"Exception", "BaseException", "(bare)"}
            if broad and not any(isinstance(inner, ast.Raise) for inner in ast.walk(node)):
                problems.append(f"{path.relative_to(ROOT)}:{node.lineno}: except {broad.pop()}")
    _report(problems)


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["run", "--help"], ["chat", "--help"], ["serve", "--help"], ["completion", "bash"]]
)
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    script = "import sys\nfrom mlxinfer.cli import main\nmain()"
    report = "import atexit, sys\natexit.register(lambda: print('LOADED', *{m.split('.')[0] for m in sys.modules}, file=sys.stderr))\n"
    done = subprocess.run([sys.executable, "-c", report + script, *arguments], capture_output=True, text=True, check=True)
    loaded = set(done.stderr.rpartition("LOADED ")[2].split())
    assert done.stdout
    assert "click" in loaded
    assert not loaded & HEAVY
