"""Settings in the JSON files and templates beside a tokenizer: special tokens, BOS and ends of turns, chat templates."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from ..errors import TokenizerError
from ..util.plain_file import open_plain, read_plain
from .backend import DEFAULT_TEMPLATE, Backend, TokenizerParts

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_IdOf = Callable[[str], "int | None"]
_LARGEST_FILE = 64 << 20
_POINTER = b"version https://git-lfs.github.com/"
_DIGITS = 10
"""Longest id, in digits: Python refuses to convert texts of thousands of digits."""


class ConfigFiles:
    """The files beside a tokenizer, read. Raises `TokenizerError`."""

    def __init__(self, path: Path, defaults: Mapping[str, Any] | None = None) -> None:
        """`defaults`: keys of tokenizer_config.json that it need not have."""
        self.path = path
        self.config: dict[str, Any] = {**(defaults or {}), **_tokenizer_config(path)}
        """tokenizer_config.json, with special_tokens_map.json."""
        self.special_tokens = _special_tokens(self.config)
        """The text of each named special token ("bos_token": "<s>")."""

    def declared(self) -> dict[int, AddedToken]:
        """Tokens that the JSON files add to the vocabulary, by id."""
        decoder = self.config.get("added_tokens_decoder")
        if isinstance(decoder, Mapping):
            return dict(_declared(decoder))
        declared, special = {}, set(self.special_tokens.values())
        for text, token_id in read_json(self.path / "added_tokens.json").items():
            if type(token_id) is int and token_id >= 0 and text:
                declared[token_id] = AddedToken(text, special=text in special, normalized=text not in special)
        return declared

    def listed(self) -> Iterator[str]:
        """Special tokens that have no name."""
        for key in ("additional_special_tokens", "extra_special_tokens"):
            tokens = self.config.get(key)
            for token in tokens if isinstance(tokens, list) else ():
                text = _content(token)
                if text is not None:
                    yield text

    def parts(self, backend: Backend, vocab_size: int, id_of: _IdOf, template: str | None = None, **more: Any) -> TokenizerParts:
        """`id_of` finds a token's id by its text. `template` is the chat template where no file has one; `more` are fields of the parts."""
        model_config, generation_config = read_json(self.path / "config.json"), read_json(self.path / "generation_config.json")
        templates = self._chat_templates()
        if not templates and template is not None:
            templates = {DEFAULT_TEMPLATE: template}
        response = self.config.get("response_template")
        return TokenizerParts(
            backend,
            vocab_size,
            self._bos(id_of, model_config),
            frozenset(self._eos(id_of, (generation_config, model_config, model_config.get("text_config")))),
            self.special_tokens,
            templates,
            response if isinstance(response, Mapping) else None,
            **more,
        )

    def _bos(self, id_of: _IdOf, model_config: Mapping[str, Any]) -> int | None:
        """The id of BOS. A null in tokenizer_config.json means that there is none."""
        if "bos_token" in self.config:
            token = self.special_tokens.get("bos_token")
            return None if token is None else id_of(token)
        return next(_ids(model_config.get("bos_token_id")), None)

    def _eos(self, id_of: _IdOf, configs: tuple[Any, ...]) -> Iterator[int]:
        token = self.special_tokens.get("eos_token")
        token_id = None if token is None else id_of(token)
        if token_id is not None:
            yield token_id
        for config in configs:
            if isinstance(config, Mapping):
                yield from _ids(config.get("eos_token_id"))

    def _chat_templates(self) -> dict[str, str]:
        """Template files win over tokenizer_config.json, as in transformers."""
        path = self.path
        templates = {file.stem: _read_text(file) for file in sorted((path / "additional_chat_templates").glob("*.jinja"))}
        if (path / "chat_template.jinja").is_file():
            return {**templates, DEFAULT_TEMPLATE: _read_text(path / "chat_template.jinja")}
        for source in (read_json(path / "chat_template.json").get("chat_template"), self.config.get("chat_template")):
            if source:
                return {**templates, **_named_templates(source)}
        return templates


def _tokenizer_config(path: Path) -> dict[str, Any]:
    """tokenizer_config.json with special_tokens_map.json, which wins only over older configs that list no tokens."""
    config, named = read_json(path / "tokenizer_config.json"), read_json(path / "special_tokens_map.json")
    return {**named, **config} if "added_tokens_decoder" in config else {**config, **named}


def read_json(path: Path) -> dict[str, Any]:
    """An object in a JSON file; empty where there is no file. Raises `TokenizerError`."""
    try:
        value = json.loads(read_plain(path))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise TokenizerError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} is corrupt: it holds no JSON object")
    return value


def read_bytes(path: Path) -> bytes:
    """The contents of a tokenizer file, which is refused if no vocabulary is so large. Raises `TokenizerError`."""
    check_is_no_pointer(path)
    try:
        with open_plain(path) as file:
            contents = file.read(_LARGEST_FILE + 1)
    except OSError as error:
        raise TokenizerError(f"{path} cannot be read: {error.strerror or error}") from error
    if len(contents) > _LARGEST_FILE:
        raise TokenizerError(f"{path} is not a vocabulary: it has more than {_LARGEST_FILE >> 20} MB")
    return contents


def check_is_no_pointer(path: Path) -> None:
    """Raise `TokenizerError` for what a clone without Git LFS has in the place of a large file."""
    try:
        with open_plain(path) as file:
            pointer = file.read(len(_POINTER)) == _POINTER
    except OSError as error:
        raise TokenizerError(f"{path} cannot be read: {error.strerror or error}") from error
    if pointer:
        raise TokenizerError(f"{path} is a pointer of Git LFS, not the file: run git lfs pull, or download the file again")


def _content(token: object) -> str | None:
    """A token is written as its text, or as an object with its text and flags."""
    content = token.get("content") if isinstance(token, Mapping) else token
    return content if isinstance(content, str) and content else None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    named = {name: _content(config.get(name)) for name in _SPECIAL_NAMES}
    others = {name: _content(token) for name, token in config.items() if name.endswith("_token") and name not in named}
    extra = config.get("extra_special_tokens")
    if isinstance(extra, Mapping):
        others.update({name: _content(token) for name, token in extra.items()})
    return {name: token for name, token in {**named, **others}.items() if token is not None}


def _declared(decoder: Mapping[Any, Any]) -> Iterator[tuple[int, AddedToken]]:
    for token_id, token in decoder.items():
        text = _content(token)
        if text is not None and str(token_id).isdecimal() and len(str(token_id)) <= _DIGITS:
            flags = token if isinstance(token, Mapping) else {}
            options = {flag: bool(flags[flag]) for flag in ("special", "lstrip", "rstrip", "normalized", "single_word") if flag in flags}
            yield int(token_id), AddedToken(text, **options)


def _ids(value: object) -> Iterator[int]:
    for token_id in value if isinstance(value, list) else [value]:
        if isinstance(token_id, int) and not isinstance(token_id, bool) and token_id >= 0:
            yield token_id


def _named_templates(source: object) -> dict[str, str]:
    if isinstance(source, str):
        return {DEFAULT_TEMPLATE: source}
    if isinstance(source, list):
        source = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, Mapping)}
    templates = source if isinstance(source, Mapping) else {}
    if not templates or not all(isinstance(text, str) for item in templates.items() for text in item):
        raise TokenizerError("the chat_template of the tokenizer is neither a text nor a list of named texts")
    return dict(templates)


def _read_text(path: Path) -> str:
    try:
        return read_plain(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{path} cannot be read: {error}") from error
