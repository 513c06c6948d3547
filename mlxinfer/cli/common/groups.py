"""Groups of commands: alone they print their help, words of other tools are understood, and an unknown name comes with the nearest one."""

from __future__ import annotations

import click

from .console import nearest


class Commands(click.Group):
    """A group whose `other_names` are accepted and not listed."""

    other_names: dict[str, str]
    """Words of other tools to the commands here that do the same."""
    advice: dict[str, str]
    """Words of other tools to what does the same here, which is not a command."""

    def __init__(
        self, *arguments: object, other_names: dict[str, str] | None = None, advice: dict[str, str] | None = None, **settings: object
    ) -> None:
        super().__init__(*arguments, **settings)  # type: ignore[arg-type]
        self.other_names = other_names or {}
        self.advice = advice or {}

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
            advice = self.advice.get(typed) or (f"Did you mean '{near}'?" if near else f"Commands: {', '.join(names)}.")
            raise click.UsageError(f"Unknown command '{typed}'. {advice}", ctx)
        return super().resolve_command(ctx, [name, *args[1:]])
