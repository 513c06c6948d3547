"""The user's functions as tools: each call is shown and runs only with the user's consent."""

from __future__ import annotations

import importlib.util
import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...errors import MLXInferError, PromptError, one_line
from ...tools import Tools, offered
from ...types import ToolCall
from ..common.console import fitted, printable, tell

_LONGEST_SHOWN = 2000


def tools_of_file(path: Path) -> Tools:
    """Run a Python file and return its public annotated functions. Raises `PromptError`."""
    spec = importlib.util.spec_from_file_location("mlxinfer_chat_tools", path)
    if spec is None or spec.loader is None:
        raise PromptError(f"--tools {path}: it is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise PromptError(f"--tools {path}: {type(error).__name__}: {one_line(error)}") from error
    found = offered([value for name, value in vars(module).items() if not name.startswith("_") and _is_tool(value, spec.name)])
    if not found:
        raise PromptError(f"--tools {path}: it defines no function with annotated parameters, such as def add(a: int, b: int) -> int")
    return found


def _is_tool(value: Any, module: str) -> bool:
    """Return True for an annotated function defined in the module."""
    if not inspect.isfunction(value) or value.__module__ != module:
        return False
    parameters = inspect.signature(value).parameters
    return bool(value.__annotations__) and all(name in value.__annotations__ for name in parameters)


class ToolRunner:
    """Runs tool calls that the user accepts."""

    def __init__(self, tools: Tools, ask: Callable[[str], str] = input) -> None:
        """Create a runner; `ask` shows a question and returns the user's input."""
        self.tools = tools
        self._ask = ask
        self._always: set[str] = set()

    def result(self, call: ToolCall) -> str:
        """Return the text of a call's result: the function's result, its error, or a refusal by the user."""
        shown = fitted(f"{call.name}({_arguments(call)})", sys.stderr)
        tell(f"the model asks for {shown}")
        if not self._agrees(call.name):
            tell("declined")
            return "The user declined this call."
        try:
            text = self.tools[call.name].run(call.arguments)
        except MLXInferError as error:
            tell(str(error), problem=True)
            return f"Error: {error}"
        tell(printable(text[:_LONGEST_SHOWN]))
        return text

    def _agrees(self, name: str) -> bool:
        """Ask the user; Ctrl-C and Ctrl-D decline."""
        if name in self._always:
            return True
        while True:
            try:
                answer = self._ask("run it? [y]es, [n]o, [a]lways for this tool: ").strip().lower()
            except (KeyboardInterrupt, EOFError):
                tell("")
                return False
            if answer in ("a", "always"):
                self._always.add(name)
            if answer in ("y", "yes", "a", "always"):
                return True
            if answer in ("n", "no"):
                return False


def _arguments(call: ToolCall) -> str:
    """Return the arguments in Python syntax, printable."""
    try:
        values = json.loads(call.arguments)
    except ValueError:
        return printable(call.arguments)
    return printable(", ".join(f"{key}={value!r}" for key, value in values.items()))
