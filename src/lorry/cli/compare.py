"""`lorry compare PROMPT`: the answers of several adapters, side by side."""

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from lorry.cli.reporting import plain
from lorry.cli.screen import console, write_json
from lorry.cli.server import ASKING_PANEL, DEFAULT_URL, ApiKey, AsJson, Url, connect
from lorry.client import Client
from lorry.client.calls import GenerateOptions
from lorry.errors import LorryError, ServerUnreachable

FAILED = 1
COLUMN_CELLS_MIN = 24
"""Answers in narrower columns cannot be read; they come one below the other then."""

AT_ONCE_MAX = 16
"""Connections; further adapters wait for a free one."""

MaxTokens = Annotated[int, typer.Option(min=1, metavar="COUNT", help="Length of an answer.")]
Temperature = Annotated[
    float, typer.Option(min=0, metavar="NUMBER", help="0 always takes the likeliest token.")
]
System = Annotated[str | None, typer.Option(metavar="TEXT", help="A system message.")]


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command(rich_help_panel=ASKING_PANEL)(compare)


def compare(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="What all of them are asked.")],
    adapters: Annotated[
        list[str],
        typer.Option(
            metavar="A,B,C",
            help="Names with commas between them, also the base's or NAME@VERSION; repeatable, "
            "for names that hold commas.",
        ),
    ],
    system: System = None,
    max_tokens: MaxTokens = 200,
    temperature: Temperature = 0.0,
    completion: Annotated[
        bool, typer.Option("--completion", help="Go on with the text; no chat template.")
    ] = False,
    json: AsJson = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Ask several adapters the same, all at once, and show their answers side by side.

    The exit code is 1 when one of them gave no answer.
    """
    with connect(url, api_key) as client:
        names = read_names(adapters, client)
        asked = _Question(prompt, system, completion)
        options: GenerateOptions = {"max_tokens": max_tokens, "temperature": temperature}
        answers = all_at_once(lambda name: asked.ask(client, name, options), names)
    if json:
        write_json({"object": "comparison", "prompt": prompt, "answers": answers})
    else:
        screen = console()
        screen.print(_for_people(answers, screen.width))
    if any(answer["error"] for answer in answers):
        raise typer.Exit(FAILED)


def all_at_once(ask: Callable[[str], dict[str, Any]], names: Sequence[str]) -> list[dict[str, Any]]:
    """The answers in the order of the names; the first error that is raised. Threads of a pool
    would be waited for after Ctrl-C; these end with the process."""
    told: queue.Queue[tuple[str, dict[str, Any] | LorryError]] = queue.Queue()
    free = threading.Semaphore(AT_ONCE_MAX)

    def run(name: str) -> None:
        with free:
            try:
                told.put((name, ask(name)))
            except LorryError as error:
                told.put((name, error))

    for name in names:
        threading.Thread(target=run, args=(name,), daemon=True).start()
    answers: dict[str, dict[str, Any]] = {}
    while len(answers) < len(names):
        name, answer = told.get()
        if isinstance(answer, LorryError):
            raise answer
        answers[name] = answer
    return [answers[name] for name in names]


def read_names(given: Sequence[str], client: Client) -> list[str]:
    """Each name once. What stands between commas is a name, unless the whole is one."""
    known = set(client.models())
    names: list[str] = []
    for each in given:
        names += [each] if each in known else [part.strip() for part in each.split(",")]
    names = list(dict.fromkeys(name for name in names if name))
    if not names:
        raise typer.BadParameter("name at least one adapter", param_hint="--adapters")
    return names


class _Question:
    """What is asked."""

    def __init__(self, prompt: str, system: str | None, completion: bool) -> None:
        self._prompt = prompt
        self._completion = completion
        self._messages = [{"role": "system", "content": system}] if system else []
        self._messages.append({"role": "user", "content": prompt})

    def ask(self, client: Client, name: str, options: GenerateOptions) -> dict[str, Any]:
        """The answer of one adapter, or its error; no error of one hides another's answer."""
        told = {"adapter": name, "text": "", "finish_reason": "", "tokens": 0, "error": None}
        try:
            if self._completion:
                answer = client.generate(name, self._prompt, **options)
            else:
                answer = client.chat(name, self._messages, **options)
        except ServerUnreachable:
            raise
        except LorryError as error:
            return {**told, "error": {"code": error.code, "message": error.message}}
        return {
            **told,
            "text": answer.text,
            "finish_reason": answer.finish_reason,
            "tokens": answer.completion_tokens,
        }


def _for_people(answers: Sequence[Mapping[str, Any]], width: int) -> RenderableType:
    """Columns where they are wide enough to be read, else rows."""
    if width // len(answers) >= COLUMN_CELLS_MIN:
        table = Table(header_style="bold cyan", show_lines=True, expand=False)
        for answer in answers:
            table.add_column(Text(answer["adapter"]), overflow="fold", ratio=1)
        table.add_row(*(_cell(answer) for answer in answers))
        return table
    table = Table(header_style="bold", show_lines=True)
    table.add_column("ADAPTER", style="cyan", overflow="fold")
    table.add_column("ANSWER", overflow="fold", ratio=1)
    for answer in answers:
        table.add_row(Text(answer["adapter"]), _cell(answer))
    return table


def _cell(answer: Mapping[str, Any]) -> Text:
    if answer["error"]:
        return Text(f"{answer['error']['message']} ({answer['error']['code']})", "red")
    cut = Text(" ...", "dim") if answer["finish_reason"] == "length" else Text()
    return Text(plain(answer["text"].strip())) + cut
