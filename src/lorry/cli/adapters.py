"""The commands that speak to a running server: load, unload, ls, show, pin, unpin, rollback."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from lorry.artifacts.remote.uri import is_remote
from lorry.cli.api import DEFAULT_URL, Api
from lorry.cli.screen import adapter_sheet, adapter_table, console, write_json

Url = Annotated[
    str, typer.Option("--url", envvar="LORRY_URL", metavar="URL", help="Where the server is.")
]
ApiKey = Annotated[
    str | None,
    typer.Option("--api-key", envvar="LORRY_API_KEY", metavar="KEY", help="The server's key."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Write JSON, for scripts.")]
Name = Annotated[str, typer.Argument(metavar="NAME", help="The adapter's name.")]


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    for command in (load, unload, ls, show, pin, unpin, rollback):
        app.command(rich_help_panel="Adapters of a running server")(command)


def load(
    name: Name,
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH|URI",
            help="The adapter's folder on the server's machine, or hf://org/repo@revision, "
            "s3://bucket/folder, gs://bucket/folder, https://host/folder.",
        ),
    ],
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace the version that is served, if there is one.")
    ] = False,
    pin: Annotated[bool, typer.Option("--pin", help="Never evict it.")] = False,
    if_match: Annotated[
        str | None,
        typer.Option(
            metavar="VERSION", help="Replace only if this version is served now; implies --replace."
        ),
    ] = None,
    label: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="A label; repeatable.")
    ] = None,
    expected_digest: Annotated[
        str | None,
        typer.Option(
            metavar="DIGEST",
            help="Refuse any other content: the version's 64 digits, or sha256: and the weights "
            "file's.",
        ),
    ] = None,
    register_only: Annotated[
        bool, typer.Option("--register-only", help="Load it when the first request comes.")
    ] = False,
    json: AsJson = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Load an adapter and wait until it is served. If it fails, what was served before still is."""
    body: dict[str, object] = {
        "source": _absolute(path),
        "replace": replace or if_match is not None,
        "load": not register_only,
    }
    if pin:
        body["pinned"] = True
    if expected_digest:
        body["expected_digest"] = expected_digest
    if label:
        body["labels"] = _labels(label)
    with Api(url, api_key) as api, _progress(f"Loading {name}", quiet=json) as tell:
        adapter = api.load(name, body, if_match=if_match, progress=tell)
    _say(adapter, json, f"{name} is {adapter['state']}, version {adapter['short_version']}")


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
    json: AsJson = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Unload an adapter and wait until no tier holds it."""
    with Api(url, api_key) as api, _progress(f"Unloading {name}", quiet=json) as tell:
        operation = api.unload(name, drain_timeout=drain_timeout, purge=purge, progress=tell)
    _say(operation, json, f"{name} is unloaded")


def ls(json: AsJson = False, url: Url = DEFAULT_URL, api_key: ApiKey = None) -> None:
    """List the adapters and where each of them is."""
    with Api(url, api_key) as api:
        adapters = api.adapters()
    if json:
        write_json(adapters)
    elif adapters:
        console().print(adapter_table(adapters))
    else:
        console().print("No adapters. Load one: lorry load NAME PATH")


def show(name: Name, json: AsJson = False, url: Url = DEFAULT_URL, api_key: ApiKey = None) -> None:
    """Show everything that is known of one adapter."""
    with Api(url, api_key) as api:
        adapter = api.adapter(name)
    if json:
        write_json(adapter)
    else:
        console().print(adapter_sheet(adapter))


def pin(name: Name, json: AsJson = False, url: Url = DEFAULT_URL, api_key: ApiKey = None) -> None:
    """Pin an adapter: it is never evicted."""
    with Api(url, api_key) as api:
        _say(api.pin(name, True), json, f"{name} is pinned")


def unpin(name: Name, json: AsJson = False, url: Url = DEFAULT_URL, api_key: ApiKey = None) -> None:
    """Unpin an adapter: it may be evicted when it is idle."""
    with Api(url, api_key) as api:
        _say(api.pin(name, False), json, f"{name} is not pinned")


def rollback(
    name: Name, json: AsJson = False, url: Url = DEFAULT_URL, api_key: ApiKey = None
) -> None:
    """Serve the version again that was served before the last replace."""
    with Api(url, api_key) as api, _progress(f"Rolling {name} back", quiet=json) as tell:
        adapter = api.roll_back(name, tell)
    _say(adapter, json, f"{name} is {adapter['state']}, version {adapter['short_version']}")


def _say(value: dict[str, Any], json: bool, sentence: str) -> None:
    if json:
        write_json(value)
    else:
        console().print(Text(sentence), soft_wrap=True)


@contextmanager
def _progress(title: str, *, quiet: bool) -> Iterator[Callable[[str], None]]:
    """A line that says what is going on; only on terminals, and never on standard output."""
    if quiet:
        yield lambda _: None
        return
    with console(stderr=True).status(Text(title)) as status:
        yield lambda phase: status.update(Text(f"{title}: {phase}"))


def _absolute(path: str) -> str:
    """The server reads the path, from another working folder: what exists here is made absolute.
    A URI is the same everywhere."""
    if is_remote(path):
        return path
    here = Path(path).expanduser()
    return str(here.resolve()) if here.exists() else path


def _labels(pairs: list[str]) -> dict[str, str]:
    labels = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not key or not equals:
            raise typer.BadParameter(f"{pair!r} is not KEY=VALUE", param_hint="--label")
        labels[key] = value
    return labels
