"""The commands that change or show the adapters of a running server."""

from functools import partial
from typing import Annotated

import typer
from rich.console import RenderableType
from rich.text import Text

from lorry.cli.screen import adapter_sheet, adapter_table, console, write_json
from lorry.cli.server import (
    DEFAULT_URL,
    PANEL,
    ApiKey,
    AsJson,
    Digest,
    IfMatch,
    Interval,
    Labels,
    Name,
    Source,
    Url,
    absolute,
    connect,
    progress,
    read_labels,
    say,
)
from lorry.cli.watch import repeat
from lorry.client import Adapter, Client
from lorry.client.calls import LoadOptions, ReplaceOptions, UnloadOptions

Pin = Annotated[bool, typer.Option("--pin", help="Never evict it.")]


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    for command in (ls, show, load, replace, rollback, unload, pin, unpin, prefetch):
        app.command(rich_help_panel=PANEL)(command)


def load(
    name: Name,
    path: Source,
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace the version that is served, if there is one.")
    ] = False,
    pin: Pin = False,
    if_match: IfMatch = None,
    label: Labels = None,
    expected_digest: Digest = None,
    register_only: Annotated[
        bool, typer.Option("--register-only", help="Load it when the first request comes.")
    ] = False,
    json: AsJson = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Load an adapter and wait until it is served. If it fails, what was served before still is."""
    labels = read_labels(label)
    options: LoadOptions = {"replace": replace}
    if pin:
        options["pinned"] = True
    if labels is not None:
        options["labels"] = labels
    if if_match is not None:
        options["if_match"] = if_match
    if expected_digest is not None:
        options["settings"] = {"expected_digest": expected_digest}
    source = absolute(path)
    with connect(url, api_key) as client, progress(f"Loading {name}", quiet=json) as tell:
        if register_only:
            adapter = client.adapters.register(name, source, **options)
        else:
            adapter = client.adapters.load(name, source, progress=tell, **options)
    _served(adapter, json)


def replace(
    name: Name,
    path: Source,
    if_match: IfMatch = None,
    drain_first: Annotated[
        bool,
        typer.Option(
            "--drain-first",
            help="Unload the old version first, when there is no room for both; "
            "requests wait meanwhile.",
        ),
    ] = False,
    pin: Pin = False,
    label: Labels = None,
    expected_digest: Digest = None,
    json: AsJson = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Serve another version under a name that is served. Running requests end on the old one."""
    labels = read_labels(label)
    options: ReplaceOptions = {"drain_first": drain_first}
    if if_match is not None:
        options["if_match"] = if_match
    if pin:
        options["pinned"] = True
    if labels is not None:
        options["labels"] = labels
    if expected_digest is not None:
        options["settings"] = {"expected_digest": expected_digest}
    with connect(url, api_key) as client, progress(f"Replacing {name}", quiet=json) as tell:
        adapter = client.adapters.replace(name, absolute(path), progress=tell, **options)
    _served(adapter, json)


def unload(
    name: Name,
    drain_timeout: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            min=0,
            help="How long to wait for running requests; 0 ends them now.",
            show_default="the server's --drain-timeout",
        ),
    ] = None,
    purge: Annotated[
        bool, typer.Option("--purge", help="Remove the copy on disk too; no rollback then.")
    ] = False,
    if_match: IfMatch = None,
    json: AsJson = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Unload an adapter and wait until no tier holds it."""
    options: UnloadOptions = {"purge": purge}
    if drain_timeout is not None:
        options["drain_timeout_s"] = drain_timeout
    if if_match is not None:
        options["if_match"] = if_match
    with connect(url, api_key) as client, progress(f"Unloading {name}", quiet=json) as tell:
        operation = client.adapters.unload(name, progress=tell, **options)
    say(operation.raw, json, f"{name} is unloaded")


def ls(
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Look again and again, until Ctrl-C.")
    ] = False,
    interval: Interval = 2.0,
    json: AsJson = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """List the adapters and where each of them is."""
    with connect(url, api_key) as client:
        if watch:
            repeat(partial(_listed, client), interval, as_json=json)
        elif json:
            write_json(_listed(client)[1])
        else:
            console().print(_listed(client)[0])


def _listed(client: Client) -> tuple[RenderableType, object]:
    """The list, for people and for scripts."""
    adapters = [adapter.raw for adapter in client.adapters]
    if not adapters:
        return Text("No adapters. Load one: lorry load NAME PATH"), adapters
    return adapter_table(adapters), adapters


def show(name: Name, json: AsJson = False, url: Url = DEFAULT_URL, api_key: ApiKey = None) -> None:
    """Show everything that is known of one adapter."""
    with connect(url, api_key) as client:
        adapter = client.adapters.get(name).raw
    if json:
        write_json(adapter)
    else:
        console().print(adapter_sheet(adapter))


def pin(name: Name, json: AsJson = False, url: Url = DEFAULT_URL, api_key: ApiKey = None) -> None:
    """Pin an adapter: it is never evicted."""
    with connect(url, api_key) as client:
        say(client.adapters.pin(name).raw, json, f"{name} is pinned")


def unpin(name: Name, json: AsJson = False, url: Url = DEFAULT_URL, api_key: ApiKey = None) -> None:
    """Unpin an adapter: it may be evicted when it is idle."""
    with connect(url, api_key) as client:
        say(client.adapters.unpin(name).raw, json, f"{name} is not pinned")


def rollback(
    name: Name,
    to: Annotated[
        str | None,
        typer.Option(
            metavar="VERSION",
            help="Which of the earlier versions that lorry show lists: 12 digits of it or more.",
            show_default="the one before",
        ),
    ] = None,
    json: AsJson = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Serve the version again that was served before the last replace."""
    with connect(url, api_key) as client, progress(f"Rolling {name} back", quiet=json) as tell:
        adapter = client.adapters.rollback(name, to, progress=tell)
    _served(adapter, json)


def prefetch(
    name: Name, json: AsJson = False, url: Url = DEFAULT_URL, api_key: ApiKey = None
) -> None:
    """Bring an adapter into memory before anybody asks for it."""
    with connect(url, api_key) as client, progress(f"Prefetching {name}", quiet=json) as tell:
        adapter = client.adapters.prefetch(name, progress=tell)
    _served(adapter, json)


def _served(adapter: Adapter, json: bool) -> None:
    sentence = f"{adapter.name} is {adapter.state}, version {adapter.short_version}"
    say(adapter.raw, json, sentence)
