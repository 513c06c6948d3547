"""Takes out of a text what says whose machine it comes from: names, paths, keys."""

from __future__ import annotations

import getpass
import os
import platform
import re
import socket
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)
_SECRET_VALUE = re.compile(r"\b(?:hf|sk|ghp|gho|github_pat)[-_][A-Za-z0-9_-]{8,}")
_HOMES = re.compile(r"(?:/private)?/(?:Users|home)/[^/\s:;,'\"]+")
_NETWORK = re.compile(r"\b\w+://[^\s/@]+@")
HIDDEN = "(hidden)"
_LEAST_NAME = 2
"""Letters of a name that are looked for: a single letter would be found everywhere."""


def without_private(text: str) -> str:
    """The text with the home directory as `~`, the user's and the machine's name, keys and passwords hidden."""
    for value in _secrets(os.environ):
        text = text.replace(value, HIDDEN)
    text = _SECRET_VALUE.sub(HIDDEN, text)
    text = _NETWORK.sub(f"{HIDDEN}@", text)
    for home in _homes():
        text = re.sub(re.escape(home) + r"(?=[/\s:;,'\")]|$)", "~", text, flags=re.MULTILINE)
    text = _HOMES.sub("~", text)
    for name, instead in _names():
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", instead, text, flags=re.IGNORECASE)
    return text


def settings_of(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that MLX and this project read, by name; of keys only that they are set."""
    chosen = {name: value for name, value in sorted(environment.items()) if name.startswith("MLX")}
    return {name: HIDDEN if _SECRET.search(name) else value for name, value in chosen.items()}


def _secrets(environment: Mapping[str, str]) -> Iterator[str]:
    """Values of variables that sound like keys, whoever reads them."""
    yield from sorted((value for name, value in environment.items() if _SECRET.search(name) and len(value) >= 6), key=len, reverse=True)


def _homes() -> list[str]:
    """The home directory in all its spellings, and the user's own directory for temporary files, longest first."""
    found = {os.path.expanduser("~"), os.environ.get("HOME", ""), str(Path.home()), os.path.realpath(os.path.expanduser("~"))}
    found |= {tempfile.gettempdir()} if len(Path(tempfile.gettempdir()).parts) > 3 else set()
    return sorted((home for home in found if home not in ("", "/")), key=len, reverse=True)


def _names() -> list[tuple[str, str]]:
    """Names of the user and of the machine, with what stands for them."""
    users = {os.environ.get("USER", ""), os.environ.get("LOGNAME", "")}
    with suppress(ImportError, KeyError, OSError):  # a user without an entry in the system's list
        users.add(getpass.getuser())
    with suppress(ImportError, KeyError):
        import pwd

        users |= set(re.split(r"[\s,]+", pwd.getpwuid(os.getuid()).pw_gecos))
    hosts = {platform.node(), socket.gethostname(), platform.node().partition(".")[0]}
    pairs = [(name, "USER") for name in users] + [(name, "HOST") for name in hosts]
    pairs = [(name, instead) for name, instead in pairs if len(name) >= _LEAST_NAME and name not in ("root", "localhost")]
    return sorted(pairs, key=lambda pair: len(pair[0]), reverse=True)
