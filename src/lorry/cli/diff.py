"""`lorry diff A B`: what tells two adapters apart."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lorry.artifacts.adapter_config import CONFIG_FILE
from lorry.cli.screen import console, report, write_json
from lorry.cli.server import DEFAULT_URL, ApiKey, AsJson, Url, connect
from lorry.errors import SourceNotFound

FAILED = 1
MODULES_SHOWN = 20

FACTS = ("rank", "alpha", "scale_rule", "target_modules", "modules", "parameters", "dtype", "norm")

SIDE = "A folder, or an adapter of the server: NAME or NAME@VERSION."


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command(rich_help_panel="Without a server")(diff)


def diff(
    a: Annotated[str, typer.Argument(metavar="A", help=SIDE)],
    b: Annotated[str, typer.Argument(metavar="B", help=SIDE)],
    every: Annotated[
        bool, typer.Option("--all", help=f"Every module, not only the {MODULES_SHOWN} furthest.")
    ] = False,
    json: AsJson = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Compare two adapters: their configs, and what each module adds to the base.

    A folder that is here is read here. As soon as one side is an adapter of the server, the server
    reads both, so that a folder must be on its machine. Norms are Frobenius norms of scale * B * A.
    """
    here = [_folder(each) for each in (a, b)]
    if here[0] is not None and here[1] is not None:
        found = _compared_here((a, here[0]), (b, here[1]))
    else:
        with connect(url, api_key) as client:
            found = client.adapters.diff(
                *(str(folder or each) for folder, each in zip(here, (a, b), strict=True))
            )
    if json:
        write_json(found)
    else:
        console().print(_for_people(found, every=every))


def _compared_here(a: tuple[str, Path], b: tuple[str, Path]) -> Mapping[str, Any]:
    """The advice on a missing folder speaks of the server's machine, which there is none of."""
    from lorry.artifacts.comparing import Side, compare  # not above: other commands start without

    try:
        return compare(Side(*a), Side(*b)).as_json()
    except SourceNotFound as error:
        report(error.message, action=f"Give the folder that holds {CONFIG_FILE}.", note=error.code)
        raise typer.Exit(FAILED) from None


def _folder(given: str) -> Path | None:
    """The folder that is meant: what looks like a path, and what holds an adapter."""
    path = Path(given).expanduser()
    looks_like_one = given.startswith(("/", "./", "../", "~"))
    return path.resolve() if looks_like_one or (path / CONFIG_FILE).is_file() else None


def _for_people(found: Mapping[str, Any], *, every: bool) -> RenderableType:
    parts: list[RenderableType] = [_facts(found)]
    if found["config"]:
        parts += [Text(), _config(found["config"])]
    if found["same"]:
        return Group(*parts, Text(), Text("Both compute the same.", "green"))
    modules = sorted(found["modules"], key=_distance, reverse=True)
    shown = modules if every else modules[:MODULES_SHOWN]
    parts += [Text(), _modules(shown)]
    if len(shown) < len(modules):
        rest = len(modules) - len(shown)
        parts.append(Text(f"and {rest} more that differ less; --all shows them", "dim"))
    return Group(*parts)


def _distance(module: Mapping[str, Any]) -> float:
    """What cannot be compared comes first."""
    value = module["difference"]
    return float("inf") if value is None else float(value)


def _table(*titles: str, numbers: Sequence[str] = ()) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for title in titles:
        table.add_column(Text(title), overflow="fold", justify="left")
    for title in numbers:
        table.add_column(Text(title), justify="right", no_wrap=True)
    return table


def _facts(found: Mapping[str, Any]) -> Table:
    a, b = found["a"], found["b"]
    table = _table("", a["title"], b["title"])
    for key in FACTS:
        style = "" if a.get(key) == b.get(key) else "yellow"
        cells = (Text(_value(side.get(key)), style) for side in (a, b))
        table.add_row(Text(key.replace("_", " "), "bold"), *cells)
    return table


def _config(entries: Sequence[Mapping[str, Any]]) -> Table:
    table = _table(CONFIG_FILE, "A", "B")
    for each in entries:
        table.add_row(Text(each["key"]), Text(_value(each["a"])), Text(_value(each["b"])))
    return table


def _modules(modules: Sequence[Mapping[str, Any]]) -> Table:
    table = _table("MODULE", numbers=("RANK A", "RANK B", "NORM A", "NORM B", "DIFFERENCE"))
    for each in modules:
        ranks = (_value(each[key]) for key in ("rank_a", "rank_b"))
        norms = (_value(each[key]) for key in ("norm_a", "norm_b"))
        apart = "shapes differ" if each["difference"] is None else _value(each["difference"])
        table.add_row(Text(each["module"]), *ranks, *norms, apart)
    return table


def _value(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return str(value)
