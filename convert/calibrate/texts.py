"""Calibration texts, read to learn the inputs of each layer: random ids, the model's own samples, or a text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Union

import numpy as np

from ...engine.llm import LLM
from ...errors import TextError
from ...evaluation.texts import cut, read_texts
from ...loading.checkpoint import Checkpoint
from ...loading.load import load_tokenizer, open_checkpoint
from ...loading.weights import Progress
from ...models import architecture
from ...tokenizer.no_tokenizer import NoTokenizer
from ...tokenizer.tokenizer import Tokenizer
from ...types import SamplingParams
from ...util.device import is_gpu
from ..write.journal import Journal

LENGTH = 512
"""Tokens of a sequence."""
MOST_TOKENS, LEAST_TOKENS = 49_152, 4_096
_SECONDS = 180
_CPU_RATE, _GPU_RATE = 5e10, 8e11
"""Multiply-adds per second of batched decoding: two cores of a CPU (measured), and a small Apple GPU (computed)."""
_TOGETHER = 48
"""Samples generated together. Each step reads the weights once for all."""
_PLAIN = ("F16", "F32", "BF16", "float", "bfloat")
"""Prefixes of the types of plain numbers, in both kinds of checkpoint."""
_STARTS = ("The", "A", "I", "In", "It", "We", "How", "def", "import", "#", "1", "He", "She", "This", "What", "If", "To", "You", "When")
"""First words of samples, one token each, for models without a beginning-of-text token."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """Sequences to read, each from its beginning."""

    texts: tuple[tuple[int, ...], ...]
    """Token ids of each sequence."""
    name: str
    """Name for reports, which identifies the sequences."""
    notes: tuple[str, ...] = ()
    """Messages for the user."""

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        return sum(map(len, self.texts))


Texts = Union[str, Path, Calibration, None]
"""A value of `--calibration`, or the sequences; None for the model's own samples."""


