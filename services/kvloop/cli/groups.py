"""Command groups whose commands are made when they are called, so that help comes at once."""

from typing import Any, ClassVar

from typer.core import TyperCommand, TyperGroup

_LISTING = "kvloop.listing"


class LazyGroup(TyperGroup):
    """Lists names with one line of help each, and makes the one command that is called."""

    lines: ClassVar[dict[str, str]] = {}
    """Help line by command name."""

    def make(self, name: str) -> Any:
        """Return the command of a listed name."""
        raise NotImplementedError

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names in the table's order."""
        return list(self.lines)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command; a stand-in while help is written."""
        if cmd_name not in self.lines:
            return None
        if ctx.meta.get(_LISTING):
            return TyperCommand(cmd_name, help=self.lines[cmd_name])
        return self.make(cmd_name)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help without making the commands."""
        ctx.meta[_LISTING] = True
        super().format_help(ctx, formatter)
