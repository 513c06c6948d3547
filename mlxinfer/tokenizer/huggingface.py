"""The tokenizer of a Hugging Face or MLX model directory."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from ..errors import TokenizerError
from .backend import DEFAULT_TEMPLATE, TokenizerParts, TokenizersBackend, tokenizer_errors
from .sentencepiece import read_sentencepiece_model


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
    """The name comes from the model, so it must not lead out of the directory."""
    folder = directory / "additional_chat_templates"
    if not name.replace("_", "").replace("-", "").isalnum():
        raise TokenizerError(f"the chat template {name!r} has a name that cannot be a file name")
    folder.mkdir(exist_ok=True)
    return folder / f"{name}.jinja"


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


_SENTENCEPIECE = ("tokenizer.model", "spiece.model")
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_directory(path: Path) -> TokenizerParts:
    """From `tokenizer.json`, else from a SentencePiece `tokenizer.model`, and the JSON files next to it. Raises `TokenizerError`."""
    config = _config(path)
    special_tokens = _special_tokens(config)
    if (path / "tokenizer.json").is_file():
        with tokenizer_errors(f"reading {path / 'tokenizer.json'}"):
            tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
            _add_missing_tokens(tokenizer, path, config, special_tokens)
    elif model := next((path / name for name in _SENTENCEPIECE if (path / name).is_file()), None):
        tokenizer = read_sentencepiece_model(model, config, _declared_tokens(path, config, special_tokens))
    else:
        raise TokenizerError(f"{path} has no tokenizer: neither tokenizer.json nor a SentencePiece tokenizer.model is there")
    model_config, generation_config = read_json(path / "config.json"), read_json(path / "generation_config.json")
    return TokenizerParts(
        TokenizersBackend(tokenizer),
        max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1,
        _bos(tokenizer, config, special_tokens, model_config),
        frozenset(_eos(tokenizer, special_tokens, (generation_config, model_config, model_config.get("text_config")))),
        special_tokens,
        _chat_templates(path, config),
        template if isinstance(template := config.get("response_template"), Mapping) else None,
    )


def _config(path: Path) -> dict[str, Any]:
    """tokenizer_config.json with special_tokens_map.json, which wins only over older configs that list no tokens."""
    config, named = read_json(path / "tokenizer_config.json"), read_json(path / "special_tokens_map.json")
    return {**named, **config} if "added_tokens_decoder" in config else {**config, **named}


def read_json(path: Path) -> dict[str, Any]:
    """An object in a JSON file; empty where there is no file. Raises `TokenizerError`."""
    try:
        value = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise TokenizerError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} is corrupt: it holds no JSON object")
    return value


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


def _declared_tokens(path: Path, config: Mapping[str, Any], special_tokens: Mapping[str, str]) -> dict[int, AddedToken]:
    """Tokens that the JSON files add to the vocabulary, by id."""
    declared = {}
    decoder = config.get("added_tokens_decoder")
    if isinstance(decoder, Mapping):
        for token_id, token in decoder.items():
            content = _content(token)
            if content is not None and str(token_id).isdecimal():
                flags = token if isinstance(token, Mapping) else {}
                options = {
                    flag: bool(flags[flag]) for flag in ("special", "lstrip", "rstrip", "normalized", "single_word") if flag in flags
                }
                declared[int(token_id)] = AddedToken(content, **options)
        return declared
    special = set(special_tokens.values())
    for content, token_id in read_json(path / "added_tokens.json").items():
        if isinstance(token_id, int) and content:
            declared[token_id] = AddedToken(content, special=content in special, normalized=content not in special)
    return declared


def _add_missing_tokens(backend: Tokenizer, path: Path, config: Mapping[str, Any], special_tokens: Mapping[str, str]) -> None:
    """Add, as transformers does, the tokens that only the other files know, and make the named ones special."""
    added = backend.get_added_tokens_decoder().values()
    present, present_special = {token.content for token in added}, {token.content for token in added if token.special}
    declared = _declared_tokens(path, config, special_tokens)
    backend.add_tokens([declared[token_id] for token_id in sorted(declared) if declared[token_id].content not in present])
    missing = dict.fromkeys(token for token in [*special_tokens.values(), *_listed(config)] if token not in present_special)
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in missing])


def _listed(config: Mapping[str, Any]) -> Iterator[str]:
    for key in ("additional_special_tokens", "extra_special_tokens"):
        tokens = config.get(key)
        for token in tokens if isinstance(tokens, list) else ():
            content = _content(token)
            if content is not None:
                yield content


def _bos(backend: Tokenizer, config: Mapping[str, Any], special_tokens: Mapping[str, str], model_config: Mapping[str, Any]) -> int | None:
    """The id of BOS. A null in tokenizer_config.json means that there is none."""
    if "bos_token" in config:
        token = special_tokens.get("bos_token")
        return None if token is None else backend.token_to_id(token)
    return next(_ids(model_config.get("bos_token_id")), None)


def _eos(backend: Tokenizer, special_tokens: Mapping[str, str], configs: tuple[Any, ...]) -> Iterator[int]:
    token = special_tokens.get("eos_token")
    token_id = None if token is None else backend.token_to_id(token)
    if token_id is not None:
        yield token_id
    for config in configs:
        if isinstance(config, Mapping):
            yield from _ids(config.get("eos_token_id"))


def _ids(value: object) -> Iterator[int]:
    for token_id in value if isinstance(value, list) else [value]:
        if isinstance(token_id, int) and not isinstance(token_id, bool) and token_id >= 0:
            yield token_id


def _chat_templates(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Template files win over tokenizer_config.json, as in transformers."""
    templates = {file.stem: _read_text(file) for file in sorted((path / "additional_chat_templates").glob("*.jinja"))}
    if (path / "chat_template.jinja").is_file():
        return {**templates, DEFAULT_TEMPLATE: _read_text(path / "chat_template.jinja")}
    for source in (read_json(path / "chat_template.json").get("chat_template"), config.get("chat_template")):
        if source:
            return {**templates, **_named_templates(source)}
    return templates


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
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{path} cannot be read: {error}") from error
