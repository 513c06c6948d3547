"""Records finished steps so that an interrupted conversion resumes.

A *unit* is a step with a fixed result: a written tensor, a calibrated block of layers. Ask before the step, and record it afterwards:

    if (values := journal.done("tensor model.norm.weight")) is None:
        ...  # compute, and write through `ShardWriter`
        journal.record("tensor model.norm.weight", values, writer.spans(parts))

Arrays for later steps, such as the hidden states between two blocks, are kept in separate files, which are not part of the result:

    found = journal.load("states 7")       # (arrays, values), or None
    journal.save("states 7", {"x": x}, {"tokens": 4096})
    journal.forget("states 6")             # no longer needed

The journal is a file in the staging directory with one line per unit. Each line starts with its own digest: a line torn by a kill or a full
disk counts as absent. A unit counts as done only while the bytes and arrays it wrote have their recorded digests. So nothing must be synced
to disk: after a power failure, lost steps are repeated. The first line is the key, which is everything that the result depends on: options,
versions, source files. A journal with another key is not continued.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from ...errors import DestinationError, one_line
from ...util.dataclass import dataclass

Values = dict[str, Any]
"""JSON values; floats are restored bit for bit."""

_CHUNK = 1 << 22
_NAME = "journal"
STATES = "states"
"""Folder of the files that `save` writes, in the staging directory."""


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive bytes of a file."""

    file: str
    """Path below the staging directory."""
    start: int
    """First byte."""
    stop: int
    """Byte after the last one."""
    digest: str
    """`digest_of` the bytes."""


class Journal:
    """The journal in a staging directory, open in one process at a time. Raises OSError if the disk is full."""

    def __init__(self, folder: Path, key: Mapping[str, Any]) -> None:
        """Open the journal in this directory if it has this key, otherwise start a new one. `changed` then says what differs.

        Raises `DestinationError` if another process has it open.
        """
        self._folder = folder
        self._file = (folder / _NAME).open("a+b")
        self._lock()
        self._key = json.loads(json.dumps(key))
        self._units: dict[str, tuple[Values, list[Span]]] = {}
        self._checked: set[str] = set()
        self.changed: str | None = None
        """Reason why an earlier run's steps are not used; None if they are, or if there are none."""
        self._begin()
        self.resumed = bool(self._units)
        """True if steps of an earlier run are present."""
        self.found = len(self._units)
        """Number of these steps."""

    @property
    def count(self) -> int:
        """Number of recorded steps."""
        return len(self._units)

    def done(self, unit: str) -> Values | None:
        """Return the values recorded for a unit if it is done and its bytes are unchanged; None otherwise."""
        if unit not in self._units:
            return None
        values, spans = self._units[unit]
        if unit not in self._checked:
            if not all(self._holds(span) for span in spans):
                del self._units[unit]
                return None
            self._checked.add(unit)
        return values

    def record(self, unit: str, values: Values | None = None, spans: Iterable[Span] = ()) -> None:
        """Record that a unit is done, with its values and the bytes that it wrote."""
        listed = list(spans)
        entry = {"unit": unit, "values": values or {}, "spans": [[s.file, s.start, s.stop, s.digest] for s in listed]}
        self._append(entry)
        self._units[unit] = (json.loads(json.dumps(values or {})), listed)
        self._checked.add(unit)

    def save(self, unit: str, arrays: Mapping[str, mx.array], values: Values | None = None) -> None:
        """Record a unit with arrays, which `load` returns bit for bit."""
        path = self._path(unit)
        path.parent.mkdir(exist_ok=True)
        try:
            mx.save_safetensors(str(path), dict(arrays) or {"": mx.zeros(1)})
        except RuntimeError as error:  # MLX raises nothing else; expect a full disk
            raise OSError(errno.EIO, one_line(error)) from None
        size = path.stat().st_size
        self.record(unit, values, [Span(str(path.relative_to(self._folder)), 0, size, digest_of(path, 0, size))])

    def load(self, unit: str) -> tuple[dict[str, mx.array], Values] | None:
        """Return the arrays and values of a saved unit; None if it was not saved or its file is damaged."""
        values = self.done(unit)
        if values is None:
            return None
        arrays: dict[str, mx.array] = mx.load(str(self._path(unit)))  # type: ignore[assignment]
        mx.eval(list(arrays.values()))
        arrays.pop("", None)
        return arrays, values

    def forget(self, unit: str) -> None:
        """Delete a saved unit, which then counts as not done. Unknown units are ignored."""
        self._units.pop(unit, None)
        self._path(unit).unlink(missing_ok=True)

    def close(self) -> None:
        """Release the journal for other processes."""
        self._file.close()

    def _path(self, unit: str) -> Path:
        return self._folder / STATES / f"{hashlib.blake2b(unit.encode(), digest_size=12).hexdigest()}.safetensors"

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise DestinationError(
                f"another conversion is writing into {self._folder}: wait for it, or choose another destination"
            ) from None

    def _begin(self) -> None:
        """Read the complete lines, cut off the rest, and compare the key."""
        self._file.seek(0)
        lines, end = [], 0
        for line in self._file:
            entry = _read_line(line)
            if entry is None:
                break
            lines.append(entry)
            end += len(line)
        before = lines[0].get("key") if lines else None
        if before != self._key:
            self.changed = _difference(before, self._key) if before else None
            self._file.truncate(0)
            self._append({"key": self._key})
            return
        self._file.truncate(end)
        for entry in lines[1:]:
            self._units[entry["unit"]] = (entry["values"], [Span(*span) for span in entry["spans"]])

    def _append(self, entry: Mapping[str, Any]) -> None:
        text = json.dumps(entry).encode()
        line = _digest(text).encode() + b" " + text + b"\n"
        while line:  # appended without a buffer: a kill loses no recorded unit
            line = line[os.write(self._file.fileno(), line) :]

    def _holds(self, span: Span) -> bool:
        path = self._folder / span.file
        try:
            return path.stat().st_size >= span.stop and digest_of(path, span.start, span.stop) == span.digest
        except OSError:
            return False


