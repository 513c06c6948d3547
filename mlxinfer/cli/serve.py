"""Serve models over HTTP: on the user's own Unix socket, and on TCP if asked to."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from ..errors import ServerError
from .options import complete_model, engine_options, model_options, split

if TYPE_CHECKING:
    from ..server.settings import ReasoningField, ServerSettings


@click.command(short_help="Serve models over HTTP.")
@click.argument("models", metavar="MODEL...", nargs=-1, required=True, shell_complete=complete_model)
@click.option("--socket", type=click.Path(path_type=Path), help="The Unix socket.  [default: $MLXINFER_SOCKET or ~/.mlxinfer/api.sock]")
@click.option("--no-socket", is_flag=True, help="No Unix socket, only TCP.")
@click.option("--host", help="Listen on TCP too, at this address.  [default with --port: 127.0.0.1]")
@click.option("--port", type=click.IntRange(0, 65535), help="Listen on TCP too, at this port; 0: a free one.  [default with --host: 8080]")
@click.option("--open", "opens_page", is_flag=True, help="Open the page to talk to the models in the browser; listens on TCP.")
@click.option("--api-key-file", type=click.Path(path_type=Path), help="Ask for the key in this file on TCP.  [default: $MLXINFER_API_KEY]")
@click.option("--allowed-host", "allowed_hosts", multiple=True, metavar="NAME", help="A name of this machine that clients use; repeatable.")
@click.option("--allowed-origin", "allowed_origins", multiple=True, metavar="ORIGIN", help="A web page or app to let in; repeatable.")
@click.option("--alias", "aliases", multiple=True, metavar="OTHER=NAME", help="Another name of a model; may end in *; repeatable.")
@click.option("--request-timeout", type=click.FloatRange(0, min_open=True), metavar="SECONDS", help="End a request that takes longer.")
@click.option(
    "--reasoning-field",
    type=click.Choice(["both", "reasoning", "reasoning_content", "none"]),
    default="both",
    show_default=True,
    help="Where chat completions put what a model thought.",
)
@click.option("--activated", is_flag=True, help="Take the sockets over from launchd or systemd.")
@click.option("--install", is_flag=True, help="Print a launchd property list that runs this command, and end.")
@model_options
@engine_options
def serve(models: tuple[str, ...], install: bool, aliases: tuple[str, ...], **options: Any) -> None:
    """Serve MODELs to programs that speak OpenAI's, Anthropic's or Ollama's API.

    A MODEL's public name is its alias, hub id or file name; NAME=MODEL gives it another one. Only you can open the socket, so it
    needs no key; TCP beyond this machine needs one.
    """
    model_settings, given = split(options)
    settings, names = _settings(**given), dict(_pair(alias) for alias in aliases)
    if install:
        _print_plist(models, aliases, settings, model_settings)
    else:
        _run(models, names, settings, model_settings)


def _settings(
    *,
    socket: Path | None,
    no_socket: bool,
    host: str | None,
    port: int | None,
    api_key_file: Path | None,
    allowed_hosts: tuple[str, ...],
    allowed_origins: tuple[str, ...],
    request_timeout: float | None,
    opens_page: bool,
    reasoning_field: ReasoningField,
    activated: bool,
) -> ServerSettings:
    from ..server.settings import DEFAULT_PORT, LOOPBACK, Limits, ServerSettings, default_socket, read_api_key

    if socket is not None and no_socket:
        raise click.UsageError("--socket and --no-socket exclude each other")
    own = None if no_socket or (activated and socket is None) else (socket or default_socket()).expanduser()
    return ServerSettings(
        socket=own,
        host=LOOPBACK if host is None and (port is not None or (opens_page and not activated)) else host,
        port=DEFAULT_PORT if port is None else port,
        activated=activated,
        api_key=read_api_key(api_key_file),
        allowed_hosts=allowed_hosts,
        allowed_origins=allowed_origins,
        opens_page=opens_page,
        reasoning_field=reasoning_field,
        limits=Limits(request_s=request_timeout),
    )


def _pair(alias: str) -> tuple[str, str]:
    other, separator, name = alias.partition("=")
    if not separator:
        raise click.BadParameter(f"{alias!r} is not OTHER=NAME", param_hint="--alias")
    return other, name


def _run(models: tuple[str, ...], aliases: dict[str, str], settings: ServerSettings, options: dict[str, Any]) -> None:
    from ..config import EngineArgs
    from ..engine.async_llm import AsyncLLM
    from ..engine.open_model import with_shares
    from ..server.models import public_name
    from ..server.serve import run

    found: dict[str, EngineArgs] = {}
    for name, target in map(public_name, models):
        if name in found:
            raise ServerError(f"two models are called {name!r}: give one of them another name with NAME=MODEL")
        found[name] = EngineArgs(target, **options)
    planned = zip(found, with_shares(list(found.values())), strict=True)
    loads = {name: partial(AsyncLLM, args.path_or_id, **options | {"memory_gb": args.memory_gb}) for name, args in planned}
    run(loads, settings, aliases=aliases, tell=click.echo)


def _print_plist(models: tuple[str, ...], aliases: tuple[str, ...], settings: ServerSettings, options: dict[str, Any]) -> None:
    from ..server.launchd import LABEL, make_directory, property_list

    arguments = [*map(_absolute, models), *(part for alias in aliases for part in ("--alias", alias)), *_spelled(options)]
    text = property_list(arguments, settings)
    directory = make_directory(settings)
    click.echo(text, nl=False)
    click.secho(f"The socket and the log will be in {directory}, which only you can enter.", err=True, dim=True)
    place = f"~/Library/LaunchAgents/{LABEL}.plist"
    click.secho(f"Save this as {place}, then: launchctl bootstrap gui/$(id -u) {place}", err=True, dim=True)


def _absolute(model: str) -> str:
    """The absolute path of a model that is a path; anything else unchanged."""
    name, separator, target = model.rpartition("=")
    path = Path(target).expanduser()
    return f"{name}{separator}{path.absolute()}" if path.exists() else model


def _spelled(options: dict[str, Any]) -> list[str]:
    """The options that the user typed, spelled as on the command line."""
    context = click.get_current_context()
    spelled = []
    for parameter in context.command.params:
        value = options.get(parameter.name or "")
        if parameter.name not in options or context.get_parameter_source(parameter.name) is not ParameterSource.COMMANDLINE:
            continue
        switch = parameter.opts[0] if value is not False else parameter.secondary_opts[0]
        spelled += [switch] if isinstance(value, bool) else [switch, str(value)]
    return spelled
