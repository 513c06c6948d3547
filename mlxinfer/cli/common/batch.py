"""Many prompts in a file of JSON lines, answered together: `mlxinfer run --batch`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

import click

from ...config import MAX_NUM_SEQS
from ...errors import MLXInferError, PromptError, SamplingError
from ...types import Completion, SamplingParams
from ..remote.remote_model import RemoteModel
from .answer_json import as_object
from .console import as_text
from .pictures import STDIN
from .stages import stages

if TYPE_CHECKING:
    from ...engine.llm import LLM

    Model = Union[LLM, RemoteModel]

_TOGETHER = 64
"""Prompts that are answered before their lines are printed."""
_IGNORED = {"model", "method", "url", "stream"}
"""Keys of OpenAI's batches that mean nothing here."""
_SAMPLING = {field.name for field in fields(SamplingParams)} - {"structure", "adapter"}
FAILED = 2
"""Exit code if a prompt failed."""


@dataclass(frozen=True, slots=True)
class BatchLine:
    """A prompt of the file."""

    custom_id: Any
    """The caller's name of the prompt, or the number of its line."""
    messages: list[dict[str, Any]] | None
    """Messages of a chat; None for a text that is continued."""
    text: str
    sampling: dict[str, Any]
    """Sampling parameters of this prompt alone."""


def read_batch(name: str, system: str | None, *, raw: bool) -> list[BatchLine]:
    """Return the prompts of a file, or of standard input for "-". Raises `PromptError` with the number of a faulty line."""
    try:
        text = as_text(sys.stdin.buffer.read() if name == STDIN else Path(name).expanduser().read_bytes(), name)
    except OSError as error:
        raise PromptError(f"cannot read {name}: {error.strerror}") from None
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                found.append(_parsed(number, json.loads(line), system, raw=raw))
            except json.JSONDecodeError as error:
                raise PromptError(f"{name}, line {number}: {error.msg} at column {error.colno}") from None
            except MLXInferError as error:
                raise PromptError(f"{name}, line {number}: {error}") from None
    if not found:
        raise PromptError(f"{name} has no prompts: a line is a text in quotes, or an object with prompt or messages")
    return found


def _parsed(number: int, value: Any, system: str | None, *, raw: bool) -> BatchLine:
    given = {"prompt": value} if isinstance(value, str) else value
    if not isinstance(given, dict):
        raise PromptError(f"a text or an object is needed, not {value!r:.60}")
    given = dict(given)
    custom_id = given.pop("custom_id", given.pop("id", number))
    if isinstance(body := given.pop("body", None), dict):
        given |= body
    system, prompt, messages = given.pop("system", system), given.pop("prompt", None), given.pop("messages", None)
    if (prompt is None) == (messages is None):
        raise PromptError("either prompt or messages is needed")
    if prompt is not None and not (isinstance(prompt, str) and prompt.strip()):
        raise PromptError("prompt must be a text that is not empty")
    if "max_completion_tokens" in given:
        given["max_tokens"] = given.pop("max_completion_tokens")
    if unknown := [key for key in given if key not in _SAMPLING | _IGNORED]:
        raise PromptError(f"{unknown[0]!r} is not a key of a prompt")
    sampling = {key: value for key, value in given.items() if key in _SAMPLING and value is not None}
    _checked(sampling)
    if prompt is not None and raw:
        return BatchLine(custom_id, None, prompt, sampling)
    first = [] if system is None else [{"role": "system", "content": system}]
    return BatchLine(custom_id, [*first, *(messages or [{"role": "user", "content": prompt}])], prompt or "", sampling)


def _checked(sampling: dict[str, Any]) -> None:
    try:
        SamplingParams(**sampling)
    except TypeError as error:
        raise SamplingError(str(error)) from None


def answer_batch(llm: Model, lines: Sequence[BatchLine], params: SamplingParams, *, quiet: bool) -> int:
    """Print one JSON object per prompt, in order, and return the exit code. A prompt that fails has an "error" instead of an answer."""
    code, done = 0, 0
    with nullcontext() if quiet else stages() as shown:
        for start in range(0, len(lines), _TOGETHER):
            group = lines[start : start + _TOGETHER]
            for line, found in zip(group, _answers(llm, group, params), strict=True):
                code = FAILED if isinstance(found, MLXInferError) else code
                answer = {"error": str(found)} if isinstance(found, MLXInferError) else as_object(found)
                click.echo(json.dumps({"custom_id": line.custom_id, **answer}, ensure_ascii=False))
            done += len(group)
            if shown is not None:
                shown.tell("answering", done, len(lines), "prompts")
    return code


def _answers(llm: Model, lines: Sequence[BatchLine], params: SamplingParams) -> Iterator[Sequence[Completion] | MLXInferError]:
    """Yield the answers to each prompt, or its error. Neighbours with the same parameters run together."""
    for sampling, group in groupby(lines, lambda line: line.sampling):
        own = replace(params, **sampling)
        prompts = [_prompt(llm, line) for line in group]
        sound = [prompt for prompt in prompts if not isinstance(prompt, MLXInferError)]
        answers = iter(_generated(llm, sound, own))
        for prompt in prompts:
            yield prompt if isinstance(prompt, MLXInferError) else next(answers)


def _prompt(llm: Model, line: BatchLine) -> Any:
    try:
        if line.messages is not None and llm.tokenizer.chat_template is not None:
            return llm.chat_prompt(line.messages)
        if not line.text:
            raise PromptError(f"{llm.name} has no chat template: use prompt instead of messages")
        return llm.tokenizer.encode(line.text)
    except MLXInferError as error:
        return error


def _generated(llm: Model, prompts: Sequence[Any], params: SamplingParams) -> list[Sequence[Completion] | MLXInferError]:
    """Return `n` answers to each prompt, or its error. If a prompt is refused, which is before any is computed, each is tried alone."""
    if isinstance(llm, RemoteModel):  # the server runs them together
        with ThreadPoolExecutor(MAX_NUM_SEQS) as pool:
            return list(pool.map(lambda prompt: _alone(llm, prompt, params), prompts))
    try:
        found = llm.generate(prompts, params) if prompts else []
    except (PromptError, SamplingError):
        return [_alone(llm, prompt, params) for prompt in prompts]
    return [found[start : start + params.n] for start in range(0, len(found), params.n)]


def _alone(llm: Model, prompt: Any, params: SamplingParams) -> Sequence[Completion] | MLXInferError:
    try:
        return llm.generate([prompt], params)
    except (PromptError, SamplingError) as error:
        return error