def default_tokens(parameters: int) -> int:
    """Return the tokens of own samples for GPTQ, so that sampling takes about three minutes at most on a small machine.

    It is 49,152, less for models beyond 180 million parameters on a CPU and 2.9 billion on a GPU, and at least 4,096. Only the kind of
    device counts.
    """
    affordable = int(_SECONDS * (_GPU_RATE if is_gpu() else _CPU_RATE) / max(parameters, 1))
    return max(LEAST_TOKENS, min(MOST_TOKENS, affordable // LENGTH * LENGTH))


def random_ids(vocab: int, tokens: int = 4_096, *, length: int = LENGTH, seed: int = 0) -> Calibration:
    """Return random token ids, the same for each vocabulary size.

    They serve almost as well as text for the size of each input, which depends mainly on the model. They do not show how inputs correlate.
    """
    ids = np.random.default_rng(seed).integers(0, vocab, (max(tokens // length, 1), length))
    return Calibration(tuple(tuple(row) for row in ids.tolist()), f"{ids.size} random tokens (seed {seed})")


def own_samples(
    model: str | Path, tokens: int, *, length: int = LENGTH, seed: int = 0, memory_gb: float | None = None, progress: Progress | None = None
) -> Calibration:
    """Let the model write texts at temperature 1 without truncation, from its beginning-of-text token or from common words.

    The same call gives the same texts on the same machine. Plain matrices are rounded to 8 bits at load, which is faster and halves memory.
    Raises `MLXInferError`, and `MemoryPlanError` if the model does not fit.
    """
    count = max(tokens // length, 1)
    settings: dict[str, Any] = {
        "bits": _bits(Path(model)),
        "memory_gb": memory_gb,
        "max_context": length,
        "max_num_seqs": min(count, _TOGETHER),
    }
    with LLM(model, **settings, prefix_cache=False, speculate=False, deterministic=True) as llm:
        starts = _starts(llm.tokenizer, count)
        answers: list[tuple[int, ...]] = []
        for first in range(0, count, _TOGETHER):
            batch = starts[first : first + _TOGETHER]
            params = [_sampling(length - len(start), seed * count + first + number) for number, start in enumerate(batch)]
            answers += [(*start, *answer.token_ids) for start, answer in zip(batch, llm.generate(batch, params), strict=True)]
            if progress:
                progress(len(answers) * length, count * length)
    return Calibration(tuple(answers), f"{sum(map(len, answers))} tokens of the model's own samples (seed {seed})")


def _bits(model: Path) -> int | None:
    """Return 8 for plain stored weights, None for a model that is quantized already."""
    checkpoint = open_checkpoint(model)
    try:
        plain = [name for name in checkpoint.names() if checkpoint.kind(name).startswith(_PLAIN)]
        bytes_plain, nbytes = sum(map(checkpoint.nbytes, plain)), sum(map(checkpoint.nbytes, checkpoint.names()))
        return 8 if bytes_plain > nbytes / 2 else None
    finally:
        checkpoint.close()


def _sampling(tokens: int, seed: int) -> SamplingParams:
    return SamplingParams(
        temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0, max_tokens=tokens, seed=seed, ignore_eos=True
    )


def _starts(tokenizer: Tokenizer, count: int) -> list[list[int]]:
    if tokenizer.bos_token_id is not None:
        return [[tokenizer.bos_token_id]] * count
    if isinstance(tokenizer, NoTokenizer):
        return [[number + 1] for number in range(count)]
    words = [tokenizer.encode(word, add_special_tokens=False)[:1] for word in _STARTS]
    return [words[number % len(words)] for number in range(count)]


def from_text(what: str | Path, tokenizer: Tokenizer, tokens: int, *, length: int = LENGTH) -> Calibration:
    """Cut windows of a text file, a folder, or a data set in the hub's cache (`evaluation.texts.read_texts`). Raises `TextError`."""
    if isinstance(tokenizer, NoTokenizer):
        raise TextError("the model has no tokenizer, so that no text can calibrate it: leave out --calibration")
    name = Path(what).name if Path(what).expanduser().exists() else str(what)
    windows = cut(tokenizer, read_texts(what, tokens), name, positions=tokens, length=length)
    found = windows.positions
    if found < LENGTH:
        raise TextError(f"{what} has {found} tokens, too few to calibrate with: give a text of {LEAST_TOKENS} or more")
    notes = (f"{what} has {found} tokens of the {tokens} that calibration wanted: more would be better",) if found < tokens else ()
    texts = tuple(window.ids for window in windows.windows)
    return Calibration(texts, f"{found} tokens of {name} (sha256 {windows.digest[:12]})", notes)


def calibration(
    what: str | Path, model: Path, vocab: int, tokens: int, *, memory_gb: float | None = None, progress: Progress | None = None
) -> Calibration:
    """Return the sequences for a value of `--calibration`: "random", "samples" (the model's own), or a text.

    `model` is a directory or a GGUF file, `vocab` its number of token ids. Raises `MLXInferError`.
    """
    if what == "random":
        return random_ids(vocab, tokens)
    if what == "samples":
        return own_samples(model, tokens, memory_gb=memory_gb, progress=progress)
    checkpoint: Checkpoint = open_checkpoint(model)
    try:
        tokenizer = load_tokenizer(checkpoint)
    finally:
        checkpoint.close()
    return from_text(what, tokenizer, tokens)


def texts_to_read(checkpoint: Checkpoint, texts: Texts, journal: Journal, tokens: int | None = None) -> Sequence[Sequence[int]]:
    """Return the token ids to calibrate with: `tokens` of them, or the number for GPTQ. The journal stores them, because sampling is slow.

    Raises `MLXInferError`.
    """
    kept = journal.done("calibration")
    if kept is None:
        if isinstance(texts, Calibration):
            found = texts
        else:
            sizes = architecture(checkpoint.config).sizes
            tokens = tokens or default_tokens(sum(math.prod(checkpoint.shape(name)) for name in checkpoint.names()))
            found = calibration(texts or "samples", checkpoint.path, sizes.vocab, tokens)
        kept = {"texts": [list(text) for text in found.texts], "name": found.name}
        journal.record("calibration", kept)
    read: list[list[int]] = kept["texts"]
    return read
