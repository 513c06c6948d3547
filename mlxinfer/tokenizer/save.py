"""Tokenizer files as transformers and mlx-lm load them."""

from __future__ import annotations

import json
from pathlib import Path

from ..errors import TokenizerError
from .library import tokenizer_errors
from .parts import DEFAULT_TEMPLATE, TokenizerParts


def save_tokenizer(parts: TokenizerParts, directory: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json, special_tokens_map.json, and the chat templates. Raises `TokenizerError`."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 10**30,
        **parts.special_tokens,
    }
    templates = dict(parts.chat_templates)
    try:
        with tokenizer_errors("writing tokenizer.json"):
            parts.backend.save(str(directory / "tokenizer.json"))
        _write_json(directory / "tokenizer_config.json", config)
        _write_json(directory / "special_tokens_map.json", parts.special_tokens)
        default = templates.pop(DEFAULT_TEMPLATE, None)
        if default is not None:
            (directory / "chat_template.jinja").write_text(default, encoding="utf-8")
        for name, template in templates.items():
            _template_file(directory, name).write_text(template, encoding="utf-8")
    except OSError as error:
        raise TokenizerError(f"the tokenizer cannot be written to {directory}: {error}") from error


def _template_file(directory: Path, name: str) -> Path:
    """A template's name comes from the model: it must not lead elsewhere."""
    folder = directory / "additional_chat_templates"
    if not name.replace("_", "").replace("-", "").isalnum():
        raise TokenizerError(f"the chat template {name!r} has no name that can be a file's")
    folder.mkdir(exist_ok=True)
    return folder / f"{name}.jinja"


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
