"""Options shared by several commands."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import click

from .engines import MODULES
from .system import pin

Command = TypeVar("Command", bound=Callable[..., object])

RESULTS = Path(__file__).parent / "results"
DEFAULT_MODELS = ("smollm2", "gemma3-270m")


def stem(folder: str, name: str) -> Path:
    """Path without a suffix of the results called `name`, in their folder of results/; a `name` with a slash is a path."""
    return Path(name) if "/" in name else RESULTS / folder / name


def stored(name: str) -> Path:
    """Path without a suffix of stored results, in whichever folder of results/ they are."""
    found = sorted(RESULTS.glob(f"*/{name}.json")) if "/" not in name else []
    return found[0].with_suffix("") if found else stem("compare", name)


def _limits(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, int]:
    limits = {}
    for value in values:
        engine, _, tokens = value.partition("=")
        if engine not in MODULES or not tokens.isdecimal() or int(tokens) < 1:
            raise click.BadParameter(f"{value!r} is not an engine and a number of tokens, such as mlx-lm=128")
        limits[engine] = int(tokens)
    return limits


def _models(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, Path]:
    """`NAME=PATH`, or anything that mlxinfer resolves."""
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
    names = tuple(dict.fromkeys(name.strip() for name in value.split(",")))
    for name in names:
        if name not in MODULES:
            raise click.BadParameter(f"{name!r} is not one of {', '.join(MODULES)}")
    return names


def _cpus(ctx: click.Context, param: click.Parameter, value: str | None) -> list[int]:
    """Restrict this process, and all that it starts, to these processors."""
    words = [] if value is None else value.split(",")
    if not all(word.isdecimal() for word in words):
        raise click.BadParameter(f"{value!r} is not a list of processors, such as 0,1")
    try:
        return pin([int(word) for word in words])
    except (OSError, OverflowError):
        raise click.BadParameter(f"{value!r}: not all of these are processors that may be used here") from None


limits_option = click.option(
    "--limit", "limits", multiple=True, default=("mlx-lm=128", "mlxinfer-plain=128"), show_default=True, callback=_limits,
    metavar="ENGINE=TOKENS", help="The most tokens that a slow engine gets at once; repeatable.",
)  # fmt: skip
cpus_option = click.option("--cpus", callback=_cpus, metavar="N,...", help="Keep to these processors (Linux).  [default: all allowed]")


def models_option(*default: str) -> Callable[[Command], Command]:
    return click.option(
        "--model", "models", multiple=True, default=default, show_default=True, callback=_models, metavar="NAME[=PATH]",
        help="A GGUF file, or a name that mlxinfer knows; repeatable.",
    )  # fmt: skip


def engines_option(default: str) -> Callable[[Command], Command]:
    return click.option("--engines", default=default, show_default=True, callback=_engines, help=f"Of {', '.join(MODULES)}.")
