"""Command line. Commands import heavy modules only when they run, so that help and completion answer at once."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from functools import partial
from typing import NoReturn

import click
from click.shell_completion import CompletionItem

from .._version import __version__
from ..errors import MLXInferError
from .common.console import fitted, tell_wrong_environment
from .common.groups import Commands
from .common.interrupts import INTERRUPTED, interrupts_end, raise_interrupts, was_interrupted

BROKEN_PIPE = 1
_COMPLETE = "_MLXINFER_COMPLETE"


_GROUPS = {
    "Talk": ("run", "chat"),
    "Models": ("list", "search", "recommend", "pull", "show", "rm", "models", "convert"),
    "Server": ("serve", "ps", "stop", "launch"),
    "Measure": ("bench", "eval", "doctor"),
    "More": ("embed", "completion", "help"),
}
"""Commands by the title of their group in the help."""
_OF_MODELS = ("list", "search", "recommend", "pull", "show", "rm")
"""Commands of `mlxinfer models` that also work without `models`."""
_OTHER_NAMES = {"ls": "list", "download": "pull", "remove": "rm", "server": "serve", "generate": "run", "quantize": "convert"}


class _Modules(Commands):
    """Group whose commands are modules of this folder, each with a command of the same name."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for names in _GROUPS.values() for name in names]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, names in _GROUPS.items():
            found = [(name, self.get_command(ctx, name)) for name in names]
            with formatter.section(title):
                formatter.write_dl([(f"{name:<10}", command.get_short_help_str(100)) for name, command in found if command])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in ("help", "version"):  # not modules
            return _help if cmd_name == "help" else _version
        if cmd_name in _OF_MODELS:
            from .models import models

            return models.get_command(ctx, cmd_name)
        if cmd_name not in self.list_commands(ctx):
            return None
        with interrupts_end():
            command = getattr(importlib.import_module(f".{cmd_name}", __name__), cmd_name)
        assert isinstance(command, click.Command)
        return command


_EXAMPLES = """\b
Examples:
  mlxinfer chat                       with a model that is here, or one to fetch
  mlxinfer run "What is a prime?"     one answer
  mlxinfer serve smollm2 --open       the APIs, and a page in the browser
  mlxinfer help run                   all about a command

Variables: MLXINFER_HOME (the cache folder), MLXINFER_SOCKET, MLXINFER_API_KEY, MLXINFER_THREADS, HF_HUB_OFFLINE, NO_COLOR."""


@click.group(
    cls=_Modules,
    other_names=_OTHER_NAMES,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=_EXAMPLES,
)
@click.version_option(__version__, prog_name="mlxinfer")
def cli() -> None:
    """Run language models on Apple silicon: chat in the terminal, convert and quantize checkpoints.

    A MODEL is a name such as qwen3:8b (mlxinfer models search), a directory, a GGUF file, or a hub id such as
    HuggingFaceTB/SmolLM2-135M-Instruct. mlxinfer models list shows those that are here.
    """


def _command_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(name) for name in cli.list_commands(ctx) if name.startswith(incomplete)]


@click.command("help")
@click.argument("names", nargs=-1, metavar="[COMMAND]...", shell_complete=_command_names)
def _help(names: tuple[str, ...]) -> None:
    """Describe a command."""
    cli.main([*names, "--help"], prog_name="mlxinfer", standalone_mode=False)


@click.command("version")
def _version() -> None:
    """Print the version."""
    click.echo(f"mlxinfer, version {__version__}")


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line and exit: 0, 2 after a user's error (one line on standard error), 130 after Ctrl-C."""
    _open_closed_streams()
    _clean_up_when_ended()
    # NumPy's BLAS is unused, and its threads spin during the import of NumPy.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if _COMPLETE in os.environ:
        from . import completion  # noqa: F401  registers completions of option values
    code = _exit_code(sys.argv[1:] if arguments is None else arguments)
    if arguments is None:
        _end_at_once_from_now_on()
    sys.exit(code)


def _exit_code(arguments: list[str]) -> int:
    code: object
    try:
        raise_interrupts()
        if _COMPLETE not in os.environ:
            tell_wrong_environment()
        code = cli(arguments or ["--help"], prog_name="mlxinfer", standalone_mode=False)
        sys.stdout.flush()
    except MLXInferError as error:
        from .common.options import with_flags

        code = _complain(with_flags(str(error)), error.exit_code)
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx else "mlxinfer"
        code = _complain(f"{error.format_message().rstrip('.')} (see '{path} --help')", error.exit_code)
    except click.ClickException as error:
        code = _complain(error.format_message(), error.exit_code)
    except SystemExit as ended:  # a signal
        code = ended.code
    except (KeyboardInterrupt, click.Abort):
        code = INTERRUPTED
    except ImportError as error:
        if not was_interrupted(error):
            raise
        code = INTERRUPTED
    except BrokenPipeError:
        _give_up_standard_output()
        code = BROKEN_PIPE
    except OSError as error:
        _give_up_standard_output()
        what = "cannot write to standard output" if error.filename is None else error.filename
        code = _complain(f"{what}: {error.strerror or error}", MLXInferError.exit_code)
    return code if isinstance(code, int) else 0


def _give_up_standard_output() -> None:
    """Replace a closed standard output, which the interpreter flushes again at exit."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


def _open_closed_streams() -> None:
    """Replace standard streams that were closed before the start (`<&-`), for which Python has None. Writing to them fails."""
    for name, mode, flags in (("stdin", "r", os.O_RDONLY), ("stdout", "w", os.O_RDONLY), ("stderr", "w", os.O_WRONLY)):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.open(os.devnull, flags), mode, encoding="utf-8"))  # noqa: SIM115


def _clean_up_when_ended() -> None:
    """Let `finally` clauses run after SIGTERM and SIGHUP too, unless they are ignored (nohup)."""
    for ending in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(ending) is signal.SIG_DFL:
            signal.signal(ending, lambda number, _: sys.exit(128 + number))


def _end_at_once_from_now_on() -> None:
    """Let signals end the process without a traceback while the interpreter waits for its threads."""
    for ending, code in ((signal.SIGINT, INTERRUPTED), (signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGHUP, 128 + signal.SIGHUP)):
        if signal.getsignal(ending) is not signal.SIG_IGN:
            signal.signal(ending, partial(_end, code))


def _end(code: int, *_: object) -> NoReturn:
    os._exit(code)


def _complain(message: str, code: int) -> int:
    click.echo(fitted(f"mlxinfer: {' '.join(message.split())}", sys.stderr), err=True)
    return code
