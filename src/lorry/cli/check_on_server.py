"""`lorry check` without `--base`: a running server judges, and says what a load would evict."""

from collections.abc import Mapping, Sequence
from typing import Any

import typer
from rich.console import Group
from rich.text import Text

from lorry.cli.screen import adapter_sheet, console, report, write_json
from lorry.cli.server import absolute, connect
from lorry.errors import ServerUnreachable

UNREACHABLE = 3

SHOWN_MAX = 20
"""Problems for people; more would say the same of other layers, most often."""

NO_FACTS = ("object", "ok", "source", "name", "problems")


def check_on_server(source: str, url: str, api_key: str | None, *, json: bool) -> bool:
    """Whether the server could serve the adapter at `source`, which it reads on its machine."""
    try:
        with connect(url, api_key) as client:
            found = client.adapters.check(absolute(source))
    except ServerUnreachable as error:
        action = "Name the base model with --base, which needs no server, or start a server."
        report(error.message, action=action, note=error.code)
        raise typer.Exit(UNREACHABLE) from None
    if json:
        write_json(found.raw)
    elif found.ok:
        title = Text.assemble(("ok: ", "bold green"), f"{source} can be served")
        facts = {key: value for key, value in found.raw.items() if key not in NO_FACTS}
        console().print(Group(title, adapter_sheet(facts)))
    else:
        lines = problem_lines(source, [problem.raw for problem in found.problems])
        console().print(lines, soft_wrap=True)
    return found.ok


def problem_lines(source: str, problems: Sequence[Mapping[str, Any]]) -> Group:
    """All that is wrong, each with its fix."""
    count = len(problems)
    plural = "s" if count > 1 else ""
    lines = [Text.assemble(("refused: ", "bold red"), f"{source} has {count} problem{plural}")]
    for number, problem in enumerate(problems[:SHOWN_MAX], start=1):
        lines.append(Text(f"{number:3}. {problem.get('problem')}"))
        lines.append(Text.assemble(("     fix: ", "green"), str(problem.get("fix"))))
    if count > SHOWN_MAX:
        lines.append(Text(f"     and {count - SHOWN_MAX} more; --json lists them", "dim"))
    return Group(*lines)
