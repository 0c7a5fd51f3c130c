"""How things look: consoles, tables and error reports. Text of others is never read as markup."""

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

PIPE_WIDTH = 120
"""Columns when the output is no terminal; Rich would take 80 and break lines in logs."""

DETAILS_SHOWN = 10
"""More than these say the same of other layers, most often."""


def console(*, stderr: bool = False) -> Console:
    """A console for this moment's standard output or error."""
    stream = sys.stderr if stderr else sys.stdout
    known = stream.isatty() or "COLUMNS" in os.environ
    return Console(stderr=stderr, width=None if known else PIPE_WIDTH, highlight=False)


def write_json(value: object) -> None:
    """For scripts: indented JSON and nothing else."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def report(message: str, *, details: Sequence[str] = (), action: str = "", note: str = "") -> None:
    """An error, on standard error: what is wrong, each detail, what to do."""
    screen = console(stderr=True)
    screen.print(Text.assemble(("error: ", "bold red"), message), soft_wrap=True)
    for detail in details[:DETAILS_SHOWN]:
        screen.print(Text(f"  - {detail}"), soft_wrap=True)
    if len(details) > DETAILS_SHOWN:
        screen.print(Text(f"  - and {len(details) - DETAILS_SHOWN} more"))
    if action:
        screen.print(Text(f"  {action}"), soft_wrap=True)
    if note:
        screen.print(Text(f"  ({note})", "dim"), soft_wrap=True)


@contextmanager
def fetching() -> Iterator[Callable[[int, int], None]]:
    """A bar on standard error while something is fetched, for terminals only; takes (bytes done,
    bytes in all)."""
    screen = console(stderr=True)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=screen,
        transient=True,
        disable=not screen.is_terminal,
    ) as bar:
        task = bar.add_task("Fetching", total=None)

        def tell(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total or None)

        yield tell


def size_text(count: object) -> str:
    """Bytes for people: `1.2 MiB`."""
    if not isinstance(count, int | float):
        return "-"
    number = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"


def time_text(seconds: object) -> str:
    """Seconds since 1970 as local time."""
    if not isinstance(seconds, int | float):
        return "-"
    return datetime.fromtimestamp(seconds).astimezone().isoformat(" ", "seconds")


def place_text(adapter: Mapping[str, Any]) -> str:
    """Where the version is: `slot 3`, `host`, `disk`."""
    tier = str(adapter.get("tier", "-"))
    slot = adapter.get("slot")
    return f"slot {slot}" if tier == "slot" and slot is not None else tier


def state_cell(adapter: Mapping[str, Any]) -> Text:
    """The state, coloured by whether requests are served."""
    state = str(adapter.get("state", "-"))
    colours = {"resident": "green", "failed": "red", "on_disk": "cyan"}
    return Text(state, colours.get(state, "yellow"))


def adapter_table(adapters: Sequence[Mapping[str, Any]]) -> Table:
    """What `lorry ls` shows."""
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("NAME", "VERSION", "STATE", "WHERE"):
        table.add_column(title, no_wrap=title != "NAME", overflow="fold")
    for title in ("RANK", "SIZE", "RUNNING", "WAITING"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("PINNED", no_wrap=True)
    table.add_column("SOURCE", overflow="fold")
    for adapter in adapters:
        table.add_row(
            Text(str(adapter.get("name", "-"))),
            Text(str(adapter.get("short_version", "-"))),
            state_cell(adapter),
            place_text(adapter),
            str(adapter.get("rank", "-")),
            size_text(adapter.get("bytes")),
            str(adapter.get("leases", "-")),
            str(adapter.get("waiting", "-")),
            "yes" if adapter.get("pinned") else "",
            Text(str(adapter.get("source", "-"))),
        )
    return table


def adapter_sheet(adapter: Mapping[str, Any]) -> Table:
    """What `lorry show` shows: everything, one fact a line."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for key, value in adapter.items():
        if key == "object":
            continue
        table.add_row(key.replace("_", " "), Text(_fact(key, value)))
    return table


def _fact(key: str, value: object) -> str:
    """One value as people read it."""
    if value is None or value == "" or value in ([], {}):
        return "-"
    if key in ("created", "updated"):
        return time_text(value)
    if key in ("bytes", "host_bytes"):
        return f"{size_text(value)} ({value})"
    if key == "layers" and isinstance(value, list):
        return _ranges(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        lines = any(isinstance(each, dict) for each in value)
        return ("\n" if lines else ", ").join(_fact("", each) for each in value)
    if isinstance(value, dict):
        given = value if key else {name: x for name, x in value.items() if x not in (None, "")}
        return ", ".join(f"{name}={each}" for name, each in given.items())
    return str(value)


def _ranges(numbers: Sequence[int]) -> str:
    """`0-29` instead of thirty numbers."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
