"""Reads `tekken.json`, Mistral's vocabulary: a thousand special tokens, then tokens by rank.

The format is that of mistral_common's `Tekkenizer`. Files of early versions do not list their special tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import TokenizerError
from ..util.typed_reader import TypedReader, shown
from .backend import TokenizerParts
from .byte_level import ByteLevelBackend
from .config_files import ConfigFiles, read_bytes
from .mistral_template import mistral_template
from .pretokenizers import PreTokenization
from .ranks import RankedMerges, decoded, ranked_vocabulary
from .vocab import TokenType

_UNLISTED = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    *("[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]"),
    *("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)
"""Special tokens of a file without a list."""
_LISTED_FROM = 11
"""First version whose files must list their special tokens."""
_MOST_SPECIAL = 1 << 16
_NAMED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


class _Config(TypedReader):
    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self._path = path

    def error(self, key: str, what: str) -> TokenizerError:
        return TokenizerError(f"{self._path} is corrupt: {key} of its config {what}")

    def version(self) -> int:
        text = self.text("version", "")
        if not (text[:1] == "v" and text[1:].isdecimal() and len(text) < 5):
            raise self.error("version", f"is {shown(text)}, must be one such as v13")
        return int(text[1:])


def read_tekken(directory: Path) -> TokenizerParts:
    """Read `tekken.json` and the JSON files beside it. Raises `TokenizerError`."""
    path = directory / "tekken.json"
    contents = _contents(path)
    config = _Config(path, _part(path, contents, "config", Mapping))
    version, pattern = config.version(), config.text("pattern", "")
    count = config.integer("default_num_special_tokens", low=2, high=_MOST_SPECIAL)
    size = config.integer("default_vocab_size", low=count + 256)
    specials = _specials(path, contents.get("special_tokens"), count, version)
    ranked = _ranked(path, _part(path, contents, "vocab", list), size - count)
    vocabulary = ranked_vocabulary(path, ranked, count, {token_id: (text, TokenType.CONTROL) for text, token_id in specials.items()})
    files = ConfigFiles(directory, {name: text for name, text in _NAMED.items() if text in specials})
    pre = PreTokenization((pattern,), ignore_merges=True, add_bos=True)
    backend = ByteLevelBackend(vocabulary, RankedMerges(vocabulary, count, size), pre, specials["<s>"], None)
    efforts, effort = _efforts(contents)
    return files.parts(backend, size, specials.get, mistral_template(version, specials, efforts, effort))


def _contents(path: Path) -> dict[str, Any]:
    try:
        contents = json.loads(read_bytes(path))
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path} is not valid JSON ({' '.join(str(error).split())[:80]}): download or copy it again") from None
    if not isinstance(contents, dict):
        raise TokenizerError(f"{path} is corrupt: it holds no JSON object")
    return contents


def _part(path: Path, contents: Mapping[str, Any], key: str, kind: type) -> Any:
    if not isinstance(contents.get(key), kind):
        raise TokenizerError(f"{path} is corrupt: {key} is missing or not of its kind")
    return contents[key]


def _ranked(path: Path, tokens: list[Any], count: int) -> list[bytes]:
    """Return the first `count` tokens; a file may have more."""
    if len(tokens) < count:
        raise TokenizerError(f"{path} is corrupt: it has {len(tokens)} tokens, and its config says {count}")
    try:
        ranks, written = [token["rank"] for token in tokens[:count]], [token["token_bytes"] for token in tokens[:count]]
    except (TypeError, KeyError):
        raise TokenizerError(f"{path} is corrupt: a token lacks its rank or token_bytes") from None
    if ranks != list(range(count)):
        raise TokenizerError(f"{path} is corrupt: its tokens do not stand in the order of their ranks")
    ranked = decoded(path, written)
    if ranked[:256] != [bytes([byte]) for byte in range(256)]:
        raise TokenizerError(f"{path} is corrupt: its first tokens are not the 256 bytes")
    return ranked


def _specials(path: Path, listed: Any, count: int, version: int) -> dict[str, int]:
    """Return text to id of all special tokens; unnamed ones are <SPECIAL_20> and so on."""
    if listed is None and version >= _LISTED_FROM:
        raise TokenizerError(f"{path} is corrupt: a file of version v{version} lists its special tokens, and this one does not")
    texts = list(_UNLISTED) if listed is None else _texts(path, listed)
    if len(texts) > count:
        raise TokenizerError(f"{path} is corrupt: it lists {len(texts)} special tokens, and its config says {count}")
    texts += [f"<SPECIAL_{token_id}>" for token_id in range(len(texts), count)]
    specials = {text: token_id for token_id, text in enumerate(texts)}
    if len(specials) < count or not specials.keys() >= {"<s>", "</s>"}:
        raise TokenizerError(f"{path} is corrupt: a special token is there twice, or <s> or </s> is missing")
    return specials


def _efforts(contents: Mapping[str, Any]) -> tuple[list[str], str | None]:
    """Return (supported values of `reasoning_effort`, default)."""
    builder = contents.get("model_settings_builder")
    found = builder.get("reasoning_effort") if isinstance(builder, Mapping) else None
    if not isinstance(found, Mapping):
        return [], None
    values, default = found.get("values"), found.get("default")
    if not isinstance(values, list) or not isinstance(default, str) or not {default} <= set(map(str, values)):
        return [], None
    return list(map(str, values)), default


def _texts(path: Path, listed: Any) -> list[str]:
    try:
        ranks, texts = [token["rank"] for token in listed], [token["token_str"] for token in listed]
    except (TypeError, KeyError):
        raise TokenizerError(f"{path} is corrupt: a special token lacks its rank or token_str") from None
    if ranks != list(range(len(ranks))) or not all(isinstance(text, str) and text for text in texts):
        raise TokenizerError(f"{path} is corrupt: its special tokens do not stand in the order of their ranks")
    return texts
