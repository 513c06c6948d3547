"""Options of several commands, and the places of results. Commands import this module as `options`."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TypeVar

import click

from ..engines import MODULES
from .system import pin

Command = TypeVar("Command", bound=Callable[..., object])

RESULTS = Path(__file__).parents[1] / "results"
DEFAULT_MODELS = ("smollm2", "gemma3-270m")
LLAMA_SERVER_VARIABLE = "LLAMA_SERVER"


def result_path(folder: str, name: str) -> Path:
    """Path without a suffix of the results called `name`, in a folder of results/. A `name` with a slash is a path itself."""
    return Path(name) if "/" in name else RESULTS / folder / name


def stored_path(name: str) -> Path:
    """Path without a suffix of stored results, in any folder of results/."""
    found = sorted(RESULTS.glob(f"*/{name}.json")) if "/" not in name else []
    return found[0].with_suffix("") if found else result_path("compare", name)


def tell(text: str) -> None:
    """Print progress to standard error."""
    click.echo(text, err=True)


def split_words(text: str, possible: Collection[str], option: str) -> tuple[str, ...]:
    """Words separated by commas. Raises `click.UsageError` for one that is not possible."""
    words = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    for word in words:
        if word not in possible:
            raise click.UsageError(f"{option}: {word!r} is not one of {', '.join(possible)}")
    return words


def with_prefixes(text: str, names: Collection[str]) -> list[str]:
    """The `names` that begin with one of the prefixes in `text`, separated by commas. All without prefixes. Raises `click.UsageError` if
    none does."""
    prefixes = tuple(word for word in text.split(",") if word)
    found = [name for name in names if not prefixes or name.startswith(prefixes)]
    if not found:
        raise click.UsageError(f"--works: none of {', '.join(names)} begins with {text}")
    return found


def _models(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, Path]:
    """Parse `NAME=PATH`, or anything that mlxinfer resolves."""
    from mlxinfer.errors import MLXInferError
    from mlxinfer.loading.find.resolve import resolve

    found = {}
    for value in values:
        name, _, path = value.partition("=")
        try:
            found[name] = resolve(path or name).path
        except MLXInferError as error:
            raise click.BadParameter(str(error)) from None
    return found


def _engines(ctx: click.Context, param: click.Parameter, value: str) -> tuple[str, ...]:
    return split_words(value, MODULES, "--engines")


def _cpus(ctx: click.Context, param: click.Parameter, value: str | None) -> list[int]:
    """Restrict this process, and all that it starts, to these processors."""
    words = [] if value is None else value.split(",")
    if not all(word.isdecimal() for word in words):
        raise click.BadParameter(f"{value!r} is not a list of processors, such as 0,1")
    try:
        return pin([int(word) for word in words])
    except (OSError, OverflowError):
        raise click.BadParameter(f"{value!r}: not all of these are processors that may be used here") from None


def _llama_server(ctx: click.Context, param: click.Parameter, value: Path | None) -> None:
    if value:
        os.environ[LLAMA_SERVER_VARIABLE] = str(value.absolute())


cpus = click.option("--cpus", callback=_cpus, metavar="N,...", help="Use only these processors (Linux).  [default: all allowed]")
threads = click.option("--threads", type=click.IntRange(1, 256), help="Of every engine.  [default: one for each processor]")
llama_server = click.option(
    "--llama-server", type=click.Path(exists=True, dir_okay=False, path_type=Path), callback=_llama_server, expose_value=False,
    help="The program.  [default: $LLAMA_SERVER, or on the PATH]",
)  # fmt: skip


def models(*default: str) -> Callable[[Command], Command]:
    return click.option(
        "--model", "models", multiple=True, default=default, show_default=True, callback=_models, metavar="NAME[=PATH]",
        help="A GGUF file, or a name that mlxinfer knows; repeatable.",
    )  # fmt: skip


def engines(default: str) -> Callable[[Command], Command]:
    return click.option("--engines", default=default, show_default=True, callback=_engines, help=f"Of {', '.join(MODULES)}.")


def name(default: str) -> Callable[[Command], Command]:
    return click.option("--name", default=default, show_default=True, help="Of the files in results/.")


def rounds(default: int) -> Callable[[Command], Command]:
    return click.option("--rounds", type=click.IntRange(1, 1000), default=default, show_default=True)


def limits(possible: Collection[str], *default: str) -> Callable[[Command], Command]:
    def parse(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, int]:
        found: dict[str, int] = {}
        for value in values:
            engine, _, tokens = value.partition("=")
            if engine not in possible or not tokens.isdecimal() or int(tokens) < 1:
                raise click.BadParameter(f"{value!r} is not an engine and a number of tokens, such as {default[0]}")
            found[engine] = int(tokens)
        return found

    return click.option(
        "--limit", "limits", multiple=True, default=default, show_default=True, callback=parse, metavar="ENGINE=TOKENS",
        help="The longest prompt of a slow engine; repeatable.",
    )  # fmt: skip
