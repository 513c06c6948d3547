"""Saved conversations: files of /save, and files in the state folder that a chat updates after each turn."""

from __future__ import annotations

import json
import os
import secrets
import stat
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from ...errors import MLXInferError
from ...types import SamplingParams

_IMAGE = ("path", "sha256")
MOST_KEPT = 1000
"""Maximum conversations in the state folder; the least recently used ones are deleted."""


@dataclass(frozen=True, slots=True)
class Saved:
    """Contents of a saved conversation."""

    turns: list[dict[str, Any]]
    """Messages as `{"role": ..., "content": ...}`, without the system message. "images" has the path and SHA-256 of each picture."""
    system: str | None = None
    params: SamplingParams | None = None
    """Sampling parameters; None if the file has none."""
    model: str = ""
    """Name of the model; "" if unknown."""
    source: str = ""
    """Source of the model: an absolute path, an alias or a hub id."""
    title: str = ""
    """Title that the user chose; "" for the first message."""

    @property
    def subject(self) -> str:
        """Return the title, or the first message."""
        return self.title or next((turn["content"] for turn in self.turns if turn["role"] == "user"), "")

    def has(self, text: str) -> bool:
        """Return True if title and messages contain every word of the text."""
        content = "\n".join([self.title, *(turn["content"] for turn in self.turns)]).casefold()
        return all(word in content for word in text.casefold().split())


def source_of(model: str) -> str:
    """Return the source of a model for `Saved`: an absolute path if `model` is one."""
    path = os.path.expanduser(model)
    return os.path.abspath(path) if os.path.exists(path) else model


