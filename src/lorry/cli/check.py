"""`lorry check`: whether an adapter could be served on a base model, without a server, or on the
one that a server has.

Exit codes: 0 it could; 1 there are problems; 2 wrong use, or a base model that cannot be read.
"""

from dataclasses import replace
from pathlib import Path, PurePath
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group
from rich.text import Text

from lorry.artifacts.remote.policy import SourcePolicy
from lorry.artifacts.remote.uri import is_remote, redact
from lorry.cli.check_on_server import check_on_server, problem_lines
from lorry.cli.screen import adapter_sheet, console, fetching, report, write_json
from lorry.cli.server import DEFAULT_URL, ApiKey, AsJson, Url
from lorry.config import Settings
from lorry.engine import BaseShape
from lorry.errors import (
    ModelInvalid,
    ModelUnsupported,
    RequestInvalid,
    SourceNotFound,
    SourceUnreachable,
    SourceUnsupported,
)

if TYPE_CHECKING:  # what reads files is imported where it is used, or every command waits for it
    from lorry.artifacts.checking import Report

PROBLEMS = 1
USAGE_ERROR = 2

FETCH_TIMEOUT_S = 3600.0
"""Nobody waits but the person at the terminal, who can end it."""

RANK_MAX = Settings(model=Path()).max_lora_rank
"""What a server takes unless it is told otherwise."""

HERE = {
    SourceNotFound.code: "Give the folder that holds adapter_config.json, or its URI.",
    SourceUnreachable.code: "Try again, or look whether the URI's host can be reached from here.",
}
"""What to do where the catalogue's advice speaks of a server."""


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command(rich_help_panel="Without a server")(check)


def check(
    source: Annotated[
        str,
        typer.Argument(
            metavar="PATH|URI",
            help="The adapter's folder, or hf://, s3://, gs:// or https:// and where it is.",
        ),
    ],
    base: Annotated[
        Path | None,
        typer.Option(
            metavar="MODEL",
            help="The base model: a folder, or a GGUF file. Without it a running server is asked, "
            "which also says what would be evicted.",
        ),
    ] = None,
    max_lora_rank: Annotated[
        int, typer.Option(min=1, metavar="RANK", help="Largest rank that the server takes.")
    ] = RANK_MAX,
    json: AsJson = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Judge an adapter as a load would: what it is, or every problem with its fix.

    With --base it needs no server, and what a URI names is fetched to a temporary folder and
    deleted again. The exit code is 0 for an adapter that can be served, 1 for one with problems,
    and 2 when the base model cannot be read or the source is none.
    """
    if base is None:
        raise typer.Exit(0 if check_on_server(source, url, api_key, json=json) else PROBLEMS)
    shape = _shape(base.expanduser())
    found = _here(_judged(source, shape, max_lora_rank))
    shown = redact(source)
    if json:
        write_json(_as_json(shown, found))
    else:
        console().print(_for_people(shown, found), soft_wrap=not found.ok)
    raise typer.Exit(0 if found.ok else PROBLEMS)


def _judged(source: str, shape: BaseShape, max_rank: int) -> "Report":
    """The report, or exit code 2 for what is no source."""
    from lorry.artifacts.checking import check_folder, check_source
    from lorry.artifacts.remote.fetcher import Fetcher

    name = PurePath(redact(source)).name
    if not is_remote(source):
        folder = Path(source).expanduser().absolute()
        return check_folder(folder.name, folder, shape, max_rank)
    policy = SourcePolicy(any_address=True, fetch_timeout_s=FETCH_TIMEOUT_S)
    try:
        with TemporaryDirectory(prefix="lorry-check-") as folder_name, fetching() as tell:
            fetcher = Fetcher(policy, Path(folder_name) / "downloads")
            return check_source(name, source, fetcher, shape, max_rank, report=tell)
    except (RequestInvalid, SourceUnsupported) as error:
        report(error.message, details=error.details, action=error.action, note=error.code)
    raise typer.Exit(USAGE_ERROR)


def _shape(base: Path) -> BaseShape:
    """What the adapter must fit, or a report and exit code 2."""
    from lorry.engines.embedded.shape import base_shape, read_config

    try:
        return base_shape(read_config(base))
    except (ModelInvalid, ModelUnsupported) as error:
        action = "Give the base model's folder, or its GGUF file, with --base."
        report(error.message, details=error.details, action=action, note=error.code)
    except OSError as error:
        report(f"the base model {base} cannot be read: {error.strerror}")
    raise typer.Exit(USAGE_ERROR)


def _here(found: "Report") -> "Report":
    """With the advice for who has no server."""
    problems = (replace(each, fix=HERE.get(each.code, each.fix)) for each in found.problems)
    return replace(found, problems=tuple(problems))


def _as_json(source: str, found: "Report") -> dict[str, Any]:
    """As POST /v1/adapters:check answers, without what only a server knows."""
    from lorry.artifacts.checking import facts

    return {
        "object": "adapter.check",
        "ok": found.ok,
        "source": source,
        "problems": [problem.as_json() for problem in found.problems],
        **(facts(found.manifest) if found.manifest is not None else {}),
    }


def _for_people(path: str, found: "Report") -> Group:
    from lorry.artifacts.checking import facts

    if found.manifest is not None:
        title = Text.assemble(("ok: ", "bold green"), f"{path} can be served")
        return Group(title, adapter_sheet(facts(found.manifest)))
    return problem_lines(path, [problem.as_json() for problem in found.problems])
