"""What all commands for a running server share: their options, the client, and how they report."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from lorry.artifacts.remote.uri import is_remote
from lorry.cli.screen import console, write_json
from lorry.client import NO_RETRY, Client, Operation, Retry
from lorry.errors import LorryError

PANEL = "Adapters of a running server"
ASKING_PANEL = "Asking a running server"

DEFAULT_URL = "http://127.0.0.1:8000"

COMPLETION_TIMEOUT_S = 1.0
"""A person who has pressed Tab does not wait longer."""

Tell = Callable[[Operation], None]


def complete_name(context: typer.Context, incomplete: str) -> list[str]:
    """Names of adapters for the shell; none when no server answers."""
    url = str(context.params.get("url") or DEFAULT_URL)
    key = context.params.get("api_key")
    try:
        with Client(url, api_key=key, timeout_s=COMPLETION_TIMEOUT_S, retry=NO_RETRY) as client:
            names = [adapter.name for adapter in client.adapters]
    except LorryError:
        return []
    return [name for name in names if name.startswith(incomplete)]


Url = Annotated[
    str, typer.Option("--url", envvar="LORRY_URL", metavar="URL", help="Where the server is.")
]
ApiKey = Annotated[
    str | None,
    typer.Option("--api-key", envvar="LORRY_API_KEY", metavar="KEY", help="The server's key."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Write JSON, for scripts.")]
Name = Annotated[
    str,
    typer.Argument(metavar="NAME", help="The adapter's name.", autocompletion=complete_name),
]
Source = Annotated[
    str,
    typer.Argument(
        metavar="PATH|URI",
        help="The adapter's folder on the server's machine, or hf://org/repo@revision, "
        "s3://bucket/folder, gs://bucket/folder, https://host/folder.",
    ),
]
Labels = Annotated[
    list[str] | None, typer.Option("--label", metavar="KEY=VALUE", help="A label; repeatable.")
]
Digest = Annotated[
    str | None,
    typer.Option(
        "--expected-digest",
        metavar="DIGEST",
        help="Refuse any other content: the version's 64 digits, or sha256: and the weights "
        "file's.",
    ),
]
IfMatch = Annotated[
    str | None,
    typer.Option(
        metavar="VERSION", help="Only if this version is served now: 12 digits of it or more."
    ),
]
Interval = Annotated[
    float,
    typer.Option(metavar="SECONDS", min=0.1, max=3600, help="Between two looks."),
]


def connect(url: str, api_key: str | None, *, patient: bool = False) -> Client:
    """The client. It tries once, since a person reads the error; `patient` ones try again."""
    return Client(url, api_key=api_key, retry=Retry() if patient else NO_RETRY)


def say(value: Mapping[str, Any], json: bool, sentence: str) -> None:
    """What has been done: a sentence for people, all of it for scripts."""
    if json:
        write_json(value)
    else:
        console().print(Text(sentence), soft_wrap=True)


@contextmanager
def progress(title: str, *, quiet: bool) -> Iterator[Tell]:
    """A line that says what is going on; only on terminals, and never on standard output."""
    if quiet:
        yield lambda _: None
        return
    with console(stderr=True).status(Text(title)) as status:
        yield lambda seen: status.update(Text(f"{title}: {seen.phase or seen.kind}"))


def absolute(path: str) -> str:
    """The server reads the path, from another working folder: what exists here is made absolute.
    A URI is the same everywhere."""
    if is_remote(path):
        return path
    here = Path(path).expanduser()
    return str(here.resolve()) if here.exists() else path


def read_labels(pairs: list[str] | None) -> dict[str, str] | None:
    """From `KEY=VALUE`. Exit code 2 for anything else."""
    labels = {}
    for pair in pairs or ():
        key, equals, value = pair.partition("=")
        if not key or not equals:
            raise typer.BadParameter(f"{pair!r} is not KEY=VALUE", param_hint="--label")
        labels[key] = value
    return labels or None
