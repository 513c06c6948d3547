"""Reads and writes the tokenizer of a Hugging Face or MLX model directory."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from ..errors import TokenizerError
from .backend import DEFAULT_TEMPLATE, TokenizerParts, TokenizersBackend, tokenizer_errors
from .config_files import ConfigFiles, check_is_no_pointer, unreadable
from .sentencepiece_library import read_sentencepiece_model


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
    """Return the path of a chat template. The name comes from the model and must not leave the directory."""
    folder = directory / "additional_chat_templates"
    if not name.replace("_", "").replace("-", "").isalnum():
        raise TokenizerError(f"the chat template {name!r} has a name that cannot be a file name")
    folder.mkdir(exist_ok=True)
    return folder / f"{name}.jinja"


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def read_directory(path: Path) -> TokenizerParts:
    """Read the first of `tokenizer.json`, a SentencePiece `tokenizer.model`, `tekken.json` and tiktoken's ranks, with its JSON files.

    Raises `TokenizerError`.
    """
    if (path / "tokenizer.json").is_file():
        return _read_tokenizer_json(path)
    for name in ("tokenizer.model", "spiece.model"):
        if (path / name).is_file():
            return _read_sentencepiece(path, name)
    if (path / "tekken.json").is_file():
        from .tekken import read_tekken  # lazy: few models need it

        return read_tekken(path)
    from .tiktoken_files import find_ranks, read_tiktoken

    if (ranks := find_ranks(path)) is not None:
        return read_tiktoken(ranks)
    raise unreadable(path)


def _read_tokenizer_json(path: Path) -> TokenizerParts:
    files = ConfigFiles(path)
    check_is_no_pointer(path / "tokenizer.json")
    with tokenizer_errors(f"reading {path / 'tokenizer.json'}"):
        tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        _add_missing_tokens(tokenizer, files)
    size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    return files.parts(TokenizersBackend(tokenizer), size, tokenizer.token_to_id)


def _read_sentencepiece(path: Path, name: str) -> TokenizerParts:
    files = ConfigFiles(path)
    backend, model = read_sentencepiece_model(path / name, files.config, files.declared())
    return files.parts(backend, len(model.vocabulary.tokens), model.vocabulary.index().get)


def _add_missing_tokens(backend: Tokenizer, files: ConfigFiles) -> None:
    """Add the tokens that only the other files have, and make the named ones special, as transformers does."""
    added = backend.get_added_tokens_decoder().values()
    present, present_special = {token.content for token in added}, {token.content for token in added if token.special}
    declared = files.declared()
    backend.add_tokens([declared[token_id] for token_id in sorted(declared) if declared[token_id].content not in present])
    missing = dict.fromkeys(token for token in [*files.special_tokens.values(), *files.listed()] if token not in present_special)
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in missing])
