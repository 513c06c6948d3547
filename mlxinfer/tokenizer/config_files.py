"""Reads the JSON files and templates of a tokenizer: special tokens, BOS, EOS and chat templates."""

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
"""Maximum digits of an id; Python refuses to convert thousands of digits."""


class ConfigFiles:
    """Contents of the files beside a tokenizer. Raises `TokenizerError`."""

    def __init__(self, path: Path, defaults: Mapping[str, Any] | None = None) -> None:
        """Read the files of directory `path`; `defaults` are values for missing keys of tokenizer_config.json."""
        self.path = path
        self.config: dict[str, Any] = {**(defaults or {}), **_tokenizer_config(path)}
        """tokenizer_config.json merged with special_tokens_map.json."""
        self.special_tokens = _special_tokens(self.config)
        """Text of each named special token, for example {"bos_token": "<s>"}."""

    def declared(self) -> dict[int, AddedToken]:
        """Return the tokens that the JSON files add to the vocabulary, by id."""
        decoder = self.config.get("added_tokens_decoder")
        if isinstance(decoder, Mapping):
            return dict(_declared(decoder))
        declared, special = {}, set(self.special_tokens.values())
        for text, token_id in read_json(self.path / "added_tokens.json").items():
            if type(token_id) is int and token_id >= 0 and text:
                declared[token_id] = AddedToken(text, special=text in special, normalized=text not in special)
        return declared

    def listed(self) -> Iterator[str]:
        """Yield special tokens without a name."""
        for key in ("additional_special_tokens", "extra_special_tokens"):
            tokens = self.config.get(key)
            for token in tokens if isinstance(tokens, list) else ():
                text = _content(token)
                if text is not None:
                    yield text

    def parts(self, backend: Backend, vocab_size: int, id_of: _IdOf, template: str | None = None, **more: Any) -> TokenizerParts:
        """Return the parts. `id_of` maps a token to its id. `template` is the default chat template; `more` are further fields."""
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
        """Return the id of BOS; a null in tokenizer_config.json means no BOS."""
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
        """Return the templates by name. Files override tokenizer_config.json, as in transformers."""
        path = self.path
        templates = {file.stem: _read_text(file) for file in sorted((path / "additional_chat_templates").glob("*.jinja"))}
        if (path / "chat_template.jinja").is_file():
            return {**templates, DEFAULT_TEMPLATE: _read_text(path / "chat_template.jinja")}
        for source in (read_json(path / "chat_template.json").get("chat_template"), self.config.get("chat_template")):
            if source:
                return {**templates, **_named_templates(source)}
        return templates


def _tokenizer_config(path: Path) -> dict[str, Any]:
    """Return tokenizer_config.json with special_tokens_map.json, which overrides only older configs without a token list."""
    config, named = read_json(path / "tokenizer_config.json"), read_json(path / "special_tokens_map.json")
    return {**named, **config} if "added_tokens_decoder" in config else {**config, **named}


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; {} without the file. Raises `TokenizerError`."""
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
    """Return the contents of a tokenizer file. Raises `TokenizerError`, also for a file larger than any vocabulary."""
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
    """Raise `TokenizerError` for a Git LFS pointer in place of the file."""
    try:
        with open_plain(path) as file:
            pointer = file.read(len(_POINTER)) == _POINTER
    except OSError as error:
        raise TokenizerError(f"{path} cannot be read: {error.strerror or error}") from error
    if pointer:
        raise TokenizerError(f"{path} is a pointer of Git LFS, not the file: run git lfs pull, or download the file again")


def _content(token: object) -> str | None:
    """Return the text of a token, which is a string or an object with text and flags."""
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


_FILES = ("tokenizer*", "vocab.*", "*.vocab", "merges.txt", "*.tiktoken", "*tekken*.json", "*.model", "*.model.v*")
_CODE = "tokenization*.py"


def has_tokenizer(directory: Path) -> bool:
    """Return True if the directory has any tokenizer file, supported or not."""
    return any(next(directory.glob(pattern), None) for pattern in _FILES)


def unreadable(directory: Path) -> TokenizerError:
    """Return the error for a directory without a supported tokenizer file. The message lists the files found."""
    found = sorted({path.name for pattern in (*_FILES, _CODE) for path in directory.glob(pattern)})
    there = f"only {', '.join(found[:6])}" if found else "nothing of the kind"
    return TokenizerError(
        f"{directory} has no tokenizer that can be read (tokenizer.json, tokenizer.model, tekken.json, tiktoken.model or qwen.tiktoken): "
        f"{there} is there; add the model's tokenizer.json, which transformers' save_pretrained writes"
    )
