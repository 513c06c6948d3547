"""The ids that tiktoken and mistral_common give for odd texts and chats, with a small vocabulary of their kind.

Run with a Python that has mistral_common (which brings tiktoken) and tokenizers: `python make_ranked.py` writes tokenizer/ranked.json.
`tests/support/ranked_vocabularies.py` writes the same vocabulary as `tekken.json`, `tiktoken.model` and `qwen.tiktoken`.
"""

from __future__ import annotations

import base64
import json
import pathlib
import random
import sys
import tempfile
import unicodedata
import warnings
from typing import Any

import tiktoken
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
from mistral_common.tokens.tokenizers.tekken import Tekkenizer
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
from support.tokenizers.ranked_vocabularies import CHATS, LONG, VERSIONS, kimi_specials, tekken

OUT = pathlib.Path(__file__).parent / "tokenizer" / "ranked.json"
TEXTS = [
    "",
    " ",
    "Hello, world! It's 12345 o'clock; DON'T we'LL 's 'S",
    "camelCase HTTPServer foo_bar x1y2 3.14159 1234567890",
    "   three  spaces\n\n\n  and\ttabs \t \r\n\r\nend   ",
    "//path/to/file.py /** @x */ --- === !!!\n//\n/\n",
    "日本語と中文混ざり、漢字かな123数字。〇々〆 豈 𠀀",
    "中文ABC中文abc 人人人人人人",
    "मानक हिन्दी ไทย 한국어 שָׁלוֹם مرحبا \u200fRTL\u202e",
    "e\u0301 o\u0308 a\u0300\u0301\u0302 \u0301 ÀÉÎ ßſK İi ǅ ﬁ ﷺ",
    "👨‍👩‍👧‍👦 👍🏽 🏳️‍🌈 🇩🇪 ❤️ 🦙🦙🦙",
    "\0 \x01\x1c\x1f\x7f\x85\u00a0\u2028\u3000\ufeff\uffff\U0010ffff",
    "½ ² Ⅷ ٣٤ １２３ 𝟘𝟙",
    "'ſ 'ſt 'LL 'l 're'ReRE don’t",
    "def f(x):\n    return x[1:-1]  # comment\n\n\nclass A(B):\n\tpass\n",
    *("a" * n for n in (3, 64, 501)),
    *(c * 130 for c in (" ", "\n", "=", "中", "é", "1", "\u0301", "🦙", "ab", "A")),
    " \n \n \n", "\n \n", "  a", "a  ", "\t\t\ta",
    "</s><s>x </s>[INST] a[/INST]<unk>b[TOOL_CALLS][ARGS]{}",
    "[BOS][EOS]x<|im_end|> <|im_start|>user <|tool_call_begin|>[/INST",
]  # fmt: skip
PATTERN_OF_KIMI = "|".join(
    [
        r"[\p{Han}]+",
        *(
            rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]{first}"
            rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]{last}(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
            for first, last in ("*+", "+*")
        ),
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ]
)
PATTERN_OF_QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def random_texts(count: int) -> list[str]:
    chance = random.Random(11)
    letters = "aabehlnotT'S  \n\r\t019é日本中🦙\u0301\u200d.,!/-_=ſ\u00a0\u3000"
    return ["".join(chance.choice(letters) for _ in range(chance.randrange(1, 30))) for _ in range(count)]


def trained() -> list[str]:
    """Tokens in base64 by rank: the bytes in order, then what was merged."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(TEXTS * 3, trainers.BpeTrainer(vocab_size=700, max_token_length=12, initial_alphabet=alphabet))
    byte_of = {letter: place for place, letter in enumerate(_letters())}
    index = tokenizer.get_vocab()
    merged = [bytes(byte_of[letter] for letter in token) for token in sorted(index, key=index.__getitem__) if len(token) > 1]
    return [base64.b64encode(token).decode() for token in [*(bytes([byte]) for byte in range(256)), *merged]]


def _letters() -> list[str]:
    """The letters that stand for bytes in byte-level models."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return [chr(byte) if byte in plain else chr(256 + others.index(byte)) for byte in range(256)]


def runs(text: str, limit: int) -> list[str]:
    """Cut after `limit` characters of one kind in a row, as `tokenization_kimi.py` does."""
    parts, begin, length = [], 0, 0
    for at, char in enumerate(text):
        length = length + 1 if at and char.isspace() == text[at - 1].isspace() else 1
        if length > limit:
            parts.append(text[begin:at])
            begin, length = at, 1
    return [*parts, text[begin:]]


def ids_of_chats(folder: pathlib.Path, vocabulary: list[str], name: str) -> list[list[int]]:
    path = folder / "tekken.json"
    path.write_text(json.dumps(tekken(vocabulary, name)))
    tokenizer, found = MistralTokenizer.from_file(str(path)), []
    for messages, tools in CHATS:
        openai: list[dict[str, Any]] = json.loads(json.dumps(messages))
        for message in openai:
            if not VERSIONS[name].thinks:
                message.pop("reasoning_content", None)
            for call in message.get("tool_calls", ()):
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        request = ChatCompletionRequest.from_openai(openai, tools=tools or None)
        found.append(list(tokenizer.encode_chat_completion(request).tokens))
    return found


def main() -> None:
    warnings.simplefilter("ignore")
    vocabulary, texts = trained(), [*TEXTS, *random_texts(120)]
    ranks = {base64.b64decode(token): rank for rank, token in enumerate(vocabulary)}
    kimi = tiktoken.Encoding("kimi", pat_str=PATTERN_OF_KIMI, mergeable_ranks=ranks, special_tokens=kimi_specials(len(ranks)))
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{place}|>" for place in range(205))]
    special = {name: len(ranks) + place for place, name in enumerate(names)}
    qwen = tiktoken.Encoding("qwen", pat_str=PATTERN_OF_QWEN, mergeable_ranks=ranks, special_tokens=special)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "tekken.json"
        path.write_text(json.dumps(tekken(vocabulary, "v13")))
        mistral = Tekkenizer.from_file(path)
        chats = {name: ids_of_chats(pathlib.Path(folder), vocabulary, name) for name in VERSIONS}
    ids = {
        "tekken.json": [mistral.encode(text, bos=False, eos=False) for text in texts],
        "tiktoken.model": [kimi.encode(text, allowed_special="all") for text in texts],
        "qwen.tiktoken": [qwen.encode(unicodedata.normalize("NFC", text), allowed_special="all") for text in texts],
    }
    cut = [
        [
            token_id
            for at in range(0, len(text), 400_000)
            for part in runs(text[at : at + 400_000], 25_000)
            for token_id in kimi.encode(part)
        ]
        for text in LONG
    ]
    counts = [{str(token_id): found.count(token_id) for token_id in sorted(set(found))} for found in cut]
    contents = {"vocabulary": vocabulary, "texts": texts, "ids": ids, "long": counts, "chats": chats}
    OUT.write_text(json.dumps(contents, ensure_ascii=True, separators=(",", ":")).replace('],"', '],\n"') + "\n")


if __name__ == "__main__":
    main()
