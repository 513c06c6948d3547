"""A small vocabulary of byte strings by rank, in the files of Mistral's and Moonshot's models, with ids of tiktoken and mistral_common."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

GOLDEN = Path(__file__).parents[2] / "golden" / "tokenizer" / "ranked.json"


class Version(NamedTuple):
    """A version of Mistral's instruct format."""

    version: str
    thinks: bool = False
    listed: bool = True


VERSIONS = {
    "v7": Version("v7", listed=False),
    "v11": Version("v11"),
    "v13": Version("v13"),
    "v13 that thinks": Version("v13", thinks=True),
    "v15": Version("v15", thinks=True),
}
SPECIAL = [
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    *("[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]"),
    *("[/SYSTEM_PROMPT]", "[TOOL_CONTENT]", "[ARGS]", "[CALL_ID]", "[MODEL_SETTINGS]", "[/MODEL_SETTINGS]", "[THINK]", "[/THINK]"),
]
PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)


def tekken(vocabulary: list[str], name: str = "v13", special: int = 40) -> dict[str, Any]:
    """The contents of a `tekken.json` with so many special tokens. It has some tokens more than the model, as real ones do."""
    version = VERSIONS[name]
    tokens = [*vocabulary, "ZW5kIG9mIHRoZSBsaXN0", "aWdub3JlZA=="]
    config = {"pattern": PATTERN, "num_vocab_tokens": len(tokens), "default_num_special_tokens": special, "version": version.version}
    contents: dict[str, Any] = {
        "config": config | {"default_vocab_size": len(vocabulary) + special},
        "vocab": [{"rank": rank, "token_bytes": token, "token_str": None} for rank, token in enumerate(tokens)],
    }
    if version.listed:
        texts = SPECIAL if version.thinks else SPECIAL[:-2]
        contents["special_tokens"] = [{"rank": rank, "token_str": text, "is_control": True} for rank, text in enumerate(texts)]
    if name == "v15":
        effort = {"type": "enum", "accepts_none": True, "values": ["none", "high"], "default": "none"}
        contents["model_settings_builder"] = {"reasoning_effort": effort}
    return contents


LONG = ("x" + "a" * 60_000, "\t" + " " * 50_001 + "x", "ab " * 140_000)
"""Texts that Kimi's tokenizer cuts into parts first."""
KIMI = ("[BOS]", "[EOS]", "<|im_end|>", "<|tool_call_begin|>")
"""The first special tokens of `tiktoken.model`; the last is text in answers."""


def kimi_specials(first: int) -> dict[str, int]:
    names = {first + place: name for place, name in enumerate(KIMI)}
    return {names.get(token_id, f"<|reserved_token_{token_id}|>"): token_id for token_id in range(first, first + 256)}


@cache
def ranked() -> dict[str, Any]:
    """`vocabulary` in base64, `texts` with their `ids` for each file, and of `CHATS` by version (`chats`)."""
    contents: dict[str, Any] = json.loads(GOLDEN.read_text(encoding="ascii"))
    return contents


def write_tekken(directory: Path, name: str = "v13") -> Path:
    (directory / "tekken.json").write_text(json.dumps(tekken(ranked()["vocabulary"], name)))
    return directory


def write_ranks(directory: Path, name: str) -> Path:
    """`tiktoken.model` with its tokenizer_config.json, or `qwen.tiktoken`."""
    vocabulary = ranked()["vocabulary"]
    (directory / name).write_text("".join(f"{token} {rank}\n" for rank, token in enumerate(vocabulary)))
    if name == "tiktoken.model":
        declared = {str(len(vocabulary) + i): {"content": text, "special": text != KIMI[-1]} for i, text in enumerate(KIMI)}
        config = {"tokenizer_class": "TikTokenTokenizer", "bos_token": "[BOS]", "eos_token": "[EOS]", "added_tokens_decoder": declared}
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def _text(*parts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": part} for part in parts]


def _calls(*ids: str) -> list[dict[str, Any]]:
    arguments = {"z": 'é\n"q"', "n": {"k": [1, None, True, 2.5]}}
    return [{"id": call, "type": "function", "function": {"name": f"fn{i}", "arguments": arguments}} for i, call in enumerate(ids)]


def _result(call: str, content: str) -> dict[str, str]:
    return {"role": "tool", "tool_call_id": call, "name": "fn0", "content": content}


_PARAMETERS = {"type": "object", "properties": {"z": {"type": "string", "description": "é"}, "a": {"type": "integer"}}, "required": ["z"]}
_TOOLS = [{"type": "function", "function": {"name": f"fn{i}", "description": 'does "x"' * i, "parameters": _PARAMETERS}} for i in (0, 1)]
CHATS: list[tuple[list[dict[str, Any]], list[dict[str, Any]]]] = [
    ([{"role": "user", "content": "Hello"}], []),
    ([{"role": "system", "content": "Be brief. "}, {"role": "user", "content": " Hello <b> & 'q'\n"}], []),
    ([{"role": "system", "content": _text("one", "two")}, {"role": "user", "content": _text("a", "b")}], _TOOLS),
    (
        [
            {"role": "user", "content": "a"},
            {"role": "user", "content": "b"},
            {"role": "assistant", "content": "c  "},
            {"role": "assistant", "content": _text("d", " e")},
            {"role": "user", "content": "f"},
        ],
        _TOOLS[:1],
    ),
    (
        [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "weather?"},
            {"role": "assistant", "content": "calling ", "reasoning_content": "hm é\n", "tool_calls": _calls("abcDEF123", "Zyx987654")},
            _result("Zyx987654", '{"t":  20}'),
            _result("abcDEF123", "sunny é"),
            {"role": "assistant", "content": "done", "reasoning_content": "so"},
            {"role": "user", "content": "thanks"},
        ],
        _TOOLS,
    ),
    (
        [
            {"role": "user", "content": "go"},
            {"role": "assistant", "tool_calls": _calls("abcDEF123")},
            _result("abcDEF123", "[1,2]"),
        ],
        _TOOLS,
    ),
]
