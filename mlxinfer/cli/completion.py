"""Shell completion."""

from __future__ import annotations

import click


@click.command(short_help="Shell completion for bash, zsh and fish.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script of a shell.

    \b
    bash:  eval "$(mlxinfer completion bash)"       in ~/.bashrc
    zsh:   eval "$(mlxinfer completion zsh)"        in ~/.zshrc
    fish:  mlxinfer completion fish > ~/.config/fish/completions/mlxinfer.fish
    """
    from click.shell_completion import get_completion_class

    from . import cli

    script = get_completion_class(shell)
    assert script is not None
    click.echo(script(cli, {}, "mlxinfer", "_MLXINFER_COMPLETE").source())
