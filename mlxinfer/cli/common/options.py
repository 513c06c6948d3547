"""Arguments and options shared by commands. Engine options are generated from `EngineArgs`."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import Field, fields
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from ...config import CHAT_TEMPERATURE, EngineArgs, Setting, default_text, flags_of, kind_of, settings
from ...errors import MLXInferError
from ...types import SamplingParams
from .console import text_of_file

Command = TypeVar("Command", bound=Callable[..., Any])

DEFAULT_MAX_TOKENS = 1024
ABOVE_ZERO = click.FloatRange(min=0, min_open=True)
_UNITS = {"s": "seconds", "tokens": "tokens"}
_TYPES: dict[str, Any] = {"int": int, "float": float, "str": str, "Path": click.Path(path_type=Path)}


def complete_model(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from ...loading.find.resolve import names_here

    return [CompletionItem(name) for name in names_here() if name.startswith(incomplete)] + [CompletionItem(incomplete, type="file")]


def _biases(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[int, float] | None:
    """Parse `42:-100` to {42: -100.0}."""
    biases = {}
    for value in values:
        token, _, bias = value.partition(":")
        try:
            biases[int(token)] = float(bias)
        except ValueError:
            raise click.BadParameter(f"{value!r} is not a token id and a bias, such as 42:-100") from None
    return biases or None


def adapter_paths(values: tuple[str, ...]) -> dict[str, str]:
    """Parse adapters: `NAME=PATH`, or a path whose last part is the name. Raises `click.BadParameter`."""
    found: dict[str, str] = {}
    for value in values:
        name, separator, path = value.partition("=")
        if not separator:
            name, path = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(value).expanduser().resolve().name.removesuffix(".gguf")).strip("-._"), value
        if not name or not path:
            raise click.BadParameter(f"{value!r} is not NAME=PATH")
        if name in found:
            raise click.BadParameter(f"two adapters are called {name!r}: give one of them another name with NAME=PATH")
        found[name] = path
    return found


def _adapters(ctx: click.Context, param: click.Parameter, values: tuple[str, ...] | None) -> dict[str, str] | None:
    found = adapter_paths(values) if values else None
    if found:
        EngineArgs("", adapters={name.rpartition(":")[2]: path for name, path in found.items()})
    return found


def _vision(ctx: click.Context, param: click.Parameter, value: bool | None) -> str:
    """Return the value of `EngineArgs.vision` for `--vision`, `--no-vision` or neither."""
    return "auto" if value is None else "on" if value else "off"


def own_adapter(settings: dict[str, Any]) -> str | None:
    """Return the adapter named by `--adapter`, for commands that use one. Raises `click.UsageError` for several."""
    names = list(settings.get("adapters") or ())
    if len(names) > 1:
        raise click.UsageError("only one --adapter here: mlxinfer serve and Python take several")
    return names[0] if names else None


def _checked(owner: type[Any], *required: Any) -> Callable[[click.Context, click.Parameter, Any], Any]:
    """Return a callback that validates by the field of `owner`, with its message and the option's name."""

    def check(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
        if value is not None and value != ():
            try:
                owner(*required, **{param.name or "": value})
            except MLXInferError as error:
                raise type(error)(str(error).replace(param.name or "", param.opts[0], 1)) from None
        return value

    return check


def _sampling_option(*flags: str, **details: Any) -> Callable[[Any], Any]:
    return click.option(*flags, callback=_checked(SamplingParams), **details)


def _temperature(otherwise: str) -> Callable[[Any], Any]:
    """Return the temperature option; `otherwise` is the default without a recommendation of the authors."""
    shown = f"0 always takes the likeliest token.  [default: what the model's authors recommend, else {otherwise}]"
    return _sampling_option("--temperature", "--temp", "-t", type=float, help=shown)


_SAMPLING = [
    _temperature("0"),
    _sampling_option("--top-p", type=float, help="Sample from the most likely tokens up to this total probability."),
    _sampling_option("--top-k", type=int, help="Sample from the k most likely tokens; 0: from all."),
    _sampling_option("--min-p", type=float, help="Drop tokens below this share of the likeliest one's probability."),
    _sampling_option("--thinking-token-budget", type=int, help="Tokens of reasoning before the answer, at most."),
    _sampling_option("--max-tokens", type=int, help=f"Stop after this many tokens.  [default: {DEFAULT_MAX_TOKENS}]"),
    _sampling_option("--stop", multiple=True, metavar="TEXT", help="Stop before this text; repeatable."),
    _sampling_option("--seed", type=int, help="The same seed gives the same answer."),
    _sampling_option("--repetition-penalty", type=float, help="Above 1: tokens of prompt and answer become less likely."),
    _sampling_option("--presence-penalty", type=float, help="Subtracted once for every token of the answer so far."),
    _sampling_option("--frequency-penalty", type=float, help="Subtracted for every time a token was used in the answer."),
    click.option("--logit-bias", multiple=True, metavar="ID:BIAS", callback=_biases, help="Added to a token's logit; repeatable."),
    click.option(
        "--stop-on-loop/--no-stop-on-loop", default=None, help="End an answer that repeats the same text five times.  [default: on]"
    ),
    click.option("--ignore-eos", is_flag=True, default=None, help="Do not stop at the end of the turn."),
]


def _with_options(meaning: str) -> str:
    """Replace names of settings in a description by their options."""
    return re.sub(r"\bwith (kv|bits)\b", r"with --\1", meaning)


def _number_or(words: tuple[str, ...]) -> Callable[[Any], float | str]:
    """Return the type of an option that takes a number, or one of `words`."""

    def number(value: Any) -> float | str:
        if value in words:
            return str(value)
        try:
            return float(value)
        except ValueError:
            raise click.BadParameter(f"{value!r} is neither a number nor {' or '.join(words)}") from None

    return number


def _setting_option(one: Field[Any], how: Setting, default: object = None, check: Any = None) -> Callable[[Any], Any]:
    """Return the option of a setting; `default` replaces the setting's default, `check` validates the value."""
    kind, flags = kind_of(one), flags_of(one, how)
    automatic = default_text(one, how) if default is None else default
    shown = f"  [default: {automatic}]" if automatic != "" and not isinstance(one.default, bool) else ""
    unit = f", in {_UNITS[how.unit]}" if how.unit in _UNITS else ""
    details: dict[str, Any] = {
        "default": one.default if default is None else default,
        "help": f"{_with_options(how.meaning)}{unit}.{shown}",
        "callback": check,
    }
    if one.name == "adapters":
        details |= {"multiple": True, "metavar": how.metavar, "callback": _adapters}
        return click.option(*flags, one.name, **details)
    if kind == "Sequence[str]":
        details |= {"multiple": True, "metavar": how.metavar, "help": f"{how.meaning}; repeatable."}
        return click.option(*flags, one.name, **details)
    if one.name == "vision":
        return click.option(*flags, one.name, default=None, is_flag=True, callback=_vision, help=details["help"])
    if kind == "bool":
        name = one.name.replace("_", "-")
        flags = flags if one.default is False else [f"--{name}/--no-{name}"]
        details["is_flag"] = True
    else:
        number = _number_or(how.words) if how.words else _TYPES[kind]
        details |= {"type": number, "metavar": how.metavar or ("GB" if how.unit == "GB" else None)}
    if how.metavar == "MODEL":
        details["shell_complete"] = complete_model
    return click.option(*flags, one.name, **details)


def _engine_option(one: Field[Any], how: Setting, default: object = None) -> Callable[[Any], Any]:
    """Return the option of an engine setting; `default` replaces the setting's default."""
    return _setting_option(one, how, default, _checked(EngineArgs, ""))


def options_of(owner: type[Any]) -> Callable[[Command], Command]:
    """Return a decorator that adds an option for each setting of `owner`."""
    return partial(_all, [_setting_option(one, how) for one, how in settings(owner) if how.command != "none"])


def ignore_option(command: Command) -> Command:
    """Add `--ignore-config-key` to commands that read headers only."""
    return _all([_engine_option(one, how) for one, how in settings() if one.name == "ignore_config_keys"], command)


def experts_option(command: Command) -> Command:
    """Add `--experts-memory` to commands that plan the memory of a model."""
    return _all([_engine_option(one, how) for one, how in settings() if one.name == "experts_memory"], command)


_ENGINE = {one.name: (how.command, _engine_option(one, how)) for one, how in settings() if one.name != "path_or_id"}
_ONE_SEQUENCE = {one.name: (how.command, _engine_option(one, how, 1)) for one, how in settings() if one.name == "max_num_seqs"}
_NAMES = frozenset((*(one.name for one, _ in settings()), "local", "url"))
GROUPS = {
    "Sampling": frozenset(field.name for field in fields(SamplingParams)),
    "Model and memory": frozenset(("local", "url", *(name for name, (commands, _) in _ENGINE.items() if commands == "all"))),
    "Adapters, drafts and cached prefixes": frozenset(name for name, (commands, _) in _ENGINE.items() if commands != "all"),
}
"""Title of each option group in the help to the names of its parameters."""


def model_argument(command: Command) -> Command:
    return click.argument("model", shell_complete=complete_model)(command)


def _all(options: list[Callable[[Any], Any]], command: Command) -> Command:
    for option in reversed(options):
        command = option(command)
    return command


def server_options(command: Command) -> Command:
    """Add the options of commands that can use the model of a running server."""
    local = "Load the model here, even if the running server has it."
    url = "Use the server at this address; its key is in $MLXINFER_API_KEY.  [default: your own server, if it has the model]"
    return _all([click.option("--local", is_flag=True, help=local), click.option("--url", metavar="URL", help=url)], command)


def model_options(command: Command) -> Command:
    """Add the settings of `EngineArgs` that every command has."""
    return _all([option for commands, option in _ENGINE.values() if commands == "all"], command)


def one_sequence_options(command: Command) -> Command:
    """Add `model_options` for commands with one request at a time: memory is planned for one sequence by default."""
    return _all([option for commands, option in (_ENGINE | _ONE_SEQUENCE).values() if commands == "all"], command)


def engine_options(command: Command) -> Command:
    """Add the settings of commands that answer requests."""
    return _all([option for commands, option in _ENGINE.values() if commands == "answering"], command)


def serving_options(command: Command) -> Command:
    """Add the settings of a server, including `engine_options`."""
    return _all([option for commands, option in _ENGINE.values() if commands in ("answering", "serving")], command)


def sampling_options(command: Command) -> Command:
    """Add the fields of `SamplingParams`; None or empty if not given."""
    return _all(_SAMPLING, command)


def chat_sampling_options(command: Command) -> Command:
    """Add `sampling_options` with the chat's default temperature."""
    return _all([_temperature(f"{CHAT_TEMPERATURE:g}"), *_SAMPLING[1:]], command)


def _system(ctx: click.Context, param: click.Parameter, text: str | None) -> str | None:
    return text_of_file(Path(text[1:]).expanduser()) if text and text.startswith("@") else text


system_option = click.option("--system", "-s", metavar="TEXT|@FILE", callback=_system, help="The system message, or a file with it.")


def split(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a command's options into keywords of `LLM` and others."""
    model = {name: value for name, value in options.items() if name in _NAMES}
    return model, {name: value for name, value in options.items() if name not in _NAMES}


def chosen_sampling(given: dict[str, Any]) -> SamplingParams:
    """Return the given sampling options. Raises `SamplingError`."""
    chosen = {name: value for name, value in given.items() if value is not None and value != ()}
    return SamplingParams(**{"max_tokens": DEFAULT_MAX_TOKENS, **chosen})


def sampling(given: dict[str, Any], defaults: SamplingParams | None = None) -> SamplingParams:
    """Return the given sampling options completed by the model's defaults, and `stop_on_loop`. Raises `SamplingError`."""
    return chosen_sampling({**given, "stop_on_loop": given.get("stop_on_loop") is not False}).resolved(defaults)


def with_flags(message: str) -> str:
    """Return a message of the library with options for the names of settings: "--memory" for "memory_gb"."""
    flags = {one.name: flags_of(one, how)[0] for one, how in settings() if "_" in one.name and one.name != "path_or_id"}
    message = re.sub(rf"(?<![\w./'\"-])({'|'.join(flags)})(?![\w./'\"=])", lambda found: flags[found[1]].partition("/")[0], message)
    return re.sub(r"^kv (?=takes)|\bkv (?=8, )", "--kv ", message)
