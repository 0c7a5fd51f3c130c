"""`lorry explain`: the catalogue of errors, for people at a terminal and for scripts."""

from typing import Annotated

import typer
from rich.console import Group
from rich.table import Table
from rich.text import Text

from lorry.cli.screen import console, report, write_json
from lorry.error_catalogue import Entry, entries, find, near

USAGE_ERROR = 2


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command(rich_help_panel="Without a server")(explain)


def explain(
    code: Annotated[
        str | None, typer.Argument(metavar="CODE", help="Such as queue_full, or its class.")
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Write JSON, one record for each error.")
    ] = False,
) -> None:
    """Explain an error: what triggers it, what to do, how to prevent it. Without CODE, list all."""
    if code is None:
        if json:
            write_json([each.record() for each in entries()])
        else:
            console().print(_table())
        return
    found = find(code)
    if found is None:
        alike = near(code)
        action = f"Did you mean {' or '.join(alike)}?" if alike else "lorry explain lists all."
        report(f"there is no error with the code {code!r}", action=action)
        raise typer.Exit(USAGE_ERROR)
    if json:
        write_json(found.record())
    else:
        console().print(_sheet(found), soft_wrap=True)


def _table() -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("CODE", no_wrap=True)
    table.add_column("STATUS", justify="right", no_wrap=True)
    table.add_column("RETRY", no_wrap=True)
    table.add_column("MEANING", overflow="fold")
    for each in entries():
        status = str(each.kind.status)
        table.add_row(each.code, status, each.words.retry.value, Text(each.meaning))
    return table


def _sheet(each: Entry) -> Group:
    kind, words = each.kind, each.words
    pause = f", after {kind.retry_after_s:g} s or what the answer says" if kind.retryable else ""
    lines = [
        Text.assemble((each.code, "bold"), f"  HTTP {kind.status}, {kind.__name__}"),
        Text(each.meaning),
        Text(f"Severity {words.severity.value}; fault: {kind.fault.value}"),
        Text(f"Retry: {words.retry.value}{pause}"),
    ]
    parts = {
        "Messages": words.patterns,
        "What triggers it": words.triggers,
        "Common situations": words.situations,
        "What to do": words.solutions,
        "For programs": (words.handling,),
        "How to prevent it": words.prevention,
    }
    for title, items in parts.items():
        lines += [Text(""), Text(title, "bold"), *(Text(f"  - {item}") for item in items)]
    return Group(*lines, Text(""), Text(f"Tags: {', '.join(words.tags)}", "dim"))
