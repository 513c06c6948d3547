"""Pre-tokenization of byte-level BPE, by its name in GGUF (`tokenizer.ggml.pre`) or for a file of ranks.

The names are llama.cpp's (`llama_vocab::impl::load`). The expressions are those of the models' own `tokenizer.json`, which llama.cpp
approximates in places. They are applied in order, each inside the pieces of the one before. The table covers the supported architectures.
"""

from __future__ import annotations

import re
from itertools import pairwise

from tokenizers import Regex, normalizers, pre_tokenizers

from ..errors import TokenizerError
from ..util.dataclass import dataclass

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_LLAMA3 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + _OTHERS
_QWEN2 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + _OTHERS
_QWEN35 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _SPACES
_MINICPM5 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}+|" + _OTHERS
_UFAKZEKA = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + _OTHERS
_SEED_CODER = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|" + _SPACES


def _cased_words(suffix: str, numbers: str, but: str = "", line_ends: str = r"[\r\n/]") -> str:
    """Return an expression that splits words where upper case follows lower case (o200k, Tekken, Kimi), without the letters of `but`."""
    upper, lower = (rf"[{letters}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]" for letters in (r"\p{Lu}\p{Lt}", r"\p{Ll}"))
    words = rf"[^\r\n\p{{L}}\p{{N}}]?{upper}*{lower}+{suffix}|[^\r\n\p{{L}}\p{{N}}]?{upper}+{lower}*{suffix}"
    return words + rf"|{numbers}| ?[^\s\p{{L}}\p{{N}}]+{line_ends}*|" + _SPACES


_TEKKEN = _cased_words("", r"\p{N}")
_O200K = _cased_words(_CONTRACTION + "?", r"\p{N}{1,3}")
_KIMI = r"\p{Han}+|" + _cased_words(_CONTRACTION + "?", r"\p{N}{1,3}", r"&&[^\p{Han}]", r"[\r\n]")
_ASCII_PUNCTUATION = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
_DEEPSEEK3_WORDS = _ASCII_PUNCTUATION + r"[A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES
_CJK = "[一-龥぀-ゟ゠-ヿ]+"
_DEEPSEEK_CJK = "[一-龥ࠀ-一가-퟿]+"
_DEEPSEEK_LETTERS = (
    r"\s?["
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377"
    "\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556"
    "\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15"
    "\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe"
    "\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113"
    "\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184"
    "\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e"
    "\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
    r"]+"
)
_VIKING = r" ?[^(\s|.,!?…。，、।۔،)]+"
_LLAMACPP_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")


@dataclass(frozen=True)
class PreTokenization:
    """Rules by which a family of models splits a text into words."""

    splits: tuple[str, ...]
    """Regular expressions, applied in order; each match becomes a word."""
    nfc: bool = False
    """True if the text is normalized to NFC first."""
    ignore_merges: bool = False
    """True if a word that is a token stays whole even if the merges do not build it."""
    add_bos: bool = False
    """Default of adding BOS."""
    longest_run: int = 0
    """Maximum length of a run of spaces or of other characters, applied first; 0 for no limit."""
    longest_text: int = 0
    """Maximum length of a text, applied before `longest_run`; 0 for no limit."""

    def parts(self, text: str) -> list[str]:
        """Return the parts of a text that are tokenized independently."""
        if not self.longest_run or len(text) <= self.longest_run:
            return [text]
        size = self.longest_run
        run = re.compile(rf"\S{{{size}}}(?=\S)|\s{{{size}}}(?=\s)")
        parts = []
        for start in range(0, len(text), self.longest_text):
            piece = text[start : start + self.longest_text]
            cuts = [0, *(found.end() for found in run.finditer(piece)), len(piece)]
            parts += [piece[begin:end] for begin, end in pairwise(cuts)]
        return parts

    def normalizer(self) -> normalizers.Normalizer | None:
        return normalizers.NFC() if self.nfc else None

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        splits = [pre_tokenizers.Split(Regex(split), "isolated") for split in self.splits]
        return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_BY_NAME: dict[str, PreTokenization] = {
    "default": PreTokenization(_LLAMACPP_DEFAULT),
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "lfm2", "pixtral", "midm-2.0"),
        PreTokenization((_LLAMA3,), ignore_merges=True, add_bos=True),
    ),
    **dict.fromkeys(("glm4", "glm5"), PreTokenization((_LLAMA3,), ignore_merges=True)),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), PreTokenization((_LLAMA3,))),
    "minicpm5": PreTokenization((r"\p{N}{1,3}", _MINICPM5), ignore_merges=True),
    "deepseek-llm": PreTokenization((r"[\r\n]", _DEEPSEEK_LETTERS, r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", _DEEPSEEK_CJK, r"\p{N}")),
    "deepseek-coder": PreTokenization((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, r"\p{N}")),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), PreTokenization((r"\p{N}{1,3}", _CJK, _DEEPSEEK3_WORDS))),
    **dict.fromkeys(("starcoder", "refact", "smollm", "minerva-7b", "command-r"), PreTokenization((r"\p{N}", _GPT2))),
    **dict.fromkeys(("gpt-2", "a.x-4.0", "mellum", "trillion", "granite-docling", "exaone4"), PreTokenization((_GPT2,))),
    **dict.fromkeys(("mpt", "olmo"), PreTokenization((_GPT2,), nfc=True)),
    "qwen2": PreTokenization((_QWEN2,), nfc=True),
    **dict.fromkeys(("deepseek-r1-qwen", "kormo", "f2llmv2", "megrez"), PreTokenization((_QWEN2,))),
    "qwen35": PreTokenization((_QWEN35,), nfc=True),
    "ufakzeka": PreTokenization((_UFAKZEKA,)),
    "viking": PreTokenization((_VIKING, r"\p{N}")),
    "tekken": PreTokenization((_TEKKEN,), ignore_merges=True, add_bos=True),
    **dict.fromkeys(("gpt-4o", "minimax-m2"), PreTokenization((_O200K,))),
    "kimi-k2": PreTokenization((_KIMI,)),
    "superbpe": PreTokenization((r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    "seed-coder": PreTokenization((_SEED_CODER,)),
}


TEKKEN_PATTERN = _TEKKEN
KIMI = PreTokenization((_KIMI,), ignore_merges=True, longest_run=25_000, longest_text=400_000)
"""Rules of `tiktoken.model`, with the pattern and limits of Moonshot's `tokenization_kimi.py`."""
QWEN1 = PreTokenization((_QWEN2,), nfc=True, ignore_merges=True)
"""Rules of `qwen.tiktoken`, from Qwen's `tokenization_qwen.py`."""


def pre_tokenization(name: str) -> PreTokenization:
    """Return the rules of this name. Raises `TokenizerError` for an unknown name."""
    try:
        return _BY_NAME[name]
    except KeyError:
        raise TokenizerError(
            f"unknown pre-tokenizer {name!r} in the GGUF file: convert the model from its Hugging Face checkpoint"
        ) from None
