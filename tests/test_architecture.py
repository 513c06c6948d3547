"""Rules of the code base, checked on its syntax trees: import directions, sizes, and calls that are forbidden."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.processes.syntax import (
    LINKED,
    ROOT,
    SOURCES,
    TESTS,
    all_nodes,
    assert_none,
    clear_caches,
    functions_of,
    imports_of,
    layer_of,
    syntax_tree,
)


@pytest.fixture(autouse=True, scope="module")
def _clear_caches() -> Iterator[None]:
    yield
    clear_caches()


PLAIN = {"errors", "structure", "tools", "types", "config", "util", "_version"}
BELOW_MODELS = {"kernels_metal", "kernels_cpu", "expert_offload", *PLAIN, "cache", "nn"}
BELOW_LOADING = BELOW_MODELS | {"models", "tokenizer", "sampling", "vision"}
BELOW_ENGINE = BELOW_LOADING | {"loading", "structured_output", "output_format", "interpret", "adapters"}
MAY_IMPORT: dict[str, set[str]] = {
    "kernels_metal": {"errors", "util"},
    "kernels_cpu": {"util"},
    "expert_offload": PLAIN,
    **dict.fromkeys(PLAIN, PLAIN),
    "cache": BELOW_MODELS - {"cache", "nn"},
    "nn": BELOW_MODELS - {"nn"},
    "models": BELOW_MODELS,
    "tokenizer": BELOW_MODELS,
    "vision": {*PLAIN, "tokenizer"},
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

FILE_LINES, FUNCTION_LINES, FOLDER_ENTRIES, SMALL_LINES = 500, 60, 20, 80
HEAVY = {"mlx", "mlx_lm", "transformers", "torch", "gguf", "tokenizers", "numpy", "huggingface_hub", "PIL"}
HEAVY |= {"rich", "prompt_toolkit", "jinja2", "IPython", "asyncio", "starlette", "uvicorn", "pydantic", "prometheus_client"}


def test_every_folder_has_a_place_in_the_order() -> None:
    rooms = {layer_of(module) for module, _ in SOURCES}
    assert rooms <= {*MAY_IMPORT, *ROOT_MODULES}
    assert {"cache", "nn", "models", "loading", "engine", "cli", "convert", "kernels_metal"} <= rooms


def test_imports_point_downwards() -> None:
    problems = []
    for module, path in SOURCES:
        room = layer_of(module)
        assert room is not None
        allowed = ROOT_MODULES.get(room) or MAY_IMPORT[room] | {room}
        for line, name in imports_of(module, syntax_tree(path)):
            target = layer_of(name)
            if target is None or target in allowed or target not in MAY_IMPORT:
                continue
            problems.append(f"{path.relative_to(ROOT)}:{line}: {room} may not import {target} ({name})")
    assert_none(problems)


def test_the_order_has_no_cycle() -> None:
    placed: set[str] = set()
    waiting = {room: needs - {room} - (PLAIN if room in PLAIN else set()) for room, needs in MAY_IMPORT.items()}
    while waiting:
        free = {room for room, needs in waiting.items() if needs <= placed}
        assert free, f"these import one another: {sorted(waiting)}"
        placed |= free
        waiting = {room: needs for room, needs in waiting.items() if room not in free}


COMPILED = "mlxinfer.kernels_cpu._native"
"""A module without Python source, which imports nothing of the package."""


def _module_imports() -> dict[str, set[str]]:
    """Modules of the package that each module imports, at the top or in a function; packages by their own name."""
    names = {COMPILED, *(module.removesuffix(".__init__") for module, _ in SOURCES)}
    found: dict[str, set[str]] = {name: set() for name in names}
    for module, path in SOURCES:
        own = module.removesuffix(".__init__")
        for _, name in imports_of(module, syntax_tree(path)):
            target = name if name in names else name.rpartition(".")[0]
            if target in names and target != own:
                found[own].add(target)
    return found


def _circles(imports: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import one another: strongly connected components (Tarjan, 1972)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    path: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        order[name] = low[name] = len(order)
        path.append(name)
        for target in imports[name]:
            if target not in order:
                visit(target)
            if target in path:
                low[name] = min(low[name], low[target])
        if low[name] == order[name]:
            group = path[path.index(name) :]
            del path[path.index(name) :]
            if len(group) > 1:
                found.append(sorted(group))

    for name in sorted(imports):
        if name not in order:
            visit(name)
    return found


def test_modules_import_one_another_in_one_direction() -> None:
    assert_none([" <-> ".join(group) for group in _circles(_module_imports())])


def test_a_circle_would_be_found() -> None:
    assert _circles({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set(), "e": {"a"}}) == [["a", "b", "c"]]


def _top_level_imports() -> dict[str, set[str]]:
    """Importers of each module, without those that import it inside a function to keep a heavy import lazy."""
    names = {module.removesuffix(".__init__") for module, _ in SOURCES}
    found: dict[str, set[str]] = {name: set() for name in names}
    for module, path in SOURCES:
        top = ast.Module([node for node in syntax_tree(path).body if isinstance(node, (ast.Import, ast.ImportFrom))], [])
        for _, name in imports_of(module, top):
            target = name if name in names else name.rpartition(".")[0]
            if target in names:
                found[target].add(module.removesuffix(".__init__"))
    return found


def test_small_files_have_more_than_one_importer() -> None:
    """Kernel folders and families are exempt: a launcher, its reference and a family are looked up by place."""
    importers: dict[str, set[str]] = {}
    for module, targets in _module_imports().items():
        for target in targets:
            importers.setdefault(target, set()).add(module)
    top = _top_level_imports()
    problems = []
    for module, path in SOURCES:
        lines = len(path.read_text(encoding="utf-8").splitlines())
        exempt = layer_of(module) in ("kernels_metal", "kernels_cpu") or ".families." in module or path.name == "__init__.py"
        if lines < SMALL_LINES and not exempt and len(importers.get(module, ())) == 1 and importers[module] == top[module]:
            problems.append(f"{path.relative_to(ROOT)}: {lines} lines, imported by {importers[module].pop()} only: move them there")
    assert_none(problems)


def _folders() -> Iterator[Path]:
    """Folders with Python files. The roots of the package and of its tests list the layers and are exempt."""
    roots = [ROOT / name for name in ("mlxinfer", "tests", "benchmarks", *LINKED)]
    found = {path.parent for root in roots for path in root.rglob("*.py") if not any(part.startswith(".") for part in path.parts)}
    yield from sorted(found - {ROOT / "mlxinfer", ROOT / "tests"})


def test_folders_have_few_entries() -> None:
    problems = []
    for folder in _folders():
        # Built extensions and caches are not part of the source.
        entries = [path for path in folder.iterdir() if not path.name.startswith(("__pycache__", "_native", "."))]
        if len(entries) > FOLDER_ENTRIES:
            problems.append(f"{folder.relative_to(ROOT)}: {len(entries)} entries (at most {FOLDER_ENTRIES})")
    assert_none(problems)


def _who_imports(root: str) -> set[str]:
    return {module for module, path in SOURCES for _, name in imports_of(module, syntax_tree(path)) if name.split(".")[0] == root}


def test_only_the_zoo_imports_mlx_lm() -> None:
    assert _who_imports("mlx_lm") <= {"mlxinfer.models.fallback.mlx_lm"}


def test_the_scheduler_knows_no_tensors() -> None:
    tensors = {module for root in ("mlx", "numpy") for module in _who_imports(root)}
    assert "mlxinfer.engine.runner.model_runner" in tensors
    assert "mlxinfer.engine.core.scheduler" not in tensors


def test_convert_is_imported_by_the_cli_only() -> None:
    importers = {layer_of(m) for m, path in SOURCES for _, name in imports_of(m, syntax_tree(path)) if layer_of(name) == "convert"}
    assert importers <= {"convert", "cli"}


def test_linked_folders_are_imported_through_mlxinfer_only() -> None:
    problems = [
        f"{path.relative_to(ROOT)}:{line}: import mlxinfer.{name}"
        for module, path in SOURCES + TESTS
        for line, name in imports_of(module, syntax_tree(path))
        if name.split(".")[0] in LINKED
    ]
    assert_none(problems)


def test_imports_inside_the_package_are_relative() -> None:
    problems = []
    for _, path in SOURCES:
        for node in all_nodes(syntax_tree(path)):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            problems += [f"{path.relative_to(ROOT)}: {name}" for name in names if name.split(".")[0] == "mlxinfer"]
    assert_none(problems)


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
            for f in functions_of(syntax_tree(path))
            if _length(f) > FUNCTION_LINES
        ]
    assert_none(problems)


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
