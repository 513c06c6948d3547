"""Talk with a model in the terminal."""

from __future__ import annotations

from typing import Any

import click

from .console import opened
from .options import engine_options, model_argument, model_options, sampling, sampling_options, split


@click.command(short_help="Talk with a model.")
@model_argument
@click.option("--system", metavar="TEXT", help="The system message.")
@sampling_options
@model_options
@engine_options
def chat(model: str, system: str | None, **options: Any) -> None:
    """Talk with MODEL. Ctrl-C stops an answer, Ctrl-D leaves, /help lists the commands.

    Where standard input is a pipe, every line is a message, and the answers alone go to standard output.
    """
    from .repl.conversation import Conversation
    from .repl.loop import converse

    model_settings, given = split(options)
    sampling(given)
    with opened(model, model_settings) as llm:
        converse(Conversation(llm, sampling(given, llm.default_params), system))
