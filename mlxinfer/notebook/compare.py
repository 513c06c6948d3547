"""Comparison of several models, or of one model with several settings, on the same prompts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any, Union

import mlx.core as mx

from ..cache.pages import PAGE
from ..engine.llm import LLM
from ..errors import PromptError, SettingError
from ..evaluation.probabilities import kl_divergence, logprobs_of
from ..types import SamplingParams
from .frames import frame
from .html import MUTED, table

Compared = Union[str, Path, LLM, Mapping[str, Any]]
"""A model to compare: a name, an open model, or keywords of `LLM` such as `{"path_or_id": "smollm2", "kv": "4"}`."""


_PROMPT_SHOWN = 120
"""Characters of a prompt in a table."""


@dataclass(frozen=True, slots=True)
class ComparedAnswer:
    """One model's answer to one prompt."""

    model: str
    """Name, with settings that differ from the defaults."""
    prompt: str
    """Prompt."""
    answer: str
    """Answer of this model."""
    logprob: float
    """Mean log-probability of the first model's answer, in nats per token."""
    kl: float
    """Mean KL divergence from the first model over prompt and its answer, in nats."""
    top1: float
    """Fraction of positions with the same likeliest token, 0 to 1."""
    tokens_per_second: float
    """Decode speed of a warm model."""
    megabytes: float
    """Size of the weights."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """All answers by prompt and model."""

    rows: list[ComparedAnswer]
    """One row per pair of prompt and model."""
    notes: tuple[str, ...] = ()
    """Notes, for example about a quantized cache that was not used."""

    def to_pandas(self) -> Any:
        """Return the rows as a `pandas.DataFrame`. Raises `MLXInferError` without pandas."""
        return frame(asdict(row) for row in self.rows)

    def _lines(self) -> Iterator[tuple[str, ...]]:
        for row in self.rows:
            loss = (f"{row.kl:.4g}", f"{row.top1:.1%}")
            yield row.prompt, row.model, row.answer, f"{row.logprob:.3f}", *loss, f"{row.tokens_per_second:.1f}", f"{row.megabytes:,.0f}"

    def _repr_html_(self) -> str:
        """Show each prompt once, and only the end of a long one."""
        lines, before = [], None
        for prompt, *others in self._lines():
            shown = f"… {prompt[-_PROMPT_SHOWN:]}" if len(prompt) > _PROMPT_SHOWN else prompt
            lines.append(("" if prompt == before else shown, *others))
            before = prompt
        notes = "".join(f'<div style="{MUTED}">{escape(note)}</div>' for note in self.notes)
        return f"<div>{table(('prompt', 'model', 'answer', 'log p', 'KL', 'same top', 'tokens/s', 'MB'), lines)}{notes}</div>"

    def __repr__(self) -> str:
        lines = [f"{model:<24} KL {kl:<9} {speed:>7} tokens/s  {answer!r}" for _, model, answer, _, kl, _, speed, _ in self._lines()]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def compare(models: Iterable[Compared], prompts: str | Sequence[str], params: SamplingParams | None = None) -> Comparison:
    """Let each model answer each prompt, and measure its distance from the first model on the first model's answer.

    Models are opened and closed in turn, except open ones. All must share the first model's vocabulary. Decoding is greedy unless `params`
    differ. Raises `MLXInferError`.
    """
    texts = [prompts] if isinstance(prompts, str) else list(prompts)
    if not texts:
        raise PromptError("compare needs at least one prompt")
    params = params or SamplingParams(temperature=0, max_tokens=48)
    expected: list[tuple[list[int], int, mx.array]] = []
    found: list[list[ComparedAnswer]] = [[] for _ in texts]
    notes = []
    for model in models:
        with _opened(model) as (llm, name):
            first = not expected
            _warm_up(llm, texts[0])
            completions = llm.generate(texts, params)
            for number, (text, completion) in enumerate(zip(texts, completions, strict=True)):
                if first:
                    ids = llm.tokenizer.encode(text)
                    tokens = [*ids, *completion.token_ids]
                    expected.append((tokens, len(ids), _logprobs(llm, tokens)))
                measured = _distance(llm, *expected[number])
                speed = completion.usage.decode_tps
                found[number].append(ComparedAnswer(name, text, completion.text, *measured, speed, llm.weight_bytes / 1e6))
            notes += _unused_format(llm, name, [len(tokens) for tokens, _, _ in expected])
    if not expected:
        raise SettingError("compare needs at least one model")
    return Comparison([row for rows in found for row in rows], tuple(notes))


def _unused_format(llm: LLM, name: str, lengths: list[int]) -> list[str]:
    """Return a note if no page of a quantized cache was full before the last token."""
    short = sum(length <= PAGE * (1 + llm.kv.first16) for length in lengths)
    if not llm.kv.quantized or not short:
        return []
    some = f"with {short} of {len(lengths)} prompts " if short < len(lengths) else ""
    which = f"{some}no page was full, {'and ' if some else ''}nothing"
    least = f"a page has {PAGE} tokens" + (", and the first one stays at 16 bits" if llm.kv.first16 else "")
    return [f"{name}: {which} was quantized: {least}. Compare longer prompts"]


def _warm_up(llm: LLM, text: str) -> None:
    """Run the slow first steps after loading, which would distort the speed. One token is too short for prefix reuse."""
    llm.generate([llm.tokenizer.encode(text)[:1]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))


def _distance(llm: LLM, tokens: list[int], prompt: int, expected: mx.array) -> tuple[float, float, float]:
    """Return (mean log-probability of the answer, KL divergence, fraction of equal likeliest tokens)."""
    found = _logprobs(llm, tokens)
    if found.shape != expected.shape:
        raise SettingError(f"{llm.name} has {found.shape[-1]} tokens and the first model {expected.shape[-1]}: they cannot be compared")
    with mx.stream(mx.cpu):
        kl = kl_divergence(expected, found).mean()
        same = (mx.argmax(expected, axis=-1) == mx.argmax(found, axis=-1)).mean()
        chosen = mx.take_along_axis(found[prompt - 1 : -1], mx.array(tokens[prompt:])[:, None], axis=-1).mean()
        return float(chosen.item()), float(kl.item()), float(same.item())  # type: ignore[arg-type]


def _logprobs(llm: LLM, tokens: list[int]) -> mx.array:
    logits = llm.logits(tokens)
    with mx.stream(mx.cpu):
        return logprobs_of(logits)


@contextmanager
def _opened(model: Compared) -> Iterator[tuple[LLM, str]]:
    if isinstance(model, LLM):
        yield model, model.name
        return
    keywords = dict(model) if isinstance(model, Mapping) else {"path_or_id": model}
    if "path_or_id" not in keywords:
        raise SettingError('settings to compare name their model: {"path_or_id": "smollm2", "kv": "4"}')
    with LLM(**keywords) as llm:
        settings = [f"{name}={value}" for name, value in keywords.items() if name != "path_or_id"]
        yield llm, " ".join([llm.name, *settings])
