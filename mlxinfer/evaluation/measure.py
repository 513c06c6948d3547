"""Reads windows of text with a model and compares its predictions with a teacher's or with the text."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from .. import kernels_cpu
from ..cache.base import BidirectionalSpec
from ..engine.llm import LLM
from ..errors import EvaluationError, MemoryPlanError, MLXInferError, TokenizerError, UnsupportedModelError
from ..loading.find.fingerprint import fingerprint
from ..loading.find.resolve import resolve
from ..loading.formats import parse_dtype
from ..loading.load import load_tokenizer, open_checkpoint
from ..loading.weights import CheckpointWeights
from ..models import architecture, build, supports
from ..models.block import AnyBlock
from ..models.blockwise import BlockReader, batches
from ..nn.packing import settle
from ..tokenizer.no_tokenizer import NoTokenizer
from ..util.cache_dir import cache_dir
from ..util.device import device_memory
from .figures import Difference, Figures, Scores, difference, figures
from .probabilities import kl_divergence, logprobs_of
from .reference_logprobs import Teacher
from .texts import SHIPPED_NAME, Windows, cut, read_texts, shipped

POSITIONS, LENGTH = 4_096, 256
"""Default number of positions, and tokens of a window."""
_IN_MEMORY = 0.1
"""Largest share of memory for a teacher's log-probabilities; larger ones are kept on disk."""
_STREAMED = {"dtype", "kv", "memory_gb"}
"""Settings that also apply to models read in blocks."""
_PIECE = 64
"""Rows of probabilities compared at once."""
_LOGIT_ROWS = 256
"""Positions whose logits are computed at once when a model is read in blocks."""

Tell = Callable[[str, int, int], None]
"""Receives (stage, positions done, positions in all)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Text to read, and settings for reading it."""

    text: str | Path | None = None
    """A text file, folder or data set (`texts.read_texts`); None for the shipped text."""
    positions: int = POSITIONS
    """Positions to compare, at most."""
    length: int = LENGTH
    """Tokens of a window."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Further keywords of `LLM` for every model, such as `dtype`; float32 by default."""
    students: dict[str, Any] = field(default_factory=dict)
    """Keywords of `LLM` for students only, such as `kv`."""
    cache: Path | None = None
    """Folder that keeps a teacher's log-probabilities for later runs; None keeps them for this run only."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Students compared with a teacher on one text."""

    teacher: Figures
    """The teacher's figures."""
    students: tuple[Figures, ...]
    """The students' figures, in the order given."""
    differences: tuple[Difference, ...]
    """Each student but the first against the previous one."""
    scores: tuple[Scores, ...]
    """Scores of the students at each position."""
    text: Windows
    """The windows read."""
    notes: tuple[str, ...]
    """Messages for the user."""


def compare(teacher: str | Path, students: Sequence[str | Path], reading: Reading, tell: Tell | None = None) -> Comparison:
    """Compare each student with the teacher.

    One model is loaded at a time. The teacher's log-probabilities stay in memory, or on disk if they are large. Raises `MLXInferError`, and
    `EvaluationError` for models of different vocabularies.
    """
    sources = [EvaluatedModel.of(name) for name in (teacher, *students)]
    windows, notes = windows_of(sources[0], reading)
    for source in sources[1:]:
        _check_vocabulary(sources[0], source, windows, reading)
    with ExitStack() as stack:
        record = _teacher(sources[0], windows, reading, stack, tell)
        scores = [_score(source, windows, record, reading, tell) for source in sources[1:]]
        first = figures(sources[0].name, sources[0].size(), record.scores)
        found = [figures(s.name, s.size(), each, record.scores) for s, each in zip(sources[1:], scores, strict=True)]
    pairs = zip(sources[1:], scores, sources[2:], scores[1:], strict=False)
    differences = tuple(difference(after.name, later, before.name, earlier) for before, earlier, after, later in pairs)
    return Comparison(first, tuple(found), differences, tuple(scores), windows, notes)


def perplexity(model: str | Path, reading: Reading, tell: Tell | None = None) -> tuple[Figures, Windows, tuple[str, ...]]:
    """Return a model's figures on a text, the text, and messages for the user. Raises `MLXInferError`."""
    source = EvaluatedModel.of(model)
    windows, notes = windows_of(source, reading)
    surprise, number = np.full(windows.positions, np.nan), np.zeros(windows.positions, np.int32)
    for index, first, ids, logprobs in _read_windows(
        source, windows, reading.settings, partial(_tell_progress, tell, f"reading {source.name}")
    ):
        surprise[first : first + len(ids)] = _surprise(logprobs, ids)
        number[first : first + len(ids)] = index
    return figures(source.name, source.size(), Scores(number, surprise)), windows, notes


