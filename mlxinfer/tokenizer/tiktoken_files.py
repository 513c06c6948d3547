"""Reads tiktoken's rank files: `tiktoken.model` of Moonshot's models (Kimi, Moonlight) and `qwen.tiktoken` of Qwen 1.

A line has a token in base64 and its rank. Pre-tokenization and special tokens are in Python code beside the file, which is never executed.
They are tabulated here by class name; other classes are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from ..errors import TokenizerError
from ..util.dataclass import dataclass
from .backend import TokenizerParts
from .byte_level import ByteLevelBackend
from .config_files import ConfigFiles, read_bytes
from .pretokenizers import KIMI, QWEN1, PreTokenization
from .ranks import RankedMerges, decoded, ranked_vocabulary
from .vocab import TokenType

_Specials = Mapping[int, tuple[str, TokenType]]


def find_ranks(directory: Path) -> Path | None:
    """Return the rank file of a model directory; None without one."""
    return next((directory / name for name in _KINDS if (directory / name).is_file()), None)


def read_tiktoken(path: Path) -> TokenizerParts:
    """Read a rank file and the JSON files beside it. Raises `TokenizerError`."""
    kind = _KINDS[path.name]
    files = ConfigFiles(path.parent, {"eos_token": kind.eos} if kind.eos else None)
    named = files.config.get("tokenizer_class")
    if named not in (None, kind.class_name):
        raise TokenizerError(
            f"{path} is read for the class {kind.class_name} only, and tokenizer_config.json names {named!r}: add its tokenizer.json"
        )
    ranked = _ranked(path)
    specials = kind.specials(path, files, len(ranked))
    vocabulary = ranked_vocabulary(path, ranked, 0, specials)
    backend = ByteLevelBackend(vocabulary, RankedMerges(vocabulary, 0, len(ranked)), kind.pre, None, None)
    ids = {text: token_id for token_id, (text, _) in specials.items()}
    return files.parts(backend, len(vocabulary.tokens), ids.get, written_by_template=frozenset(specials), sorts_tools=kind.sorts_tools)


def _ranked(path: Path) -> list[bytes]:
    """Return the tokens by rank."""
    words = read_bytes(path).split()
    try:
        ranks = list(map(int, words[1::2]))
    except ValueError:
        raise TokenizerError(f"{path} is corrupt: a line is not a token in base64 and its rank") from None
    if len(words) % 2 or not words or ranks != list(range(len(ranks))):
        raise TokenizerError(f"{path} is corrupt: its ranks do not count from 0, or it is cut off")
    return decoded(path, words[::2])


_RESERVED = 256
_FARTHEST = 1 << 16


def _specials_of_kimi(path: Path, files: ConfigFiles, first: int) -> _Specials:
    """Return the 256 ids after the ranks, with the texts of `added_tokens_decoder`."""
    declared = {token_id: token for token_id, token in files.declared().items() if token_id >= first}
    last = max(declared, default=0)
    if last > first + _FARTHEST:
        raise TokenizerError(f"an added token has the id {last}, far beyond the {first} ranks of {path}")
    special = {*files.special_tokens.values(), *files.listed()}
    found = {}
    for token_id in range(first, max(first + _RESERVED, last + 1)):
        token = declared.get(token_id)
        text = f"<|reserved_token_{token_id}|>" if token is None else token.content
        is_text = token is not None and not token.special and text not in special
        found[token_id] = (text, TokenType.USER_DEFINED if is_text else TokenType.CONTROL)
    return found


def _specials_of_qwen(path: Path, files: ConfigFiles, first: int) -> _Specials:
    names = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{place}|>" for place in range(205)))
    return {first + place: (name, TokenType.CONTROL) for place, name in enumerate(names)}


@dataclass(frozen=True)
class _Kind:
    class_name: str
    """`tokenizer_class` of `tokenizer_config.json`."""
    pre: PreTokenization
    specials: Callable[[Path, ConfigFiles, int], _Specials]
    """Function of (file, JSON files, number of ranks) to the special tokens."""
    eos: str | None = None
    """Default EOS if `tokenizer_config.json` has none."""
    sorts_tools: bool = False
    """See `TokenizerParts`."""


_KINDS = {
    "tiktoken.model": _Kind("TikTokenTokenizer", KIMI, _specials_of_kimi, sorts_tools=True),
    "qwen.tiktoken": _Kind("QWenTokenizer", QWEN1, _specials_of_qwen, eos="<|im_end|>"),
}
