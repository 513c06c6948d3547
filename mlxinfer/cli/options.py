"""Arguments and options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from ..errors import SamplingError
from ..types import SamplingParams

Command = TypeVar("Command", bound=Callable[..., Any])

DEFAULT_MAX_TOKENS = 1024


def complete_model(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from ..loading.resolve import ALIASES

    return [CompletionItem(alias) for alias in ALIASES if alias.startswith(incomplete)] + [CompletionItem(incomplete, type="file")]


def _biases(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[int, float] | None:
    """`42:-100` to {42: -100.0}."""
    biases = {}
    for value in values:
        token, _, bias = value.partition(":")
        try:
            biases[int(token)] = float(bias)
        except ValueError:
            raise click.BadParameter(f"{value!r} is not a token id and a bias, such as 42:-100") from None
    return biases or None


ABOVE_ZERO = click.FloatRange(min=0, min_open=True)
AT_LEAST_ZERO = click.FloatRange(min=0)

_SAMPLING = [
    click.option("--temperature", type=float, help="0 is greedy."),
    click.option("--top-p", type=float, help="Keep the likeliest tokens up to this probability."),
    click.option("--top-k", type=int, help="Keep the k likeliest tokens; 0 keeps all."),
    click.option("--min-p", type=float, help="Drop tokens below this share of the likeliest one's probability."),
    click.option("--max-tokens", type=int, help=f"Stop after so many tokens.  [default: {DEFAULT_MAX_TOKENS}]"),
    click.option("--stop", multiple=True, metavar="TEXT", help="Stop before this text; repeatable."),
    click.option("--seed", type=int, help="The same seed gives the same answer."),
    click.option("--repetition-penalty", type=float, help="Above 1: tokens of prompt and answer become less likely."),
    click.option("--presence-penalty", type=float, help="Subtracted once for every token of the answer so far."),
    click.option("--frequency-penalty", type=float, help="Subtracted for every time a token was used in the answer."),
    click.option("--logit-bias", multiple=True, metavar="ID:BIAS", callback=_biases, help="Added to a token's logit; repeatable."),
    click.option("--ignore-eos", is_flag=True, default=None, help="Do not stop at the end of the turn."),
]
_MODEL = [
    click.option("--dtype", metavar="DTYPE", help="Compute in float32, bfloat16 or float16.  [default: what suits the device]"),
    click.option("--kv", default="16", show_default=True, help="Bits of cached keys and values: 16, 8, 6, 5, 4, 3, 2, or as k8v4."),
    click.option("--kv-first16", is_flag=True, help="Keep the first page of each sequence at 16 bits, with --kv."),
    click.option("--bits", type=int, help="Quantize the weights while loading."),
    click.option("--group-size", type=int, default=64, show_default=True, help="Weights that share a scale, with --bits."),
    click.option("--max-context", type=int, help="Tokens of prompt and answer together.  [default: what the model allows]"),
    click.option("--memory", "memory_gb", type=ABOVE_ZERO, metavar="GB", help="Use at most so much.  [default: what the device has]"),
    click.option("--deterministic", is_flag=True, help="Answers never depend on what runs beside them, on a GPU too."),
]
_ENGINE = [
    click.option("--draft", metavar="MODEL", shell_complete=complete_model, help="A smaller model of the same vocabulary, to be quicker."),
    click.option("--speculate/--no-speculate", default=True, help="Let text that repeats itself propose tokens; answers are the same."),
    click.option("--prefix-cache/--no-prefix-cache", default=True, help="Keep what was computed for prompts that begin alike."),
    click.option("--prefix-disk", "prefix_disk_gb", type=AT_LEAST_ZERO, default=0.0, metavar="GB", help="Keep so much of it on disk too."),
]


def model_argument(command: Command) -> Command:
    return click.argument("model", shell_complete=complete_model)(command)


def _all(options: list[Callable[[Any], Any]], command: Command) -> Command:
    for option in reversed(options):
        command = option(command)
    return command


def model_options(command: Command) -> Command:
    """How to load a model: the keyword arguments of `LLM`."""
    return _all(_MODEL, command)


def engine_options(command: Command) -> Command:
    """How it is run: further keyword arguments of `LLM`."""
    return _all(_ENGINE, command)


def sampling_options(command: Command) -> Command:
    """The fields of `SamplingParams`; None or empty where not given."""
    return _all(_SAMPLING, command)


MODEL_FIELDS = frozenset(
    {
        *("dtype", "kv", "kv_first16", "bits", "group_size", "max_context", "memory_gb", "draft", "speculate", "deterministic"),
        *("prefix_cache", "prefix_disk_gb"),
    }
)


def split(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options of a command in two: those of the model, and those of sampling."""
    model = {name: value for name, value in options.items() if name in MODEL_FIELDS}
    return model, {name: value for name, value in options.items() if name not in MODEL_FIELDS}


def sampling(given: dict[str, Any], defaults: SamplingParams | None = None) -> SamplingParams:
    """The model's own defaults, with what was given instead. Raises `SamplingError`."""
    chosen = {name: value for name, value in given.items() if value is not None and value != ()}
    try:
        return replace(defaults or SamplingParams(), **{"max_tokens": DEFAULT_MAX_TOKENS, **chosen})
    except SamplingError as error:
        name, _, rest = str(error).partition(" ")
        raise SamplingError(f"--{name.replace('_', '-')} {rest}") from None