def digest_of(path: Path, start: int, stop: int) -> str:
    """Return the digest of the bytes `start .. stop` of a file, read in pieces. Raises OSError."""
    digest = new_digest()
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while start < stop:
            piece = file.read(min(_CHUNK, stop - start))
            if not piece:
                break
            digest.update(piece)
            start += len(piece)
    return digest.hexdigest()


def new_digest() -> hashlib.blake2b:
    """Return an empty digest of the kind in `Span.digest`."""
    return hashlib.blake2b(digest_size=16)


def _digest(text: bytes) -> str:
    return hashlib.blake2b(text, digest_size=16).hexdigest()


def _read_line(line: bytes) -> dict[str, Any] | None:
    digest, _, text = line.rstrip(b"\n").partition(b" ")
    if not line.endswith(b"\n") or digest != _digest(text).encode():
        return None
    entry: dict[str, Any] = json.loads(text)
    return entry


def _difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return the first difference of two keys, such as "bits was 3 and is 4", or the name of a changed file."""
    for name in sorted(before.keys() | now.keys()):
        old, new = before.get(name), now.get(name)
        if old == new:
            continue
        if isinstance(old, dict) and isinstance(new, dict) and name != "files":
            return _difference(old, new)
        if isinstance(old, dict) and isinstance(new, dict):
            changed = sorted(file for file in old.keys() | new.keys() if old.get(file) != new.get(file))
            return f"{changed[0]} has changed"
        return f"{name} was {old} and is {new}"
    return "nothing"


class JournalBookmarks:
    """Implements `blockwise.Bookmarks` with the journal of a conversion."""

    def __init__(self, journal: Journal, name: str, found: dict[str, mx.array] | None = None) -> None:
        """Create bookmarks for the reading called `name`.

        `found` has the arrays found so far by name; it is saved with the states and filled by `load`.
        """
        self._journal, self._name, self._last = journal, name, 0
        self._found = {} if found is None else found

    def load(self) -> tuple[int, list[mx.array]] | None:
        place = self._journal.done(self._name)
        kept = self._journal.load(self._unit(int(place["parts"]))) if place else None
        if kept is None or place is None:
            return None
        self._last = int(place["parts"])
        self._found.clear()
        self._found.update({name[1:]: array for name, array in kept[0].items() if name.startswith("/")})
        return self._last, [kept[0][str(number)] for number in range(len(kept[0]) - len(self._found))]

    def save(self, parts: int, states: list[mx.array]) -> None:
        found = {f"/{name}": array for name, array in self._found.items()}
        self._journal.save(self._unit(parts), {str(number): state for number, state in enumerate(states)} | found)
        self._journal.record(self._name, {"parts": parts})
        self.forget()
        self._last = parts

    def forget(self) -> None:
        """Delete the last saved states."""
        self._journal.forget(self._unit(self._last))

    def _unit(self, parts: int) -> str:
        return f"{self._name} {parts}"
