"""Runs `mlxinfer` so that the first answer of a chat has to be a call. A tiny model would never ask for one by itself."""

from __future__ import annotations

import sys
from typing import Any

from mlxinfer.cli import main
from mlxinfer.engine.llm import LLM

chat_prompt, asked = LLM.chat_prompt, []


def forced(self: LLM, messages: Any, **options: Any) -> Any:
    asked.append(messages)
    if len(asked) > 1:
        return chat_prompt(self, messages)
    return chat_prompt(self, messages, **options | {"tool_choice": "add", "parallel_tool_calls": False})


if __name__ == "__main__":
    LLM.chat_prompt = forced  # type: ignore[method-assign]
    sys.argv = ["mlxinfer", *sys.argv[2:]]
    main()
