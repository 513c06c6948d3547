"""Shell completion: scripts, and values of options that click treats as free text."""

from __future__ import annotations

import os
from dataclasses import dataclass
from glob import escape, iglob
from pathlib import Path
from typing import Any

import click
from click.shell_completion import BashComplete, CompletionItem, FishComplete, ShellComplete, ZshComplete, add_completion_class
from click.shell_completion import get_completion_class as completion_class

from ..errors import MLXInferError
from .common.console import tell

_VARIABLE = "_MLXINFER_COMPLETE"
_SHELLS = ("bash", "zsh", "fish")
_DTYPES = ("float32", "bfloat16", "float16")
_VALUES = {
    "dtype": _DTYPES,
    "kv": ("16", "8", "6", "5", "4", "3", "2", "k8v4", "auto"),
    "bits": ("2", "3", "4", "5", "6", "8"),
    "group_size": ("32", "64", "128"),
    "encoder": ("fit", "gptq", "minmax"),
    "calibration": ("samples", "random"),
    "towers": ("16", "8", "none"),
    "mode": ("affine", "mxfp4", "mxfp8", "nvfp4"),
}
"""Values by the parameter's name."""

_CLICKS_FILES = """        elif [[ $type == 'file' ]]; then
            COMPREPLY=()
            compopt -o default
"""
_FILES = """        elif [[ $type == 'file' ]]; then
            compopt -o filenames
            COMPREPLY+=($(compgen -f -- "$value"))
"""


class _WithValues(ShellComplete):
    def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem]:
        items = super().get_completions(args, incomplete)
        if items:
            return items
        if incomplete.startswith("@"):  # --system @FILE, and files in a message
            return [CompletionItem(f"@{path}") for path in sorted(_files(incomplete[1:]))]
        last = next((word for word in reversed(args) if word != "="), "")
        name, equals, start = incomplete.partition("=")
        option, start = (name, start) if equals else (last, incomplete)
        values = _VALUES.get(option.removeprefix("--").replace("-", "_"), ()) if option.startswith("--") else ()
        return [CompletionItem(value) for value in values if value.startswith(start)]


def _files(start: str) -> list[str]:
    """Return paths with this prefix; directories end in a slash."""
    return [path + "/" * os.path.isdir(path) for path in iglob(escape(start) + "*")]


class _Bash(_WithValues, BashComplete):
    # click's script drops other completions, such as models, if files are also allowed.
    source_template = BashComplete.source_template.replace(_CLICKS_FILES, _FILES)


class _Zsh(_WithValues, ZshComplete):
    pass


class _Fish(_WithValues, FishComplete):
    # click's script truncates a description at its first comma.
    source_template = FishComplete.source_template.replace('string split ","', 'string split --max 1 ","')


for _shell in (_Bash, _Zsh, _Fish):
    add_completion_class(_shell)


@dataclass(frozen=True, slots=True)
class _CompletionPlace:
    """Path of a shell's user completions."""

    file: Path
    startup: Path | None
    """File that must load the script; None if the shell finds it."""
    line: str
    """Line for that file, or the further step needed."""


def _place(shell: str) -> _CompletionPlace:
    """Return the place of a shell's completions; variables such as XDG_DATA_HOME may move it."""
    data, config, zsh = (
        Path(os.environ.get(name) or Path.home() / usual)
        for name, usual in (("XDG_DATA_HOME", ".local/share"), ("XDG_CONFIG_HOME", ".config"), ("ZDOTDIR", ""))
    )
    if shell == "bash":
        folder = Path(os.environ.get("BASH_COMPLETION_USER_DIR") or data / "bash-completion")
        eager = 'needs the package bash-completion; without it, add to ~/.bashrc: eval "$(mlxinfer completion bash)"'
        return _CompletionPlace(folder / "completions" / "mlxinfer", None, eager)
    if shell == "fish":
        return _CompletionPlace(config / "fish" / "completions" / "mlxinfer.fish", None, "")
    return _CompletionPlace(Path.home() / ".zfunc" / "_mlxinfer", zsh / ".zshrc", "fpath+=~/.zfunc; autoload -Uz compinit; compinit")


@click.command(short_help="Shell completion for bash, zsh and fish.")
@click.argument("shell", type=click.Choice(_SHELLS), required=False)
@click.option("--install", "installs", is_flag=True, help="Write the script to the place where the shell looks for it.")
def completion(shell: str | None, installs: bool) -> None:
    """Print the completion script of a shell, or install it for new shells. Without SHELL, it is the one of $SHELL.

    \b
    mlxinfer completion --install                   once
    eval "$(mlxinfer completion bash)"              or this, in ~/.bashrc or ~/.zshrc
    """
    shell = shell or _own_shell()
    script: Any = completion_class(shell)
    source = script(click.get_current_context().find_root().command, {}, "mlxinfer", _VARIABLE).source()
    if installs:
        _install(_place(shell), source)
    else:
        click.echo(source)


def _own_shell() -> str:
    """Return the user's shell. Raises `click.UsageError` for one without completion."""
    name = Path(os.environ.get("SHELL", "")).name
    if name not in _SHELLS:
        raise click.UsageError(f"which shell? {', '.join(_SHELLS)}")
    return name


def _install(place: _CompletionPlace, source: str) -> None:
    """Write the script. Raises `MLXInferError` instead of replacing another file."""
    try:
        if place.file.exists() and _VARIABLE not in place.file.read_text(encoding="utf-8", errors="replace"):
            raise MLXInferError(f"{place.file} exists and is not this script: move it away first")
        place.file.parent.mkdir(parents=True, exist_ok=True)
        place.file.write_text(f"{source}\n", encoding="utf-8")
        click.echo(f"wrote {place.file}")
        if place.startup is not None and _add_line(place.startup, place.line):
            click.echo(f"added to {place.startup}: {place.line}")
    except OSError as error:
        raise MLXInferError(f"cannot write {error.filename or place.file}: {error.strerror}") from None
    tell("new shells complete mlxinfer" + (f"; this {place.line}" if place.startup is None and place.line else ""))


def _add_line(file: Path, line: str) -> bool:
    """Add a line to a shell's file unless it mentions the folder. Returns True if the line was added."""
    text = file.read_text(encoding="utf-8", errors="surrogateescape") if file.exists() else ""
    if ".zfunc" in text:
        return False
    with file.open("a", encoding="utf-8") as target:
        target.write(f"{'' if not text or text.endswith(chr(10)) else chr(10)}{line}\n")
    return True
