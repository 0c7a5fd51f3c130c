"""The application: its commands, and one border where errors become a report and an exit code.

Exit codes: 0 done; 1 the server refused, or what was asked failed; 2 wrong use or settings; 3 no
answer came from a server; 130 interrupted. Ctrl-C is how --watch, --follow, top and chat are meant
to end, so that they end with 0.
"""

import errno
import importlib.metadata
import inspect
import io
import os
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
from lorry.cli.screen import report
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


def _reflowed(text: str) -> str:
    """Each paragraph as one line. Typer would keep the docstring's own line breaks."""
    return "\n\n".join(" ".join(part.split()) for part in inspect.cleandoc(text).split("\n\n"))


for each in (*app.registered_commands, app.registered_callback):
    assert each is not None
    each.help = _reflowed(each.callback.__doc__ or "")


def main(arguments: list[str] | None = None) -> None:
    """Run `lorry`. Never returns: it exits with one of the codes above."""
    given = sys.argv[1:] if arguments is None else arguments
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started us: nobody wants to read it
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115, PTH123 - until the end
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a name may be more than the terminal can show
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            app(spread_lora_modules(given), prog_name="lorry")
        finally:
            sys.stdout.flush()
    except LorryError as error:
        report_error(error)
        sys.exit(UNREACHABLE if isinstance(error, NO_ANSWER) else REFUSED)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except OSError as error:
        if error.filename is not None:  # of a file, which is caught where files are used
            raise
        _give_up_output(error)
        sys.exit(REFUSED)


def _give_up_output(error: OSError) -> None:
    """Say why standard output cannot be written, unless its reader is gone, and let the end of the
    process not try it again."""
    if error.errno != errno.EPIPE:
        report(f"standard output cannot be written: {error.strerror}")
    with open(os.devnull, "w") as nowhere:  # noqa: PTH123
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


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