@dataclass(frozen=True, slots=True)
class EvaluatedModel:
    """A model on this machine."""

    path: Path
    """Directory or GGUF file."""
    name: str
    """Name to show."""

    @classmethod
    def of(cls, what: str | Path) -> EvaluatedModel:
        """Resolve a model that a user names. Raises `ModelNotFoundError` and others."""
        found = resolve(what)
        return cls(found.path, found.name)

    def size(self) -> tuple[int, int]:
        """Return the bytes of all tensors on disk, and the number of weights."""
        checkpoint = open_checkpoint(self.path)
        try:
            names = list(checkpoint.names())
            return sum(map(checkpoint.nbytes, names)), sum(math.prod(checkpoint.shape(name)) for name in names)
        finally:
            checkpoint.close()

    def windows(self, reading: Reading, texts: Sequence[str], name: str) -> Windows:
        """Cut the texts in this model's tokens. Raises `TextError`, and `TokenizerError` without a tokenizer."""
        checkpoint = open_checkpoint(self.path)
        try:
            tokenizer = load_tokenizer(checkpoint)
        finally:
            checkpoint.close()
        if isinstance(tokenizer, NoTokenizer):
            raise TokenizerError(f"{self.name} has no tokenizer, so that no text can be read with it: copy the files of its source there")
        return cut(tokenizer, texts, name, positions=reading.positions, length=reading.length)


def _texts(reading: Reading) -> tuple[list[str], str]:
    if reading.text is None:
        return shipped(), SHIPPED_NAME
    return read_texts(reading.text, reading.positions), str(reading.text)


def windows_of(source: EvaluatedModel, reading: Reading) -> tuple[Windows, tuple[str, ...]]:
    """Return the windows to read, and messages for the user. Raises `TextError`, `TokenizerError`."""
    windows = source.windows(reading, *_texts(reading))
    short = windows.positions < min(reading.positions, POSITIONS) - reading.length // 2
    note = f"{windows.name} gives {windows.positions} positions, not {reading.positions}: give a longer one for surer figures"
    return windows, (note,) if short else ()


def _check_vocabulary(teacher: EvaluatedModel, student: EvaluatedModel, windows: Windows, reading: Reading) -> None:
    if student.windows(reading, *_texts(reading)).digest != windows.digest:
        raise EvaluationError(
            f"{student.name} splits text into other tokens than {teacher.name}, so that their probabilities cannot be compared: "
            "compare models of one vocabulary, or each one's perplexity (mlxinfer eval ppl)"
        )


@contextmanager
def open_model(source: EvaluatedModel, windows: Windows, settings: dict[str, Any]) -> Iterator[LLM]:
    """Yield the model, loaded for these windows. Raises `MLXInferError`."""
    plain = {"dtype": "float32", "prefix_cache": False, "speculate": False, "max_num_seqs": 1}
    longest = max(len(window.ids) for window in windows.windows)
    with LLM(source.path, **{**plain, "max_context": longest, **settings}) as llm:
        yield llm


Read = tuple[int, int, tuple[int, ...], mx.array]
"""Number of a window, its first position, its token ids, and float32 log-probabilities `[positions, vocab]` after each token."""


def _read_windows(source: EvaluatedModel, windows: Windows, settings: dict[str, Any], done: Callable[[int, int], None]) -> Iterator[Read]:
    """Read each window with the whole model or, if that does not fit in memory, with one block of layers at a time."""
    try:
        opened = ExitStack()
        llm = opened.enter_context(open_model(source, windows, settings))
    except MemoryPlanError:
        if not set(settings) <= _STREAMED or settings.get("kv", "16") != "16" or not can_stream(source.path):
            raise
        yield from _read_in_blocks(source, windows, settings, done)
        return
    with opened:
        for number, first, ids in _numbered_windows(windows):
            yield number, first, ids, logprobs_of(llm.logits(list(ids)))
            done(first + len(ids), windows.positions)


def _read_in_blocks(source: EvaluatedModel, windows: Windows, settings: dict[str, Any], done: Callable[[int, int], None]) -> Iterator[Read]:
    rows = streamed_logits(source.path, windows, parse_dtype(settings.get("dtype") or "float32"))
    for number, first, ids in _numbered_windows(windows):
        found, count = [], 0
        while count < len(ids):
            found.append(next(rows))
            count += found[-1].shape[0]
        yield number, first, ids, logprobs_of(mx.concatenate(found))
        done(first + len(ids), windows.positions)


def _numbered_windows(windows: Windows) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """Yield number, first position and token ids of each window."""
    first = 0
    for number, window in enumerate(windows.windows):
        yield number, first, window.ids
        first += len(window.ids)


def _surprise(logprobs: mx.array, ids: Sequence[int]) -> NDArray[np.float64]:
    """Return minus the log-probability of each next token `[positions]`; NaN for the last."""
    rows = mx.arange(len(ids) - 1)
    found = -np.array(logprobs[rows, mx.array(list(ids[1:]))], dtype=np.float64)
    return np.append(found, np.nan)


