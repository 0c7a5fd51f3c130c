"""The application: its commands, and one border where errors become a report and an exit code.

Exit codes: 0 done; 1 the server refused, or what was asked failed; 2 wrong use or settings; 3 no
answer came from a server; 130 interrupted. Ctrl-C is how --watch, --follow, top and chat are meant
to end, so that they end with 0.
"""

import importlib.metadata
import io
import re
import sys
from typing import Annotated

import typer

from lorry.cli import (
    adapters,
    chat,
    check,
    compare,
    completion,
    demo,
    diff,
    events,
    explain,
    serve,
    top,
)
from lorry.cli.reporting import NO_ANSWER, report_error
from lorry.errors import LorryError

REFUSED = 1
UNREACHABLE = 3
INTERRUPTED = 130

LISTS = ("--lora-modules", "--lora-paths")
"""Flags that may be followed by several values, as vLLM and SGLang write them."""

EPILOG = (
    "Exit codes: 0 done; 1 refused or failed; 2 wrong use or settings; 3 no answer of a server; "
    "130 interrupted."
)

app = typer.Typer(
    name="lorry",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"lorry {importlib.metadata.version('lorry')}")
        raise typer.Exit


@app.callback()
def _lorry(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Say the version."),
    ] = False,
) -> None:
    """Serve one base language model and thousands of LoRA adapters on it.

    First steps: lorry serve MODEL, then, from another terminal, lorry load NAME PATH,
    lorry replace NAME PATH, lorry rollback NAME.
    """


for module in (
    *(serve, demo, adapters, top, events),
    *(compare, chat),
    *(check, diff, explain, completion),
):
    module.register(app)


def main(arguments: list[str] | None = None) -> None:
    """Run `lorry`. Never returns: it exits with one of the codes above."""
    given = sys.argv[1:] if arguments is None else arguments
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a name may be more than the terminal can show
            stream.reconfigure(errors="backslashreplace")
    try:
        app(spread_lora_modules(given), prog_name="lorry")
    except LorryError as error:
        report_error(error)
        sys.exit(UNREACHABLE if isinstance(error, NO_ANSWER) else REFUSED)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def spread_lora_modules(arguments: list[str]) -> list[str]:
    """Take vLLM's and SGLang's way of writing too: `--lora-modules a=x b=y` becomes one flag for
    each. A path alone is not taken so: it may be the model."""
    spread: list[str] = []
    flag = ""
    for argument in arguments:
        if flag and _is_module(argument) and spread[-1] != flag:
            spread.append(flag)
        elif argument not in LISTS and not _is_module(argument) and spread[-1:] != [flag]:
            flag = ""
        if argument in LISTS:
            flag = argument
        spread.append(argument)
    return spread


def _is_module(argument: str) -> bool:
    return re.match(r"\{|[^-/=][^/=]*=", argument) is not None
