"""`lorry events`: what happened to adapters and engines, and why."""

import json as json_module
import sys
from contextlib import suppress
from typing import Annotated

import typer
from rich.text import Text

from lorry.cli.screen import console, time_text, write_json
from lorry.cli.server import DEFAULT_URL, PANEL, ApiKey, Url, connect
from lorry.client import Event

LAST = 20

COLOURS = {"failed": "red", "engine_lost": "red", "evicted": "yellow", "loaded": "green"}


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command(rich_help_panel=PANEL)(events)


def events(
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Wait for more, until Ctrl-C.")
    ] = False,
    last: Annotated[
        int, typer.Option(min=0, metavar="COUNT", help="How many of the past to show at most.")
    ] = LAST,
    after: Annotated[
        int | None,
        typer.Option(
            min=0, metavar="NUMBER", help="All after this sequence number, whatever --last says."
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only those of this adapter.")
    ] = None,
    json: Annotated[
        bool,
        typer.Option("--json", help="Write JSON, for scripts; with --follow one line for each."),
    ] = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Show what happened to adapters and engines, with the reasons."""
    if follow:
        with suppress(KeyboardInterrupt):
            newest = _past(url, api_key, last, after, name, as_lines=True, json=json)
            _follow(url, api_key, newest, name, json=json)
    else:
        _past(url, api_key, last, after, name, as_lines=False, json=json)


def _past(
    url: str,
    api_key: str | None,
    last: int,
    after: int | None,
    name: str | None,
    *,
    as_lines: bool,
    json: bool,
) -> int:
    """Show what has been; the newest sequence number there is."""
    with connect(url, api_key) as client:
        past = client.events.list(after or 0)
    wanted = [event for event in past if name in (None, event.name)]
    shown = wanted if after is not None else wanted[len(wanted) - min(last, len(wanted)) :]
    if json and not as_lines:
        write_json([event.raw for event in shown])
    elif not shown and not as_lines:
        console().print("No events yet.")
    else:
        for event in shown:
            _show(event, as_json=json)
    return past[-1].sequence if past else after or 0


def _follow(url: str, api_key: str | None, after: int, name: str | None, *, json: bool) -> None:
    with connect(url, api_key, patient=True) as client:
        for event in client.events.follow(after):
            if name in (None, event.name):
                _show(event, as_json=json)


def _show(event: Event, *, as_json: bool) -> None:
    """One line, at once: a reader may be waiting behind a pipe."""
    if as_json:
        sys.stdout.write(json_module.dumps(event.raw, ensure_ascii=False) + "\n")
    else:
        console().print(_line(event), soft_wrap=True)
    sys.stdout.flush()


def _line(event: Event) -> Text:
    what = " ".join(filter(None, (event.name, event.short_version)))
    text = " ".join(event.text.split())
    return Text.assemble(
        (f"{event.sequence:>5}  {time_text(event.at)}  ", "dim"),
        (f"{event.kind:<11} ", COLOURS.get(event.kind, "bold")),
        what,
        ": " if what and text else "",
        text,
    )
