"""`lorry check`: whether an adapter could be served on a base model, without a server, or on the
one that a server has.

Exit codes: 0 it could; 1 there are problems; 2 wrong use, or a base model that cannot be read.
"""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.text import Text

from lorry.artifacts.checking import Report, check_folder, facts
from lorry.cli.check_on_server import check_on_server, problem_lines
from lorry.cli.screen import adapter_sheet, console, report, write_json
from lorry.cli.server import DEFAULT_URL, ApiKey, AsJson, Url
from lorry.config import Settings
from lorry.engine import BaseShape
from lorry.engines.embedded.shape import base_shape, read_config
from lorry.errors import ModelInvalid, ModelUnsupported, SourceNotFound

PROBLEMS = 1
USAGE_ERROR = 2

RANK_MAX = Settings(model=Path()).max_lora_rank
"""What a server takes unless it is told otherwise."""


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command(rich_help_panel="Without a server")(check)


def check(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="The adapter's folder.")],
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

    With --base it needs no server. The exit code is 0 for an adapter that can be served, 1 for one
    with problems, and 2 when the base model cannot be read.
    """
    if base is None:
        raise typer.Exit(0 if check_on_server(str(path), url, api_key, json=json) else PROBLEMS)
    shape = _shape(base.expanduser())
    folder = path.expanduser().absolute()
    found = _here(check_folder(folder.name, folder, shape, max_lora_rank))
    if json:
        write_json(_as_json(path, found))
    else:
        console().print(_for_people(path, found), soft_wrap=not found.ok)
    raise typer.Exit(0 if found.ok else PROBLEMS)


def _shape(base: Path) -> BaseShape:
    """What the adapter must fit, or a report and exit code 2."""
    try:
        return base_shape(read_config(base))
    except (ModelInvalid, ModelUnsupported) as error:
        action = "Give the base model's folder, or its GGUF file, with --base."
        report(error.message, details=error.details, action=action, note=error.code)
    except OSError as error:
        report(f"the base model {base} cannot be read: {error.strerror}")
    raise typer.Exit(USAGE_ERROR)


def _here(found: Report) -> Report:
    """The advice on a missing folder speaks of the server's machine, which there is none of."""
    here = "Give the folder that holds adapter_config.json."
    problems = (
        replace(each, fix=here) if each.code == SourceNotFound.code else each
        for each in found.problems
    )
    return replace(found, problems=tuple(problems))


def _as_json(path: Path, found: Report) -> dict[str, Any]:
    """As POST /v1/adapters:check answers, without what only a server knows."""
    return {
        "object": "adapter.check",
        "ok": found.ok,
        "source": str(path),
        "problems": [problem.as_json() for problem in found.problems],
        **(facts(found.manifest) if found.manifest is not None else {}),
    }


def _for_people(path: Path, found: Report) -> Group:
    if found.manifest is not None:
        title = Text.assemble(("ok: ", "bold green"), f"{path} can be served")
        return Group(title, adapter_sheet(facts(found.manifest)))
    return problem_lines(str(path), [problem.as_json() for problem in found.problems])
