"""Serve models over HTTP: on the user's own Unix socket, and on TCP if asked to."""

from __future__ import annotations

import math
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from .common.console import compiling_told, tell
from .common.model_command import ModelCommand
from .common.options import complete_model, model_options, serving_options, split
from .remote.background import detach

if TYPE_CHECKING:
    from ..server.log import LogFormat
    from ..server.process import ServerModels
    from ..server.settings import ReasoningField, ServerSettings

ADAPTER_ROOM_GB = 0.25
"""Default of --adapter-memory: GB per model for adapters that clients load."""


_EXAMPLES = """\b
Examples:
  mlxinfer serve smollm2 --open
  mlxinfer serve smollm2 --detach
  mlxinfer serve --models-dir ~/models --port 8080
  MLXINFER_API_KEY=... mlxinfer serve smollm2 --host 0.0.0.0"""


@click.command(short_help="Serve models over HTTP.", cls=ModelCommand, epilog=_EXAMPLES)
@click.argument("models", metavar="MODEL...", nargs=-1, shell_complete=complete_model)
@click.option("--models-dir", type=click.Path(path_type=Path), metavar="DIR", help="List the models in it; each is loaded when asked for.")
@click.option("--pin", "pinned", multiple=True, metavar="NAME", help="Load this one at the start and never unload it; repeatable.")
@click.option(
    "--keep-alive",
    metavar="TIME",
    callback=lambda ctx, param, value: _keep_alive(value),
    help="Unload a model after this much idle time (5m, 1h30m, seconds; -1: never).  [default: never; 5m with --models-dir]",
)
@click.option("--socket", type=click.Path(path_type=Path), help="The Unix socket.  [default: $MLXINFER_SOCKET or ~/.mlxinfer/api.sock]")
@click.option("--no-socket", is_flag=True, help="No Unix socket, only TCP.")
@click.option("--host", help="Listen on TCP too, at this address.  [default with --port: 127.0.0.1]")
@click.option("--port", type=click.IntRange(0, 65535), help="Listen on TCP too, at this port; 0: a free one.  [default with --host: 8080]")
@click.option("--open", "opens_page", is_flag=True, help="Open the page to talk to the models in the browser; listens on TCP.")
@click.option(
    "--log-format",
    type=click.Choice(["auto", "text", "json"]),
    default="auto",
    show_default=True,
    help="Log one line a request for people, or JSON; auto: text on a terminal.",
)
@click.option("--api-key-file", type=click.Path(path_type=Path), help="Require the key in this file on TCP.  [default: $MLXINFER_API_KEY]")
@click.option("--allowed-host", "allowed_hosts", multiple=True, metavar="NAME", help="A name of this machine that clients use; repeatable.")
@click.option(
    "--allowed-origin", "allowed_origins", multiple=True, metavar="ORIGIN", help="Origin of a web page or app to allow; repeatable."
)
@click.option("--alias", "aliases", multiple=True, metavar="OTHER=NAME", help="Another name of a model; may end in *; repeatable.")
@click.option("--request-timeout", type=click.FloatRange(0, min_open=True), metavar="SECONDS", help="End a request that takes longer.")
@click.option(
    "--reasoning-field",
    type=click.Choice(["both", "reasoning", "reasoning_content", "none"]),
    default="both",
    show_default=True,
    help="The field of chat completions with the reasoning.",
)
@click.option(
    "--drain", type=click.FloatRange(0), default=0.0, metavar="SECONDS", help="Keep answering this long after SIGTERM, /health saying 503."
)
@click.option(
    "--allow-adapter-loading",
    "adapters_dir",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Let clients load adapters from this folder, and unload them.",
)
@click.option("--kv-events", metavar="ENDPOINT", help="Publish to routers what is cached, by ZMQ at ipc:// or tcp://ADDRESS:PORT.")
@click.option("--kv-events-replay", metavar="ENDPOINT", help="Where routers ask for events that they missed.")
@click.option("--nodes", type=click.Path(path_type=Path), metavar="HOSTFILE", help="Run one MODEL on the machines in this hostfile of MLX.")
@click.option("--rank", type=click.IntRange(0), envvar="MLX_RANK", help="With --nodes: this machine's rank.  [default: from mlx.launch]")
@click.option(
    "--split",
    "split_by",
    type=click.Choice(["pipeline", "tensor"]),
    default="pipeline",
    show_default=True,
    help="With --nodes: divide the model by layers, or by heads and columns.",
)
@click.option("--activated", is_flag=True, help="Take the sockets over from launchd or systemd.")
@click.option(
    "--detach",
    is_flag=True,
    expose_value=False,
    callback=lambda ctx, param, value: _detach(ctx) if value else None,
    help="Serve in the background once the models are loaded; mlxinfer stop ends it.",
)
@click.option("--install", is_flag=True, help="Print a launchd property list that runs this command, and end.")
@model_options
@serving_options
def serve(
    models: tuple[str, ...],
    install: bool,
    aliases: tuple[str, ...],
    models_dir: Path | None,
    pinned: tuple[str, ...],
    keep_alive: float | None,
    nodes: Path | None,
    rank: int | None,
    split_by: str,
    **options: Any,
) -> None:
    """Serve MODELs to programs that speak OpenAI's, Anthropic's or Ollama's API.

    A MODEL's public name is its alias, hub id or file name; NAME=MODEL gives it another one. Only you can open the socket, so it
    needs no key; TCP beyond this machine needs one. --memory is for all models together: if one needs room, those that were
    idle longest are unloaded.
    """
    if not models and models_dir is None:
        raise click.UsageError("name a MODEL, or a folder of models with --models-dir")
    model_settings, given = split(options)
    if given["adapters_dir"] is not None and not model_settings.get("adapter_memory_gb"):
        model_settings["adapter_memory_gb"] = ADAPTER_ROOM_GB
    settings, names = _server_settings(**given), dict(_pair(alias) for alias in aliases)
    if install:
        _print_plist(models, aliases, models_dir, pinned, settings, model_settings)
        return
    if nodes is not None:
        _serve_on_nodes(() if models_dir else models, nodes, rank, settings, names, model_settings, split_by)
        return
    _serve(_listed(models, names, models_dir, pinned, keep_alive, model_settings), settings)