def state_folder() -> Path:
    """Return the user's state folder (XDG), without creating it."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "mlxinfer"
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "mlxinfer"


def read(path: Path) -> Saved:
    """Read a saved conversation or any JSON object with `messages`. Raises `MLXInferError` with the missing part."""
    try:
        return _parsed(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise MLXInferError(f"cannot read {path}: {error.strerror}") from error
    except json.JSONDecodeError as error:
        raise MLXInferError(f"{path} is not a saved conversation: no valid JSON in line {error.lineno}") from error
    except UnicodeDecodeError as error:
        raise MLXInferError(f"{path} is not a saved conversation: it is not UTF-8 text") from error
    except (ValueError, RecursionError, MLXInferError) as error:
        raise MLXInferError(f"{path} is not a saved conversation: {error}") from error


def _parsed(content: Any) -> Saved:
    if not isinstance(content, dict) or not isinstance(content.get("messages"), list):
        raise ValueError('it needs an object with a list "messages"')
    turns = [_turn(number, message) for number, message in enumerate(content["messages"], 1)]
    system = content.get("system")
    if system is None and turns and turns[0]["role"] == "system":
        system = turns.pop(0)["content"]
    if not isinstance(system, (str, type(None))):
        raise ValueError('"system" must be a text or null')
    params = content.get("params")
    names = (content.get(name) for name in ("model", "source", "title"))
    model, source, title = (name if isinstance(name, str) else "" for name in names)
    return Saved(turns, system, None if params is None else _params(params), model, source, title)


def _turn(number: int, message: Any) -> dict[str, Any]:
    turn: dict[str, Any] = {}
    for name in ("role", "content"):
        text = message.get(name) if isinstance(message, dict) else None
        if not isinstance(text, str):
            raise ValueError(f'message {number} has no text as its "{name}"')
        turn[name] = text
    calls = message.get("tool_calls")
    if isinstance(calls, list) and all(isinstance(call, dict) and isinstance(call.get("function"), dict) for call in calls):
        turn["tool_calls"] = calls
    images = message.get("images")
    if isinstance(images, list) and all(isinstance(image, dict) and {*map(type, map(image.get, _IMAGE))} == {str} for image in images):
        turn["images"] = [{name: image[name] for name in _IMAGE} for image in images]
    return turn | {name: message[name] for name in ("reasoning", "tool_call_id", "name") if isinstance(message.get(name), str)}


def _params(saved: Any) -> SamplingParams:
    if not isinstance(saved, dict):
        raise ValueError('"params" must be an object')
    try:
        if saved.get("logit_bias"):
            saved = saved | {"logit_bias": {int(key): bias for key, bias in saved["logit_bias"].items()}}
        return SamplingParams(**saved)
    except (TypeError, AttributeError) as error:
        raise ValueError(f'"params" are not sampling parameters ({error})') from error


def save(path: Path, saved: Saved, *, replace: bool = False) -> None:
    """Write a conversation to the user's file. Raises `MLXInferError` instead of losing existing data.

    Only a saved conversation is replaced, and only with `replace`. A link stays a link, and its target keeps its permissions.
    """
    if not saved.turns:
        raise MLXInferError("Nothing to save: no message has been sent yet.")
    path = Path(os.path.realpath(path))
    mode = 0o600
    if path.exists():
        mode = stat.S_IMODE(path.stat().st_mode)
        try:
            kept = read(path)
        except MLXInferError as error:
            raise MLXInferError(f"{path} exists and is not a saved conversation: choose another name") from error
        if not replace:
            raise MLXInferError(f"{path} holds {messages(kept.turns)} already: /save! replaces them")
    _write(path, saved, mode)


def _write(path: Path, saved: Saved, mode: int = 0o600) -> None:
    """Write a temporary file in the same folder, then rename it. Raises `MLXInferError`."""
    temporary = None
    params = asdict(saved.params) if saved.params else None
    content: dict[str, Any] = {"title": saved.title, "model": saved.model, "source": saved.source, "system": saved.system}
    content |= {"messages": saved.turns, "params": params}
    try:
        with NamedTemporaryFile("w", dir=path.parent, prefix=".", delete=False, encoding="utf-8") as file:
            temporary = Path(file.name)
            json.dump(content, file, ensure_ascii=False, indent=1)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(mode)
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            with suppress(OSError):
                temporary.unlink()
        raise MLXInferError(f"cannot write {path}: {error.strerror}") from error


def messages(turns: list[dict[str, Any]]) -> str:
    """Return "1 message", "2 messages" and so on."""
    return f"{len(turns)} message{'' if len(turns) == 1 else 's'}"


class Archive:
    """File of the running conversation in the state folder, created with the first turn."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or state_folder() / "conversations"
        self._path: Path | None = None
        self._seen: tuple[int, int] | None = None

    def keep(self, saved: Saved) -> None:
        """Write the present conversation. Raises `MLXInferError`."""
        if not saved.turns:
            return
        # Another chat may have continued the same conversation; neither may overwrite the other's turns.
        if self._path is None or _identity(self._path) != self._seen:
            self._path = self._new_path()
        _write(self._path, saved)
        self._seen = _identity(self._path)

    def follow(self, path: Path) -> None:
        """Continue in a file of this folder."""
        self._path, self._seen = path, _identity(path)

    def renew(self) -> None:
        """Use a new file for the next conversation."""
        self._path = None

    def files(self) -> list[Path]:
        """Return all conversations, most recently used first."""
        found = []
        for path in self._folder.glob("*.json"):
            with suppress(OSError):
                found.append((path.stat().st_mtime_ns, path))
        return [path for _, path in sorted(found, reverse=True)]

    def latest(self) -> Path:
        """Return the most recent conversation. Raises `MLXInferError` without one."""
        files = self.files()
        if not files:
            raise MLXInferError("Nothing to continue: no conversation has been kept yet.")
        return files[0]

    def last(self) -> tuple[Path, Saved]:
        """Return the most recent conversation with its file. Raises `MLXInferError` without one."""
        path = self.latest()
        return path, read(path)

    def delete(self, path: Path) -> None:
        """Delete a conversation, but not the present one. Raises `MLXInferError`."""
        if path == self._path:
            raise MLXInferError("This is the present conversation: /new starts another one.")
        try:
            path.unlink()
        except OSError as error:
            raise MLXInferError(f"cannot delete {path}: {error.strerror}") from error

    def lines(self, most: int = 20, text: str = "") -> list[str]:
        """Return one line per conversation that has the text, numbered from the most recently used one of all."""
        found: list[str] = []
        for number, path in enumerate(self.files(), 1):
            if len(found) == most:
                break
            if not text:
                found.append(f"{number:>3}  {line_of(path)}")
            else:
                with suppress(MLXInferError):
                    if read(path).has(text):
                        found.append(f"{number:>3}  {line_of(path)}")
        return found or [f"No kept conversation has {text!r}." if text else "No conversation has been kept yet."]

    def _new_path(self) -> Path:
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise MLXInferError(f"cannot write {self._folder}: {error.strerror}") from error
        for old in self.files()[MOST_KEPT - 1 :]:
            with suppress(OSError):
                old.unlink()
        return self._folder / f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}.json"


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def line_of(path: Path) -> str:
    """Return a line about a kept conversation."""
    try:
        saved = read(path)
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(path.stat().st_mtime))
    except (MLXInferError, OSError):
        return f"{path.name} cannot be read"
    return f"{when}  {saved.model}, {messages(saved.turns)}: {shortened(saved.subject, 50)}"


def export(path: Path, saved: Saved) -> None:
    """Write a conversation as Markdown to a new file. Raises `MLXInferError`."""
    if not saved.turns:
        raise MLXInferError("Nothing to export: no message has been sent yet.")
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(as_markdown(saved))
    except FileExistsError:
        raise MLXInferError(f"{path} exists: choose another name") from None
    except OSError as error:
        raise MLXInferError(f"cannot write {path}: {error.strerror}") from error


def as_markdown(saved: Saved) -> str:
    """Return a conversation as Markdown: a heading for each message, reasoning folded."""
    parts = [f"# {shortened(saved.subject, 80)}"]
    if saved.system:
        parts += ["## System", saved.system]
    for turn in saved.turns:
        role = turn["role"]
        parts.append(f"## {'You' if role == 'user' else saved.model or 'Assistant' if role == 'assistant' else turn.get('name') or 'Tool'}")
        parts += [f"![]({Path(entry['path']).as_uri()})" for entry in turn.get("images", ())]
        if turn.get("reasoning"):
            parts += ["<details><summary>Reasoning</summary>", turn["reasoning"].strip(), "</details>"]
        if turn["content"].strip():
            parts.append(turn["content"].strip())
        for call in turn.get("tool_calls", ()):
            parts.append(f"```json\n{json.dumps(call['function'], ensure_ascii=False)}\n```")
    return "\n\n".join(parts) + "\n"


def shortened(text: str, most: int) -> str:
    """Return the start of a text on one line."""
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 1].rstrip() + "…"
