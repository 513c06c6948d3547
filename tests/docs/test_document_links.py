"""Links lead somewhere, commands and options exist, and Python snippets use what there is."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
import shlex
from pathlib import Path

import click
import pytest
from support.processes.documents import PAGES, ROOT, anchors, blocks, commands, links

from benchmarks.__main__ import main as benchmarks
from mlxinfer import LLM, AsyncLLM, SamplingParams
from mlxinfer.cli import cli
from mlxinfer.cli.common.options import complete_model
from mlxinfer.engine.request_keywords import ChatRequestKeywords
from mlxinfer.loading.find.known import find_known
from mlxinfer.loading.find.resolve import ALIASES

LAZY = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | ast.PyCF_ONLY_AST


def by_name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_links_lead_somewhere(page):
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), link


def _parse(command: str) -> list[str]:
    """Parse a command of the documents and return its model arguments. Files need not exist.

    Raises `click.UsageError` for an option or command that does not exist.
    """
    words = shlex.split(re.split(r" (?:[|&<>]|&&|2>) ?", command.replace('"$(', '"'), maxsplit=1)[0])
    while "=" in words[0]:
        words = words[1:]
    if words[-1].endswith("&"):
        words.pop()
    found: click.Command = cli
    path, rest = "mlxinfer", [word for word in words[1:] if word != "..."]
    context = click.Context(cli, info_name=path)
    while isinstance(found, click.Group) and rest and not rest[0].startswith("-"):
        _, command_, rest = found.resolve_command(context, rest)
        assert command_ is not None
        found, context = command_, click.Context(command_, context, info_name=command_.name)
    if "--" in rest:
        rest = rest[: rest.index("--")]
    try:
        given = found.make_parser(context).parse_args(list(rest))[0]
    except click.BadOptionUsage:
        if not rest[-1].startswith("--"):  # in a text, an option may stand without its value
            raise
        return []
    asked = [given.get(parameter.name) for parameter in found.params if parameter._custom_shell_complete is complete_model]
    return [name for each in asked for name in (each if isinstance(each, (list, tuple)) else [each]) if isinstance(name, str)]


def _is_a_model(name: str) -> bool:
    """Return True for a path, an alias, a name of the catalogue or a hub id, and for placeholders: MODEL, A, YOUR_MODEL."""
    name = name.rpartition("=")[2]
    hub_id = re.fullmatch(r"[\w.-]+/[\w.-]+(/[\w./-]+\.gguf)?(@[\w.-]+)?", name)
    path = name == "." or name.startswith(("./", "../", "~/", "/", "$")) or name.endswith((".gguf", "/"))
    return bool(hub_id or path or name in ALIASES or find_known(name) or re.fullmatch(r"[A-Z][A-Z_0-9]*", name))


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_commands_exist(page):
    for place, command in commands(page, "mlxinfer"):
        if re.search(r"\{|\w\|\w", command):
            continue  # alternatives, not a command
        try:
            for name in _parse(command):
                if " " in name:
                    continue  # the prompt of `run` without a model
                assert _is_a_model(name), f"{place}: {command}: {name!r} is no path, alias or hub id: use one, or MODEL"
        except (click.UsageError, ValueError) as error:
            pytest.fail(f"{place}: {command}: {error}")


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_targets_of_make_exist(page):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for place, command in commands(page, "make"):
        words = [word for word in shlex.split(command)[1:] if "=" not in word and not word.startswith("-")]
        assert set(words) <= targets, f"{place}: {command}"


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_modules_that_are_run_exist(page):
    for place, command in commands(page, "python"):
        module = re.search(r" -m ([\w.]+)", command)
        if module and module[1].partition(".")[0] in ("mlxinfer", "benchmarks"):
            assert importlib.util.find_spec(module[1]), f"{place}: {command}"
        study = re.search(r" -m benchmarks ([\w-]+)", command)
        assert not study or study[1] in benchmarks.commands, f"{place}: {command}"


NAMED = re.compile(r"`([\w./-]+\.(?:py|cpp|metal))`(?!\s+of\s+commit)")
"""Files in a document. Those "of commit ..." were removed later, and NAME.py stands for any name."""


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_files_that_are_named_exist(page, source_files):
    named = [name for name in NAMED.findall(page.read_text(encoding="utf-8")) if not re.search("[A-Z]{4}", name)]
    assert [name for name in named if f"/{name}" not in source_files] == []


@pytest.fixture(scope="module")
def source_files() -> set[str]:
    """Every end of the path of a source file, with a slash before it."""
    folders = ("mlxinfer", "convert", "kernels_cpu", "kernels_metal", "benchmarks", "tests", "examples", "docs", "packaging")
    files = [ROOT / "setup.py", *(path for folder in folders for path in (ROOT / folder).rglob("*.*"))]
    ends = set()
    for path in files:
        parts = path.relative_to(ROOT).parts
        ends |= {"/" + "/".join(parts[first:]) for first in range(len(parts))}
    return ends


KNOWN = {"LLM": set(inspect.signature(LLM).parameters), "AsyncLLM": set(inspect.signature(LLM).parameters)}
KNOWN["SamplingParams"] = set(inspect.signature(SamplingParams).parameters)


def _check_calls(tree: ast.AST) -> None:
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        given = {keyword.arg for keyword in call.keywords if keyword.arg}
        if isinstance(call.func, ast.Name) and call.func.id in KNOWN:
            assert given <= KNOWN[call.func.id], ast.unparse(call)
            name = call.args[0] if call.args and "LLM" in call.func.id else None
            assert not isinstance(name, ast.Constant) or _is_a_model(name.value), ast.unparse(call)
        if isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name) and call.func.value.id == "llm":
            method = getattr(LLM, call.func.attr, None) or getattr(AsyncLLM, call.func.attr)
            assert given <= set(inspect.signature(method).parameters) | set(ChatRequestKeywords.__annotations__), ast.unparse(call)


def _check_imports(tree: ast.AST) -> None:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "mlxinfer" and not node.level:
            module = importlib.import_module(node.module or "")
            for alias in node.names:
                assert hasattr(module, alias.name) or importlib.util.find_spec(f"{node.module}.{alias.name}"), ast.unparse(node)


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_python_uses_what_there_is(page):
    for block in blocks(page):
        if block.kind not in ("python", "py"):
            continue
        try:
            tree = compile(block.text, block.name, "exec", flags=LAZY)
        except SyntaxError as error:
            pytest.fail(f"{block.name}: {error}")
        assert isinstance(tree, ast.Module)
        _check_imports(tree)
        _check_calls(tree)


def test_the_site_lists_every_page():
    listed = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for page in ROOT.glob("docs/**/*.md"):
        assert str(page.relative_to(ROOT / "docs")) in listed
    for notebook in ROOT.glob("notebooks/*.ipynb"):
        assert f"notebooks/{notebook.stem}.md" in listed


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("**/*.py")), ids=by_name)
def test_examples_use_what_there_is(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    _check_imports(tree)
    _check_calls(tree)


def test_a_name_that_nothing_resolves_is_found():
    assert _parse("mlxinfer run llama-3.1-8b hi --draft small") == ["llama-3.1-8b", "small"]
    assert _parse("mlxinfer eval compare A smollm2 --teacher T") == ["A", "smollm2", "T"]
    for name in ("llama-3.1-8b", "qwen33", "Model", ""):
        assert not _is_a_model(name), name
    for name in ("smollm2", "MODEL", "Qwen/Qwen3-4B", "org/name@main", "./here", "x.gguf", "chat=~/models/a", "org/name/file.gguf"):
        assert _is_a_model(name), name
