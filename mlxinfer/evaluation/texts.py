"""Texts to read (the shipped one, files, folders, cached data sets), and windows of tokens cut from them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import TextError

if TYPE_CHECKING:
    from ..tokenizer.tokenizer import Tokenizer

SHIPPED = Path(__file__).parent / "text" / "python.txt"
"""Pieces of Python's documentation and library, divided by form feeds. Its licence (PSF) is in the same folder."""
SHIPPED_NAME = "Python's documentation and library (shipped)"
_TEXT, _LINES, _TABLE = (".txt", ".md", ".rst", ".text"), (".jsonl", ".ndjson"), ".parquet"
_FIELDS = ("text", "content")
"""Fields of a record that may have its text; the first one present counts."""
_CHARACTERS = 24
"""Characters read per wanted token: several times as many as needed, so that windows come from all parts."""


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens that are read as one sequence from its beginning."""

    ids: tuple[int, ...]
    """Token ids, with the beginning-of-text token if the tokenizer adds one."""
    text: int
    """Number of the text it was cut from."""


@dataclass(frozen=True, slots=True)
class Windows:
    """Windows of tokens, and the name of their text."""

    windows: tuple[Window, ...]
    """The windows in order."""
    name: str
    """Name of the text, for people."""

    @property
    def positions(self) -> int:
        """Tokens in all windows; a prediction is compared after each."""
        return sum(len(window.ids) for window in self.windows)

    @property
    def digest(self) -> str:
        """SHA-256 of the ids, in hexadecimal."""
        text = json.dumps([window.ids for window in self.windows], separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def shipped() -> list[str]:
    """Return the pieces of the shipped text, about 3000 characters each."""
    return SHIPPED.read_text(encoding="utf-8").split("\f")


def cut(tokenizer: Tokenizer, texts: Iterable[str], name: str, *, positions: int, length: int) -> Windows:
    """Cut windows of `length` tokens, `positions` tokens in all, spread evenly over the texts.

    The first window of each text is taken, then the second of each, and so on; short texts give fewer. Raises `TextError` for fewer than
    two tokens.
    """
    rounds = [_windows(tokenizer.encode(text), tokenizer.bos_token_id, number, length) for number, text in enumerate(texts)]
    ordered = chain.from_iterable(([each[turn] for each in rounds if turn < len(each)]) for turn in range(max(map(len, rounds), default=0)))
    chosen: list[Window] = []
    for window in ordered:
        left = positions - sum(len(each.ids) for each in chosen)
        if left < 2:
            break
        chosen.append(Window(window.ids[:left], window.text))
    if not chosen:
        raise TextError(f"{name} has no text: give a longer one")
    return Windows(tuple(chosen), name)


def _windows(ids: list[int], bos: int | None, text: int, length: int) -> list[Window]:
    """Return whole windows, and the last one if it has at least half the length or is the only one."""
    begin = ids[:1] if ids and ids[0] == bos else []
    body, step = ids[len(begin) :], length - len(begin)
    cuts = [(*begin, *body[first : first + step]) for first in range(0, len(body), step)]
    return [Window(each, text) for number, each in enumerate(cuts) if len(each) > 1 and (number == 0 or len(each) * 2 >= length)]


def read_texts(what: str | Path, tokens: int) -> list[str]:
    """Return the texts of a file, of a folder's files, or of a data set in the hub's cache, as far as `tokens` tokens need them.

    A file is plain text (one text), JSON lines or Parquet (a text per record, in its field "text" or "content"). Raises `TextError`.
    """
    path, room = Path(what).expanduser(), tokens * _CHARACTERS
    if not path.exists():
        path = _cached_dataset(str(what))
    files = sorted(each for each in path.rglob("*") if _reader(each)) if path.is_dir() else [path]
    if not files:
        raise TextError(f"{what} has no texts: give .txt, .md, .jsonl or .parquet files")
    share, found = max(room // len(files), 1), []
    for file in files:
        reader = _reader(file)
        if reader is None:
            raise TextError(f"{file.name} is of no known kind: give plain text (.txt, .md), JSON lines (.jsonl) or Parquet (.parquet)")
        try:
            found += list(_up_to(reader(file), share))
        except OSError as error:
            raise TextError(f"cannot read {file}: {error.strerror or error}") from None
        except UnicodeDecodeError as error:
            raise TextError(f"{file} is not UTF-8 text (byte {error.start + 1}): convert it with iconv") from None
    if not any(text.strip() for text in found):
        raise TextError(f"{what} has no text in it")
    return [text for text in found if text.strip()]


def _up_to(texts: Iterable[str], characters: int) -> Iterator[str]:
    for text in texts:
        yield text[:characters]
        characters -= len(text)
        if characters <= 0:
            return


Reader = Callable[[Path], Iterable[str]]


def _reader(path: Path) -> Reader | None:
    """Return the reader of such a file; None for hidden and unknown files."""
    if path.is_dir() or path.name.startswith("."):
        return None
    if path.suffix in _LINES:
        return _json_lines
    if path.suffix == _TABLE:
        return _parquet_file
    return _text_file if path.suffix in _TEXT or not path.suffix else None


def _text_file(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8") as file:
        text = file.read(1 << 26)
    yield from text.split("\f")


def _json_lines(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                raise TextError(f"line {number} of {path} is not JSON") from None
            yield _text_of_record(record, f"line {number} of {path}")


def _text_of_record(record: Any, where: str) -> str:
    text = (
        record if isinstance(record, str) else next((record[name] for name in _FIELDS if isinstance(record, dict) and name in record), None)
    )
    if not isinstance(text, str):
        raise TextError(f"{where} has no text: a record needs a field {' or '.join(map(repr, _FIELDS))}")
    return text


def _parquet_file(path: Path) -> Iterator[str]:
    try:
        from pyarrow import parquet
    except ImportError:
        raise TextError(f"{path.name} is Parquet, which needs pyarrow: pip install pyarrow") from None
    with parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(256):
            yield from (_text_of_record(record, str(path)) for record in batch.to_pylist())


def _cached_dataset(what: str) -> Path:
    """Return the newest copy of a data set in the hub's cache. Downloads nothing."""
    if what.count("/") != 1 or what.startswith((".", "/", "~")):
        raise TextError(f"no such file or folder: {what}")
    from huggingface_hub import constants, errors, scan_cache_dir

    try:
        repos = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except errors.CacheNotFound:
        repos = frozenset()
    found = [repo for repo in repos if repo.repo_type == "dataset" and repo.repo_id == what]
    revisions = sorted(found[0].revisions, key=lambda revision: revision.last_modified) if found else []
    if not revisions:
        raise TextError(f"{what} is no file here, and no data set in the hub's cache: hf download --repo-type dataset {what}")
    return revisions[-1].snapshot_path


def shared_share(windows: Windows, others: Sequence[Sequence[int]], run: int = 24) -> float:
    """Return the share of windows that have `run` consecutive tokens in common with the other texts; 0 if they are disjoint."""
    runs = partial(_runs, run=run)
    known = set(chain.from_iterable(map(runs, others)))
    return sum(not known.isdisjoint(runs(window.ids)) for window in windows.windows) / len(windows.windows)


def _runs(ids: Sequence[int], run: int) -> Iterator[tuple[int, ...]]:
    return (tuple(ids[first : first + run]) for first in range(len(ids) - run + 1))
