"""Commands with a MODEL argument: grouped options in the help, and other tools' `-m MODEL`."""

from __future__ import annotations

import click

from .options import GROUPS

_NAMED = ("-m", "--model")


class ModelCommand(click.Command):
    """Command with a model as its first argument."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, _model_first(args))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        records: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx) if isinstance(parameter, click.Option) else None
            if record is not None:
                title = next((title for title, names in GROUPS.items() if parameter.name in names), "Options")
                records.setdefault(title, []).append(record)
        for title in ("Options", *GROUPS):
            if title in records:
                with formatter.section(title):
                    formatter.write_dl(records[title])


def _model_first(args: list[str]) -> list[str]:
    """Move the value of `-m MODEL` or `--model=MODEL` to the first argument."""
    for i, word in enumerate(args):
        if word == "--":
            break
        if word in _NAMED and i + 1 < len(args):
            return [args[i + 1], *args[:i], *args[i + 2 :]]
        if word.startswith("--model="):
            return [word.removeprefix("--model="), *args[:i], *args[i + 1 :]]
    return args
