"""A picture that is drawn again and again, until Ctrl-C."""

import json
import sys
import time
from collections.abc import Callable
from contextlib import suppress

from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from lorry.cli.screen import console
from lorry.errors import LorryError

Look = Callable[[], tuple[RenderableType, object]]
"""What is to be seen now: for people, and for scripts."""


def repeat(look: Look, interval_s: float, *, as_json: bool = False) -> None:
    """Draw until Ctrl-C, which is how this is meant to end. Terminals are painted over, and keep
    the last picture; pipes get one picture, or with `as_json` one line of JSON, after the other.
    The first look may fail; later, the last picture stays with the error below it."""
    with suppress(KeyboardInterrupt):
        picture, value = look()
        if as_json:
            _as_lines(look, value, interval_s)
        elif console().is_terminal:
            _painted(look, picture, interval_s)
        else:
            _one_after_the_other(look, picture, interval_s)


def _as_lines(look: Look, value: object, interval_s: float) -> None:
    while True:
        sys.stdout.write(json.dumps(value, ensure_ascii=False) + "\n")
        sys.stdout.flush()
        time.sleep(interval_s)
        _, value = look()


def _one_after_the_other(look: Look, picture: RenderableType, interval_s: float) -> None:
    whole = picture
    while True:
        console().print(whole)
        console().print()
        time.sleep(interval_s)
        picture, whole = _next(look, picture)


def _painted(look: Look, picture: RenderableType, interval_s: float) -> None:
    whole = picture
    try:
        with Live(console=console(), screen=True, auto_refresh=False) as live:
            while True:
                live.update(whole, refresh=True)
                time.sleep(interval_s)
                picture, whole = _next(look, picture)
    finally:
        console().print(picture)


def _next(look: Look, picture: RenderableType) -> tuple[RenderableType, RenderableType]:
    """The picture, and the picture with what keeps it from being fresh."""
    try:
        fresh, _ = look()
    except LorryError as error:
        note = Text(f"{error.message} Trying again; Ctrl-C ends.", "yellow")
        return picture, Group(picture, Text(), note)
    return fresh, fresh
