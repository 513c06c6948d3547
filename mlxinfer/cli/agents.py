"""Coding agents that work with a served model: the environment, arguments and configuration file of each.

`AGENTS` is the whole table; another agent needs one line and one function.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

NO_KEY = "local"
"""Placeholder for agents that require a key, if the server does not."""
KEY_VARIABLE = "MLXINFER_API_KEY"


@dataclass(frozen=True, slots=True)
class Served:
    """A model of a running server."""

    url: str
    """Server's address without a path."""
    model: str
    """Public name of the model."""
    context: int
    """Context in tokens."""
    key: str = NO_KEY
    """API key of the server."""

    @property
    def openai(self) -> str:
        """Base URL of OpenAI's API."""
        return f"{self.url}/v1"


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """Settings of an agent."""

    environment: dict[str, str] = field(default_factory=dict)
    arguments: list[str] = field(default_factory=list)
    """Arguments to add, before the user's own."""
    file: str = ""
    """Contents of a configuration file at `Agent.file`, without a key; "" for an agent without one."""


@dataclass(frozen=True, slots=True)
class Agent:
    """A coding agent."""

    program: str
    what: str
    install: str
    settings: Callable[[Served], AgentSettings]
    file: Path | None = None
    """Path of a new configuration file, below the home directory or in the working directory."""
    hint: str = ""
    """Command that uses the file."""


def _codex(served: Served) -> AgentSettings:
    provider = {"name": "mlxinfer", "base_url": served.openai, "wire_api": "responses"}
    if served.key != NO_KEY:
        provider["env_key"] = KEY_VARIABLE
    top: dict[str, str | int] = {"model": served.model, "model_provider": "mlxinfer", "model_context_window": served.context}
    # Strings and numbers of JSON are valid TOML.
    lines = [f"{name} = {json.dumps(value)}" for name, value in top.items()]
    lines += ["", "[model_providers.mlxinfer]", *(f"{name} = {json.dumps(value)}" for name, value in provider.items())]
    given = {**top, **{f"model_providers.mlxinfer.{name}": value for name, value in provider.items()}}
    arguments = [part for name, value in given.items() for part in ("-c", f"{name}={json.dumps(value)}")]
    return AgentSettings({KEY_VARIABLE: served.key} if served.key != NO_KEY else {}, arguments, "\n".join(lines) + "\n")


def _claude(served: Served) -> AgentSettings:
    models = ("ANTHROPIC_MODEL", *(f"ANTHROPIC_DEFAULT_{size}_MODEL" for size in ("OPUS", "SONNET", "HAIKU")), "CLAUDE_CODE_SUBAGENT_MODEL")
    told = {
        "ANTHROPIC_BASE_URL": served.url,
        "ANTHROPIC_API_KEY": "",  # the user's key is not for this server
        **dict.fromkeys(models, served.model),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",  # it changes the start of every prompt, which prevents any reuse
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(served.context),
        "API_TIMEOUT_MS": "3600000",
    }
    environment = {**told, "ANTHROPIC_AUTH_TOKEN": served.key}
    return AgentSettings(environment, [], json.dumps({"env": told}, indent=2) + "\n")


def _opencode(served: Served) -> AgentSettings:
    limit = {"context": served.context, "output": served.context // 4}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "mlxinfer",
        "options": {"baseURL": served.openai, "apiKey": f"{{env:{KEY_VARIABLE}}}"},
        "models": {served.model: {"name": served.model, "limit": limit}},
    }
    config = {"$schema": "https://opencode.ai/config.json", "provider": {"mlxinfer": provider}, "model": f"mlxinfer/{served.model}"}
    environment = {"OPENCODE_CONFIG_CONTENT": json.dumps(config), KEY_VARIABLE: served.key}
    return AgentSettings(environment, [], json.dumps(config, indent=2) + "\n")


def _aider(served: Served) -> AgentSettings:
    told = {"model": f"openai/{served.model}", "openai-api-base": served.openai}
    arguments = [part for name, value in told.items() for part in (f"--{name}", value)]
    file = "".join(f"{name}: {json.dumps(value)}\n" for name, value in {**told, "show-model-warnings": False}.items())
    return AgentSettings({"OPENAI_API_KEY": served.key}, [*arguments, "--no-show-model-warnings"], file)


def _vibe(served: Served) -> AgentSettings:
    provider = {"name": "mlxinfer", "api_base": served.openai, "api_key_env_var": KEY_VARIABLE, "api_style": "openai", "backend": "generic"}
    model = {"name": served.model, "provider": "mlxinfer", "alias": "mlxinfer"}
    environment = {"VIBE_ACTIVE_MODEL": "mlxinfer", "VIBE_PROVIDERS": json.dumps([provider]), "VIBE_MODELS": json.dumps([model])}
    lines = ['active_model = "mlxinfer"']
    for name, table in (("providers", provider), ("models", model)):
        lines += ["", f"[[{name}]]", *(f"{key} = {json.dumps(value)}" for key, value in table.items())]
    return AgentSettings({**environment, KEY_VARIABLE: served.key}, [], "\n".join(lines) + "\n")


def _openai_variables(served: Served) -> dict[str, str]:
    return {"OPENAI_BASE_URL": served.openai, "OPENAI_API_KEY": served.key}


def _gptme(served: Served) -> AgentSettings:
    return AgentSettings(_openai_variables(served), ["--model", f"local/{served.model}"])


def _qwen(served: Served) -> AgentSettings:
    return AgentSettings({**_openai_variables(served), "OPENAI_MODEL": served.model}, ["--auth-type", "openai"])


def _goose(served: Served) -> AgentSettings:
    told = {"GOOSE_PROVIDER": "openai", "GOOSE_MODEL": served.model, "OPENAI_HOST": served.url, "OPENAI_BASE_PATH": "v1/chat/completions"}
    return AgentSettings({**told, "OPENAI_API_KEY": served.key})


AGENTS: dict[str, Agent] = {
    "codex": Agent("codex", "OpenAI's Codex CLI", "npm install -g @openai/codex", _codex,
                   Path("~/.codex/mlxinfer.config.toml"), "codex -p mlxinfer"),
    "claude": Agent("claude", "Anthropic's Claude Code", "npm install -g @anthropic-ai/claude-code", _claude,
                    Path("~/.claude/mlxinfer.json"), "ANTHROPIC_AUTH_TOKEN=local claude --settings ~/.claude/mlxinfer.json"),
    "opencode": Agent("opencode", "opencode", "npm install -g opencode-ai", _opencode,
                      Path("opencode.json"), "opencode, in this directory"),
    "aider": Agent("aider", "aider", "pip install aider-chat", _aider, Path(".aider.conf.yml"), "aider, in this directory"),
    "vibe": Agent("vibe", "Mistral's Vibe", "pip install mistral-vibe", _vibe, Path(".vibe/config.toml"), "vibe, in this directory"),
    "gptme": Agent("gptme", "gptme", "pip install gptme", _gptme),
    "qwen": Agent("qwen", "Qwen Code", "npm install -g @qwen-code/qwen-code", _qwen),
    "goose": Agent("goose", "goose", "https://block.github.io/goose", _goose),
}  # fmt: skip
"""Agents by their names in `mlxinfer launch`."""
