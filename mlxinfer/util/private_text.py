"""Removes from reports all that names the owner of a machine: names, home directories, disks, keys and passwords.

Uses the standard library only, so that a report about a failed installation can use it too.
"""

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
"""Names of variables with keys."""
_SECRET_VALUE = re.compile(r"\b(?:hf|sk|ghp|gho|github_pat)[-_][A-Za-z0-9_-]{8,}")
"""Keys in the form that hubs and providers give them."""
_HOMES = re.compile(r"(?:/private)?/(?:Users|home)/[^/\s:;,'\"]+")
_NETWORK = re.compile(r"\b\w+://[^\s/@]+@")
"""User and password before a host."""
_DISKS = re.compile(r"/Volumes/[^/\n:,'\"]+")
_BATTERY = re.compile(r"\(id=\d+\)")
"""Number of a battery, as `pmset` prints it."""

HIDDEN = "(hidden)"
"""Stands for keys and passwords."""
_LEAST_NAME = 2
"""Minimum letters of a name; a single letter would match everywhere."""


def without_private(text: str) -> str:
    """Return the text with the home directory as `~`, and names of user and machine, keys and passwords hidden."""
    for value in _secrets(os.environ):
        text = text.replace(value, HIDDEN)
    text = _SECRET_VALUE.sub(HIDDEN, text)
    text = _NETWORK.sub(f"{HIDDEN}@", text)
    for home in _homes():
        text = re.sub(re.escape(home) + r"(?=[/\s:;,'\")]|$)", "~", text, flags=re.MULTILINE)
    text = _DISKS.sub("/Volumes/DISK", _HOMES.sub("~", text))
    text = _BATTERY.sub("(id)", text)
    for name, instead in _names():
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", instead, text, flags=re.IGNORECASE)
    return text


def settings_of(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables of MLX and this project; keys only as set or unset."""
    chosen = {name: value for name, value in sorted(environment.items()) if name.startswith("MLX")}
    return {name: HIDDEN if _SECRET.search(name) else value for name, value in chosen.items()}


def _secrets(environment: Mapping[str, str]) -> Iterator[str]:
    """Yield values of variables whose names suggest keys, longest first."""
    yield from sorted((value for name, value in environment.items() if _SECRET.search(name) and len(value) >= 6), key=len, reverse=True)


def _homes() -> list[str]:
    """Return all spellings of the home directory and the user's temporary directory, longest first."""
    found = {os.path.expanduser("~"), os.environ.get("HOME", ""), str(Path.home()), os.path.realpath(os.path.expanduser("~"))}
    found |= {tempfile.gettempdir()} if len(Path(tempfile.gettempdir()).parts) > 3 else set()
    return sorted((home for home in found if home not in ("", "/")), key=len, reverse=True)


def _names() -> list[tuple[str, str]]:
    """Return (name, placeholder) of the user and the machine."""
    users = {os.environ.get("USER", ""), os.environ.get("LOGNAME", "")}
    with suppress(ImportError, KeyError, OSError):  # the user is not in the system's database
        users.add(getpass.getuser())
    with suppress(ImportError, KeyError):
        import pwd

        users |= set(re.split(r"[\s,]+", pwd.getpwuid(os.getuid()).pw_gecos))
    hosts = {platform.node(), socket.gethostname(), platform.node().partition(".")[0]}
    pairs = [(name, "USER") for name in users] + [(name, "HOST") for name in hosts]
    pairs = [(name, instead) for name, instead in pairs if len(name) >= _LEAST_NAME and name not in ("root", "localhost")]
    return sorted(pairs, key=lambda pair: len(pair[0]), reverse=True)
