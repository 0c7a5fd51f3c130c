"""How one route is described: values only."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import UnionType
from typing import Any

from pydantic import BaseModel, ConfigDict

JSON = "application/json"
TEXT = "text/plain"
STREAM = "text/event-stream"


class Shape(BaseModel):
    """An object of an answer; it has no other fields than these."""

    model_config = ConfigDict(extra="forbid")


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer that a route may give."""

    example: Any
    """As JSON has it; a text for other media; None: no body."""
    shape: type[Shape] | type[list[Any]] | UnionType | None = None
    """None: a text. A union where a route answers in the shapes of several servers."""
    description: str = "It is done."
    status: int | str = 200
    media: str = JSON


@dataclass(frozen=True, slots=True)
class Doc:
    """What the route's function does not say itself."""

    summary: str
    answers: tuple[Answer, ...]
    request: Mapping[str, Any] = field(default_factory=dict)
    """Examples of the body: title -> value."""
    error: Answer | None = None
    """How it answers errors; None: as most routes do."""


Table = Mapping[tuple[str, str], Doc]
"""(method, path) -> its description."""