def _serve(models: ServerModels, settings: ServerSettings) -> None:
    from ..server.process import run

    with compiling_told() if sys.stderr.isatty() else nullcontext():
        run(models, settings, tell=click.echo)


def _serve_on_nodes(models: tuple[str, ...], *rest: Any) -> None:
    from .serve_nodes import serve_on_nodes

    if len(models) != 1:
        raise click.UsageError("several machines serve one model: name one MODEL with --nodes")
    serve_on_nodes(models[0], *rest)


def _server_settings(
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
    log_format: LogFormat,
    reasoning_field: ReasoningField,
    drain: float,
    kv_events: str | None,
    kv_events_replay: str | None,
    activated: bool,
    adapters_dir: Path | None,
) -> ServerSettings:
    from ..server.settings import DEFAULT_PORT, LOOPBACK, Limits, ServerSettings, is_open, read_api_key
    from ..util.cache_dir import default_socket

    if socket is not None and no_socket:
        raise click.UsageError("--socket and --no-socket exclude each other")
    if kv_events_replay is not None and kv_events is None:
        raise click.UsageError("--kv-events-replay goes with --kv-events")
    if is_open(api_key_file):
        tell(f"others can read the API key in {api_key_file}: chmod 600 it", problem=True)
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
        log_format=log_format,
        reasoning_field=reasoning_field,
        drain_s=drain,
        adapters_dir=adapters_dir,
        kv_events=kv_events,
        kv_events_replay=kv_events_replay,
        limits=Limits(request_s=request_timeout),
    )


def _pair(alias: str) -> tuple[str, str]:
    other, separator, name = alias.partition("=")
    if not separator:
        raise click.BadParameter(f"{alias!r} is not OTHER=NAME", param_hint="--alias")
    return other, name


def _detach(context: click.Context) -> None:
    """Start the same command in the background, and end."""
    detach([word for word in sys.argv[1:] if word != "--detach"])
    context.exit()


def _keep_alive(text: str | None) -> float | None:
    """Parse a duration to seconds. Raises `click.BadParameter`."""
    if text is None:
        return None
    from ..server.model_manager.duration import seconds_of

    try:
        found = seconds_of(float(text))
    except ValueError:
        found = seconds_of(text)
    if found is None:
        raise click.BadParameter(f"{text!r} is not a duration: use 5m, 1h30m or 300", param_hint="--keep-alive")
    return found


def _listed(
    models: tuple[str, ...],
    aliases: dict[str, str],
    models_dir: Path | None,
    pinned: tuple[str, ...],
    keep_alive: float | None,
    options: dict[str, Any],
) -> ServerModels:
    from ..config import EngineArgs
    from ..engine.async_llm import AsyncLLM
    from ..server.model_manager.listing import Listing

    adapters = options.pop("adapters", None)
    listing = Listing(EngineArgs("", **options), AsyncLLM.of, keep_alive, adapters or {})
    for model in models:
        listing.add(model)
    if models_dir is not None:
        listing.add_folder(models_dir)
    return listing.models(aliases, pinned)


def _print_plist(
    models: tuple[str, ...],
    aliases: tuple[str, ...],
    models_dir: Path | None,
    pinned: tuple[str, ...],
    settings: ServerSettings,
    options: dict[str, Any],
) -> None:
    from ..server.access.launchd import LABEL, make_directory, property_list

    folder = ["--models-dir", str(models_dir.expanduser().absolute())] if models_dir else []
    repeated = [part for alias in aliases for part in ("--alias", alias)] + [part for name in pinned for part in ("--pin", name)]
    arguments = [*map(_absolute, models), *folder, *repeated, *_spelled(options), *_spelled_keep_alive()]
    text = property_list(arguments, settings)
    directory = make_directory(settings)
    click.echo(text, nl=False)
    click.secho(f"The socket and the log will be in {directory}, which only you can enter.", err=True, dim=True)
    place = f"~/Library/LaunchAgents/{LABEL}.plist"
    click.secho(f"Save this as {place}, then: launchctl bootstrap gui/$(id -u) {place}", err=True, dim=True)


def _spelled_keep_alive() -> list[str]:
    seconds = click.get_current_context().params["keep_alive"]
    return [] if seconds is None else ["--keep-alive", f"{seconds if math.isfinite(seconds) else -1:g}"]


def _absolute(model: str) -> str:
    """Return the absolute path of a model that is a path; anything else unchanged."""
    name, separator, target = model.rpartition("=")
    path = Path(target).expanduser()
    return f"{name}{separator}{path.absolute()}" if path.exists() else model


def _spelled(options: dict[str, Any]) -> list[str]:
    """Return the options that the user gave, in command-line syntax."""
    context = click.get_current_context()
    spelled = []
    for parameter in context.command.params:
        value = options.get(parameter.name or "")
        if parameter.name not in options or context.get_parameter_source(parameter.name) is not ParameterSource.COMMANDLINE:
            continue
        if isinstance(value, dict):
            spelled += [part for name, path in value.items() for part in (parameter.opts[0], f"{name}={_absolute(path)}")]
            continue
        switch = parameter.opts[0] if value is not False else parameter.secondary_opts[0]
        spelled += [switch] if isinstance(value, bool) else [switch, str(value)]
    return spelled
