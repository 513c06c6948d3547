"""Command groups that print their help without a command, accept other tools' names, and suggest the nearest name."""

from __future__ import annotations

import click

from .console import nearest


class Commands(click.Group):
    """Group that also accepts the unlisted `other_names`."""

    other_names: dict[str, str]
    """Other tools' names to the equivalent commands."""

    def __init__(self, *arguments: object, other_names: dict[str, str] | None = None, **settings: object) -> None:
        super().__init__(*arguments, **settings)  # type: ignore[arg-type]
        self.other_names = other_names or {}

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args and not ctx.resilient_parsing:
            click.echo(ctx.get_help())
            ctx.exit()
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        typed = args[0]
        name = self.other_names.get(typed, typed)
        if self.get_command(ctx, name) is None and not typed.startswith("-") and not ctx.resilient_parsing:
            names = self.list_commands(ctx)
            near = nearest(typed, names)
            advice = f"Did you mean '{near}'?" if near else f"Commands: {', '.join(names)}."
            raise click.UsageError(f"Unknown command '{typed}'. {advice}", ctx)
        return super().resolve_command(ctx, [name, *args[1:]])
