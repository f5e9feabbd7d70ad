"""How commands show their help."""

from typing import Any

from pallas_attn._call.optional import needs_extra

with needs_extra("models", user="every command of pallas-attn but doctor"):
    import typer.core


class _PlainHelp:
    """Mixed into a command: `--help` is listed like other flags, without a type."""

    def get_help_option(self, ctx: Any) -> Any:
        option = super().get_help_option(ctx)  # pyright: ignore[reportAttributeAccessIssue]
        option.metavar = ""
        return option


class PlainCommand(_PlainHelp, typer.core.TyperCommand):
    pass


class PlainGroup(_PlainHelp, typer.core.TyperGroup):
    pass
