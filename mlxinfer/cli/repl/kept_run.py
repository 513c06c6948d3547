"""The conversation of `mlxinfer run`: kept for a later `run -c` or `chat -c`, which continue the last one."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from ...errors import MLXInferError
from ...types import Completion, SamplingParams
from ..common.console import tell
from ..common.pictures import PictureFile
from .pictures import Pictures
from .saved import Archive, Saved, source_of

if TYPE_CHECKING:
    from ...engine.llm import LLM
    from ..remote.remote_model import RemoteModel


@dataclass(frozen=True, slots=True)
class KeptRun:
    """The turns before a prompt, and the file for those after."""

    before: Saved
    """Conversation so far; without turns if the prompt starts one."""
    archive: Archive | None
    """Keeps the conversation; None to keep nothing."""

    def messages(self, text: str, system: str | None) -> list[dict[str, Any]]:
        """Return the messages of the model for a text. A picture that is gone is reported."""
        pictures = Pictures()
        for note in pictures.read_again(self.before.turns):
            tell(f"note: {note}")
        system = self.before.system if system is None else system
        first = [] if system is None else [{"role": "system", "content": system}]
        return [*first, *map(pictures.message, self.before.turns), {"role": "user", "content": text}]

    def keep(
        self, llm: LLM | RemoteModel, model: str, asked: tuple[str, str | None, Sequence[PictureFile]], answers: Sequence[Completion]
    ) -> None:
        """Add the prompt (text, system message, pictures) and its answer to the conversation, unless the answers are several."""
        text, system, pictures = asked
        entries = [{"path": picture.path, "sha256": sha256(picture.data).hexdigest()} for picture in pictures]
        if self.archive is None or len(answers) != 1 or not all(entry["path"] for entry in entries):
            return
        turn = {"role": "assistant", "content": answers[0].text}
        reasoning = {"reasoning": answers[0].reasoning} if answers[0].reasoning else {}
        images = {"images": entries} if entries else {}
        turns = [*self.before.turns, {"role": "user", "content": text, **images}, {**turn, **reasoning}]
        saved = replace(self.before, turns=turns, model=llm.name, source=source_of(model))
        with suppress(MLXInferError):  # a full disk loses no answer
            self.archive.keep(saved if system is None else replace(saved, system=system))


def kept_run(resume: bool, keep: bool | None, params: SamplingParams) -> KeptRun:
    """Return the last conversation if `resume`, else a new one. By default it is kept on a terminal, or if it was kept before.

    Raises `MLXInferError` without a conversation to continue.
    """
    archive = Archive()
    if keep is None:
        keep = resume or (sys.stdin.isatty() and sys.stdout.isatty())
    if not resume:
        return KeptRun(Saved([], params=replace(params, n=1, logprobs=None, structure=None, adapter=None)), archive if keep else None)
    path, saved = archive.last()
    archive.follow(path)
    return KeptRun(saved, archive if keep else None)
