"""Shell completion: the scripts, and the values of options that are free text to click."""

from __future__ import annotations

from typing import Any

import click
from click.shell_completion import BashComplete, CompletionItem, FishComplete, ShellComplete, ZshComplete, add_completion_class
from click.shell_completion import get_completion_class as completion_class

_DTYPES = ("float32", "bfloat16", "float16")
_VALUES = {
    "dtype": _DTYPES,
    "kv": ("16", "8", "6", "5", "4", "3", "2", "k8v4"),
    "bits": ("2", "3", "4", "5", "6", "8"),
    "group_size": ("32", "64", "128"),
    "mode": ("affine", "mxfp4", "mxfp8", "nvfp4"),
}
"""By the name of the parameter."""

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
        last = next((word for word in reversed(args) if word != "="), "")
        name, equals, start = incomplete.partition("=")
        option, start = (name, start) if equals else (last, incomplete)
        values = _VALUES.get(option.removeprefix("--").replace("-", "_"), ()) if option.startswith("--") else ()
        return [CompletionItem(value) for value in values if value.startswith(start)]


class _Bash(_WithValues, BashComplete):
    # click's own script drops what it has found when files may be given as well, such as the names of models.
    source_template = BashComplete.source_template.replace(_CLICKS_FILES, _FILES)


class _Zsh(_WithValues, ZshComplete):
    pass


class _Fish(_WithValues, FishComplete):
    pass


for _shell in (_Bash, _Zsh, _Fish):
    add_completion_class(_shell)


@click.command(short_help="Shell completion for bash, zsh and fish.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script of a shell.

    \b
    bash:  eval "$(mlxinfer completion bash)"       in ~/.bashrc
    zsh:   eval "$(mlxinfer completion zsh)"        in ~/.zshrc
    fish:  mlxinfer completion fish > ~/.config/fish/completions/mlxinfer.fish
    """
    from . import cli

    script: Any = completion_class(shell)
    click.echo(script(cli, {}, "mlxinfer", "_MLXINFER_COMPLETE").source())
