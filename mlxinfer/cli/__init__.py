"""The command line. Commands import what is heavy only when they run, so that help and completion answer at once."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from typing import NoReturn

import click

from .._version import __version__
from ..errors import MLXInferError

INTERRUPTED, BROKEN_PIPE = 130, 1


class _Commands(click.Group):
    """A group whose commands are the modules of this folder, each with a command of the same name."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return ["run", "chat", "serve", "convert", "models", "bench", "doctor", "completion"]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        command = getattr(importlib.import_module(f".{cmd_name}", __name__), cmd_name)
        assert isinstance(command, click.Command)
        return command


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="mlxinfer")
def cli() -> None:
    """Run language models on Apple silicon: chat in the terminal, convert and quantize checkpoints.

    A MODEL is a directory, a GGUF file, a hub id such as HuggingFaceTB/SmolLM2-135M-Instruct, or an alias (mlxinfer models list).
    """


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line and exit: 0, 2 after a user's error (one line on standard error), 130 after Ctrl-C."""
    arguments = sys.argv[1:] if arguments is None else arguments
    _open_closed_streams()
    _clean_up_when_ended()
    try:
        code = cli(arguments or ["--help"], prog_name="mlxinfer", standalone_mode=False)
        sys.stdout.flush()
    except MLXInferError as error:
        code = _complain(str(error), error.exit_code)
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx else "mlxinfer"
        code = _complain(f"{error.format_message().rstrip('.')} (see '{path} --help')", error.exit_code)
    except click.ClickException as error:
        code = _complain(error.format_message(), error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        code = INTERRUPTED
    except BrokenPipeError:
        # The interpreter flushes standard output once more at exit, which must not complain either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = BROKEN_PIPE
    except OSError as error:
        code = _complain(str(error), MLXInferError.exit_code)
    sys.exit(code if isinstance(code, int) else 0)


def _open_closed_streams() -> None:
    """Python has None where a standard stream was closed before it started (`<&-`)."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


def _clean_up_when_ended() -> None:
    """Let `finally` clauses run after SIGTERM and SIGHUP too, unless they are ignored (nohup)."""
    for ending in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(ending) is signal.SIG_DFL:
            signal.signal(ending, lambda number, _: sys.exit(128 + number))


def _complain(message: str, code: int) -> int:
    click.echo(f"mlxinfer: {' '.join(message.split())}", err=True)
    return code