def _teacher(source: EvaluatedModel, windows: Windows, reading: Reading, stack: ExitStack, tell: Tell | None) -> Teacher:
    """Return the teacher's log-probabilities, from an earlier run if `reading.cache` has them."""
    about = {"model": fingerprint(source.path, sorted(map(str, reading.settings.items()))), "text": windows.digest}
    folder = None if reading.cache is None else reading.cache / f"{about['model'][:16]}-{windows.digest[:16]}"
    found = Teacher.find(folder, about) if folder else None
    if found is not None:
        return found
    record = None
    for number, first, ids, logprobs in _read_windows(
        source, windows, reading.settings, partial(_tell_progress, tell, f"reading {source.name}")
    ):
        if record is None:
            vocab = logprobs.shape[-1]
            record = Teacher(windows.positions, vocab, _record_folder(folder, windows.positions * vocab * 2, reading, stack), about)
        record.write(first, number, logprobs, _surprise(logprobs, ids))
    assert record is not None
    record.finish()
    return record


def _record_folder(folder: Path | None, nbytes: int, reading: Reading, stack: ExitStack) -> Path | None:
    """Return the folder for `nbytes`: the given one, None for memory, or a temporary one."""
    memory = min(reading.settings.get("memory_gb", math.inf) * 1e9, device_memory().usable)
    if folder is not None or nbytes <= _IN_MEMORY * memory:
        return folder
    try:
        cache_dir().mkdir(parents=True, exist_ok=True)
        return Path(stack.enter_context(tempfile.TemporaryDirectory(dir=cache_dir(), prefix="teacher-")))
    except OSError as error:
        raise EvaluationError(f"cannot write {cache_dir()}: {error.strerror or error}") from None


def _score(source: EvaluatedModel, windows: Windows, teacher: Teacher, reading: Reading, tell: Tell | None) -> Scores:
    kl, same, surprise = np.zeros(windows.positions), np.zeros(windows.positions, np.bool_), np.full(windows.positions, np.nan)
    settings = reading.settings | reading.students
    for _, first, ids, logprobs in _read_windows(source, windows, settings, partial(_tell_progress, tell, f"comparing {source.name}")):
        if logprobs.shape[-1] != teacher.vocab:
            ids_of = f"{source.name} has {logprobs.shape[-1]} token ids, its teacher {teacher.vocab}"
            raise EvaluationError(f"{ids_of}: models of different vocabularies cannot be compared")
        surprise[first : first + len(ids)] = _surprise(logprobs, ids)
        for begin, end in teacher.pieces(first, first + len(ids), _PIECE):
            kl[begin:end], same[begin:end] = _compare_rows(teacher, begin, end, logprobs[begin - first : end - first])
    return Scores(teacher.window, surprise, kl, same)


def _compare_rows(teacher: Teacher, begin: int, end: int, logprobs: mx.array) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Return KL divergences in nats, and True where the most likely token is the same, `[positions]` each."""
    kl = kl_divergence(teacher.read(begin, end), logprobs)
    return np.array(kl), np.array(mx.argmax(logprobs, axis=-1)) == teacher.top[begin:end]


def _tell_progress(tell: Tell | None, what: str, done: int, total: int) -> None:
    if tell:
        tell(what, done, total)


def can_stream(path: Path) -> bool:
    """True if the model at a resolved path has a graph here, so that it can be read block by block."""
    try:
        checkpoint = open_checkpoint(path)
    except MLXInferError:
        return False
    checkpoint.close()
    return supports(str(checkpoint.config.get("model_type")))


def streamed_logits(path: Path, windows: Windows, dtype: mx.Dtype, tell: Callable[[int], None] | None = None) -> Iterator[mx.array]:
    """Yield float32 logits `[rows, vocab]` of all windows in order, some rows of one window at a time.

    Memory has the embedding, the head, one block, and the windows' states `[positions, hidden]`. `tell` gets the number of finished blocks.
    Raises `MLXInferError` for a checkpoint that cannot be loaded, for a bidirectional model, and for a part that `BlockReader` does not
    know.
    """
    with closing(open_checkpoint(path, raw_blocks=kernels_cpu.in_use())) as checkpoint:
        plan, weights = architecture(checkpoint.config), CheckpointWeights(checkpoint, dtype)
        if any(isinstance(spec, BidirectionalSpec) for spec in plan.specs):
            raise UnsupportedModelError("this model reads texts from both ends, and predicts no next token that could be compared")
        reader = _Float32Reader(plan, batches([window.ids for window in windows.windows]), dtype)
        reader.tell = tell
        model = build(checkpoint.config, weights, ready=reader)
        weights.finish()
    model.joined = False  # the states are not normed yet
    states = mx.concatenate(reader.states)
    first = 0
    for window in windows.windows:
        last = first + len(window.ids)
        for start in range(first, last, _LOGIT_ROWS):
            logits = model.logits(states[start : min(start + _LOGIT_ROWS, last)])
            mx.eval(logits)
            yield logits
        first = last


class _Float32Reader(BlockReader):
    """Multiplies with float32 activations, and counts the blocks."""

    tell: Callable[[int], None] | None = None
    _blocks = 0

    def prepare(self, part: object) -> None:
        settle(part, precision="float32")

    def finish(self, part: object) -> None:
        super().finish(part)
        if isinstance(part, AnyBlock):
            self._blocks += 1
            if self.tell:
                self.tell(self._blocks)
