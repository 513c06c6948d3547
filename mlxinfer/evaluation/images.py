"""Questions about pictures, with known answers: the share that a model answers right."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from ..engine.llm import LLM
from ..engine.text.chat_prompt import ChatPrompt
from ..errors import EvaluationError, ImageError, TextError
from ..types import SamplingParams
from .figures import Estimate

_AT_ONCE = 8
"""Questions whose pictures are in memory together."""
_LEAST_SIMILARITY = 0.5
"""Similarity below which an answer counts as wrong in ANLS."""
_MARKS = re.compile(r"[^\w\s.%$€£-]|(?<!\d)\.|\.(?!\d)")
_PART = re.compile(r"^messages\[\d+\]\.content\[(\d+)\]: ")
_ARTICLES = re.compile(r"\b(a|an|the)\b")


@dataclass(frozen=True, slots=True)
class Question:
    """A record of the file."""

    images: tuple[Path, ...]
    text: str
    answers: tuple[str, ...]
    """Answers that count as right."""


@dataclass(frozen=True, slots=True)
class Answered:
    """A model's answer to a question."""

    question: Question
    answer: str
    exact: bool
    """True if the answer equals a right one, without case, articles and punctuation marks."""
    contained: bool
    """True if a right answer occurs in the answer, as whole words."""
    anls: float
    """Similarity to the nearest right answer, 0 to 1; 0 below a half."""
    image_tokens: int


@dataclass(frozen=True, slots=True)
class ImageFigures:
    """Figures of a model. Errors are standard errors over questions; None for a single question."""

    model: str
    answered: tuple[Answered, ...]

    @property
    def exact(self) -> Estimate:
        """Share of exact answers."""
        return _estimate([each.exact for each in self.answered])

    @property
    def contained(self) -> Estimate:
        """Share of answers that contain a right one."""
        return _estimate([each.contained for each in self.answered])

    @property
    def anls(self) -> Estimate:
        """Average normalized Levenshtein similarity (ST-VQA, arXiv:1905.13648)."""
        return _estimate([each.anls for each in self.answered])

    @property
    def image_tokens(self) -> float:
        """Mean number of image rows in a prompt."""
        return fmean(each.image_tokens for each in self.answered)


def read_questions(file: Path) -> list[Question]:
    """Return the questions of a JSON lines file.

    A record has `image` (a path, or a list of them, relative to the file), `question`, and `answer` (text, or a list of right answers).
    Raises `TextError` naming the line.
    """
    found = []
    try:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    found.append(_question(line, file, f"line {number} of {file}"))
    except (OSError, UnicodeDecodeError) as error:
        raise TextError(f"{file} cannot be read: {error}") from None
    if not found:
        raise TextError(f"{file} has no questions: a line is an object with image, question and answer")
    return found


def _question(line: str, file: Path, where: str) -> Question:
    try:
        record = json.loads(line)
    except json.JSONDecodeError:
        raise TextError(f"{where} is not JSON") from None
    if not isinstance(record, dict):
        raise TextError(f"{where} is not an object with image, question and answer")
    images, answers = _texts(record, "image", where), _texts(record, "answer", where)
    (question,) = _texts(record, "question", where)[:1]
    paths = tuple(file.parent / image for image in images)
    missing = next((path for path in paths if not path.is_file()), None)
    if missing is not None:
        raise TextError(f"{where}: the picture {missing} does not exist")
    return Question(paths, question, answers)


def _texts(record: dict[str, Any], key: str, where: str) -> tuple[str, ...]:
    value = record.get(key)
    values = value if isinstance(value, list) else [value]
    if not values or not all(isinstance(each, str) and each.strip() for each in values):
        raise TextError(f"{where}: {key} must be text, or a list of texts")
    return tuple(values)


def evaluate_images(
    model: str | Path,
    questions: Sequence[Question],
    *,
    max_tokens: int = 64,
    prompt: str = "",
    settings: dict[str, Any] | None = None,
    done: Callable[[int], None] = lambda count: None,
) -> ImageFigures:
    """Ask a model all questions, without sampling, and compare its answers.

    `prompt` is appended to each question, such as "Answer with one word." `settings` are keywords of `LLM`. `done` is called with the
    number of questions answered so far. Raises `EvaluationError` for a model that cannot see images, and `MLXInferError`s.
    """
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    found: list[Answered] = []
    with LLM(model, **{"prefix_cache": False, **(settings or {})}) as llm:
        if not llm.sees_images:
            raise EvaluationError(f"{model} cannot see images: eval images needs a model that can")
        for first in range(0, len(questions), _AT_ONCE):
            group = questions[first : first + _AT_ONCE]
            answers = llm.generate([_prompt(llm, each, prompt) for each in group], params)
            for question, answer in zip(group, answers, strict=True):
                found.append(_compared(question, answer.text, answer.usage.stats.image_tokens))
            done(len(found))
        return ImageFigures(str(model), tuple(found))


def _prompt(llm: LLM, question: Question, prompt: str) -> ChatPrompt:
    """Return the question as a prompt. Raises `ImageError` that names the file."""
    try:
        return llm.chat_prompt(_messages(question, prompt))
    except ImageError as error:
        part = _PART.match(str(error))
        if part is None:
            raise
        raise ImageError(f"{question.images[int(part[1])]}: {str(error)[part.end() :]}") from None


def _messages(question: Question, prompt: str) -> list[dict[str, Any]]:
    text = f"{question.text}\n{prompt}" if prompt else question.text
    return [{"role": "user", "content": [*({"type": "image", "image": path} for path in question.images), {"type": "text", "text": text}]}]


def _compared(question: Question, answer: str, image_tokens: int) -> Answered:
    own, right = plain(answer), [plain(each) for each in question.answers]
    contained = any(each and re.search(rf"(?<!\w){re.escape(each)}(?!\w)", own) for each in right)
    similarity = max(_similarity(own, each) for each in right)
    anls = similarity if similarity >= _LEAST_SIMILARITY else 0.0
    return Answered(question, answer.strip(), own in right, bool(contained), anls, image_tokens)


def plain(answer: str) -> str:
    """Return an answer in lower case, without articles, punctuation marks and double spaces."""
    return " ".join(_ARTICLES.sub(" ", _MARKS.sub(" ", answer.casefold())).split())


def _similarity(one: str, other: str) -> float:
    longest = max(len(one), len(other))
    return 1.0 if not longest else 1 - _distance(one, other) / longest


def _distance(one: str, other: str) -> int:
    """Return the number of insertions, deletions and replacements between two texts (Levenshtein)."""
    before = list(range(len(other) + 1))
    for row, letter in enumerate(one, 1):
        now = [row]
        for column, theirs in enumerate(other, 1):
            now.append(min(before[column] + 1, now[-1] + 1, before[column - 1] + (letter != theirs)))
        before = now
    return before[-1]


def _estimate(values: Iterable[float]) -> Estimate:
    numbers = [float(value) for value in values]
    return Estimate(fmean(numbers), stdev(numbers) / len(numbers) ** 0.5 if len(numbers) > 1 else None)
