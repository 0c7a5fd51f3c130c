"""`lorry chat NAME`: a conversation with one adapter, as it writes."""

import contextlib
import io
import sys
from typing import Annotated, Any

import typer
from rich.text import Text

from lorry.cli.compare import MaxTokens, System
from lorry.cli.reporting import plain, report_error
from lorry.cli.screen import console, report
from lorry.cli.server import ASKING_PANEL, DEFAULT_URL, ApiKey, Url, complete_name, connect
from lorry.client import Client
from lorry.client.calls import GenerateOptions
from lorry.errors import LorryError

HELP = """\
/use NAME      talk to another adapter, or to the base, about the same
/system TEXT   set the system message; without TEXT, take it away
/reset         forget what was said
/help          show this
/exit          leave; so does Ctrl-D. Ctrl-C ends an answer"""


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command(rich_help_panel=ASKING_PANEL)(chat)


def chat(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="An adapter, NAME@VERSION, or the base model.",
            autocompletion=complete_name,
        ),
    ],
    system: System = None,
    max_tokens: MaxTokens = 512,
    temperature: Annotated[
        float | None,
        typer.Option(
            min=0, metavar="NUMBER", help="0 always takes the likeliest.", show_default="1"
        ),
    ] = None,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Talk to one adapter; its answers appear as it writes them.

    Lines that begin with / are commands: /help lists them. With input from a pipe, each line is a
    message, and the first error ends it with exit code 1.
    """
    options: GenerateOptions = {"max_tokens": max_tokens}
    if temperature is not None:
        options["temperature"] = temperature
    with connect(url, api_key) as client:
        talk = Talk(client, name, system, options)
        client.model(name)
        if sys.stdin.isatty():
            _interactive(talk)
        else:
            if isinstance(sys.stdin, io.TextIOWrapper):
                sys.stdin.reconfigure(errors="replace")
            for line in sys.stdin:
                if talk.take(line.rstrip("\n")):
                    return


def _interactive(talk: "Talk") -> None:
    """Until /exit, Ctrl-D, or Ctrl-C at the prompt. Errors are shown, and the talk goes on."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives input() its history and editing keys
    console().print(Text(f"Talking to {talk.model}. /help lists the commands.", "dim"))
    ended = False
    while not ended:
        try:
            line = input(f"{talk.model}> ")
        except (EOFError, KeyboardInterrupt):
            console().print()
            return
        try:
            ended = talk.take(line)
        except LorryError as error:
            report_error(error)


class Talk:
    """One conversation."""

    def __init__(
        self, client: Client, model: str, system: str | None, options: GenerateOptions
    ) -> None:
        """Nothing has been said."""
        self.model = model
        self.messages: list[dict[str, Any]] = []
        self._client = client
        self._system = system
        self._options = options

    def take(self, line: str) -> bool:
        """A message or a command; True when it is over. Raises the error of a message that got no
        answer, which is then as if it had not been sent."""
        if line.startswith("/"):
            command, _, rest = line.partition(" ")
            return self._command(command, rest.strip())
        if line.strip():
            self._say(line)
        return False

    def _say(self, line: str) -> None:
        head = [{"role": "system", "content": self._system}] if self._system else []
        asked = [*head, *self.messages, {"role": "user", "content": line}]
        said: list[str] = []
        pieces = self._client.chat_stream(self.model, asked, **self._options)
        try:
            for piece in pieces:
                said.append(piece)
                sys.stdout.write(plain(piece))
                sys.stdout.flush()
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            sys.stdout.write(" (stopped)")
        finally:
            if said:
                sys.stdout.write("\n")
        self.messages += [
            {"role": "user", "content": line},
            {"role": "assistant", "content": "".join(said)},
        ]

    def _command(self, command: str, rest: str) -> bool:
        match command:
            case "/exit" | "/quit":
                return True
            case "/help":
                console().print(Text(HELP))
            case "/reset":
                self.messages.clear()
            case "/system":
                self._system = rest or None
            case "/use" if rest:
                self._client.model(rest)
                self.model = rest
            case _:
                report(f"there is no command {command}", action="/help lists those there are.")
        return False
