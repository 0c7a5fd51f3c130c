"""`lorry serve`: flags to settings, then the server; the list of settings makes the flags."""

import inspect
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from lorry.cli.screen import report
from lorry.config import ConfigError, Settings, load_settings
from lorry.config.fields import SettingSpec, specs

USAGE_ERROR = 2


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    serve.__signature__ = inspect.Signature(_parameters())  # type: ignore[attr-defined]
    serve.__annotations__ = {each.name: each.annotation for each in _parameters()}
    app.command(rich_help_panel="Servers")(serve)


def serve(**given: object) -> None:
    """Serve a base model and adapters on it.

    Each flag is also a variable (LORRY_MAX_LORAS) and a key of a TOML file (max_loras); a flag
    wins over a variable, a variable over the file. Sizes are written like 8GiB, times in seconds.
    """
    config = given.pop("config")
    given.pop("enable_lora", None)
    settings = read_settings(
        {name: value for name, value in given.items() if value not in (None, [], ())},
        Path(str(config)) if config else None,
    )
    from lorry.assembly import run_server  # not above: it brings torch, which takes seconds

    raise typer.Exit(run_server(settings))


def read_settings(flags: dict[str, object], config: Path | None) -> Settings:
    """The settings, or a report of all mistakes and exit code 2."""
    try:
        return load_settings(flags, os.environ, config)
    except ConfigError as error:
        count = len(error.mistakes)
        report(
            f"{count} mistake{'s' * (count > 1)} in the settings; nothing was started",
            details=[str(mistake) for mistake in error.mistakes],
            action="See lorry serve --help, or docs/settings.md.",
        )
        raise typer.Exit(USAGE_ERROR) from None


def _parameters() -> list[inspect.Parameter]:
    """MODEL, --config and a flag per setting. All are texts here: parsing, and the report of all
    mistakes at once, is the settings' own work."""
    config = typer.Option(
        "--config", envvar="LORRY_CONFIG", metavar="FILE", help="Settings file (TOML)."
    )
    return [
        *(_parameter(spec) for spec in specs()),
        inspect.Parameter(
            "config",
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[str | None, config],
        ),
        inspect.Parameter(  # vLLM's and SGLang's; adapters are always on here
            "enable_lora",
            inspect.Parameter.KEYWORD_ONLY,
            default=False,
            annotation=Annotated[bool, typer.Option("--enable-lora", hidden=True)],
        ),
    ]


def _parameter(spec: SettingSpec) -> inspect.Parameter:
    """One setting as Typer wants it."""
    default = spec.default_text.replace("`", "")
    about: dict[str, Any] = {
        "help": spec.help + (" Repeatable." if spec.repeatable else ""),
        "metavar": spec.metavar,
        "show_default": default,
        "rich_help_panel": spec.panel,
    }
    kind: object
    if spec.required:
        kind = Annotated[str | None, typer.Argument(help=spec.help, metavar=spec.metavar)]
    elif spec.repeatable:
        kind = Annotated[list[str] | None, typer.Option(spec.flag, *spec.aliases, **about)]
    else:
        kind = Annotated[str | None, typer.Option(spec.flag, *spec.aliases, **about)]
    return inspect.Parameter(
        spec.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind
    )
