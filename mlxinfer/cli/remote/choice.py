"""Choice between a model of the running server and one that is loaded here."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from ...config import settings
from ...errors import MLXInferError, ModelNotFoundError, ServerError
from ..common.console import opened, tell
from .connection import ServerAddress
from .remote_model import RemoteModel, served_model

if TYPE_CHECKING:
    from ...engine.llm import LLM


@contextmanager
def reached(model: str, options: dict[str, Any], *, quiet: bool = False) -> Iterator[LLM | RemoteModel]:
    """Open a model for the block, as `opened` does, or use that of a server, if the options of `server_options` allow it."""
    own = dict(options)
    found = _of_a_server(model, local=own.pop("local"), url=own.pop("url"))
    if found is not None:
        yield found
        return
    with opened(model, own, quiet=quiet) as llm:
        yield llm


def _of_a_server(model: str, *, local: bool, url: str | None) -> RemoteModel | None:
    """Return the model of the server at `url`, by default this user's; None if it must be loaded here, as `local` says.

    Raises `ServerError` if `url` is given and does not answer, and `ModelNotFoundError` if the server there does not have the model.
    """
    chosen = _chosen_settings()
    if url is None:
        return None if local or chosen else _running(model)
    if local:
        raise click.UsageError("--local and --url exclude each other")
    if chosen:
        raise click.UsageError(f"{chosen[0]} is chosen where the server starts, not with --url")
    try:
        return served_model(ServerAddress(url.rstrip("/")), model)
    except OSError as error:
        raise ServerError(f"no server answers at {url}: {error.strerror or error}") from None


def _chosen_settings() -> list[str]:
    """Return the options of the command line that are settings of a loaded model."""
    context, names = click.get_current_context(), {one.name for one, _ in settings()}
    given = [each for each in context.command.params if each.name in names]
    return [each.opts[0] for each in given if context.get_parameter_source(each.name or "") is ParameterSource.COMMANDLINE]


def _running(model: str) -> RemoteModel | None:
    """Return the model from this user's server: the one of this name, or of these files; None without."""
    address = ServerAddress()
    try:
        if not os.path.exists(os.path.expanduser(model)):
            return served_model(address, model)
        name = _of_these_files(address, model)
        return None if name is None else served_model(address, name)
    except (OSError, ModelNotFoundError):
        return None
    except MLXInferError as error:
        tell(f"note: the running server is not used: {error}")
        return None


def _of_these_files(address: ServerAddress, model: str) -> str | None:
    """Return the server's name of the model with the same files."""
    listed: list[dict[str, Any]] = address.ask("GET", "/api/tags")["models"]
    from ...loading.find.fingerprint import fingerprint
    from ...loading.find.resolve import resolve

    digest = hashlib.sha256(fingerprint(resolve(model).path).encode()).hexdigest()
    return next((each["name"].removesuffix(":latest") for each in listed if each["digest"] == digest), None)
