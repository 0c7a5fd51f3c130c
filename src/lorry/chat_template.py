"""Chat templates: Jinja in a sandbox, with the same filters and variables that transformers gives
them.

A template comes with the model or with an adapter, so it is code of a stranger: it runs in Jinja's
immutable sandbox, and what it renders is limited in length.
"""

import copy
import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lorry.errors import RequestInvalid

RENDERED_CHARS_MAX = 16 * 2**20
"""A rendered chat longer than this is over any context length; generating stops there."""

_FINAL_MARK = "CONTINUE_FINAL_MESSAGE_TAG "
"""Marks where the final message ends in the rendered text; transformers uses the same word, with
the same blank."""


class _GenerationBlocks(jinja2.ext.Extension):
    """Accepts `{% generation %}`, with which some templates mark answers for training; it changes
    no text."""

    tags = {"generation"}  # noqa: RUF012 - jinja declares it as a plain set

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """The block's own statements."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationBlocks, jinja2.ext.loopcontrols],
    )
    # Jinja's own tojson escapes HTML.
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """A compiled template. Safe to use from several threads."""

    def __init__(self, source: str) -> None:
        """Raises `RequestInvalid` when it is not a Jinja template."""
        self.source = source
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise RequestInvalid(f"The chat template is not valid Jinja: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """The prompt's text. Raises `RequestInvalid` with the template's own words when it
        refuses."""
        given = [dict(message) for message in messages]
        if continue_final_message:
            given[-1] = _marked(given[-1])
        context: dict[str, Any] = {"tools": None, "documents": None, **variables}
        context |= {"messages": given, "add_generation_prompt": add_generation_prompt}
        text = self._render(context)
        return _cut_at_mark(text) if continue_final_message else text

    def _render(self, context: Mapping[str, Any]) -> str:
        pieces: list[str] = []
        length = 0
        try:
            for piece in self._template.generate(context):
                length += len(piece)
                pieces.append(piece)
                if length > RENDERED_CHARS_MAX:
                    raise RequestInvalid(
                        f"The chat renders to over {RENDERED_CHARS_MAX} characters.",
                        param="messages",
                    )
        except RequestInvalid:
            raise
        except (
            Exception
        ) as error:  # a template may raise anything: TypeError, OverflowError, KeyError ...
            raise RequestInvalid(
                f"The chat template refused the messages: {error}", param="messages"
            ) from error
        return "".join(pieces)


def _marked(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with the mark after its last text."""
    marked = copy.deepcopy(dict(message))
    content = marked.get("content")
    if isinstance(content, str):
        marked["content"] = content + _FINAL_MARK
        return marked
    for part in reversed(content or []):
        if "text" in part:
            part["text"] += _FINAL_MARK
            return marked
    raise RequestInvalid(
        "continue_final_message needs a final message with text to continue.", param="messages"
    )


def _cut_at_mark(text: str) -> str:
    mark = _FINAL_MARK.strip()
    if mark not in text:
        raise RequestInvalid(
            "The chat template leaves the final message out, so it cannot be continued.",
            param="continue_final_message",
        )
    at = text.rindex(mark)
    # A template that trims messages has taken the mark's blank, and with it blanks that stood
    # before the mark.
    return text[:at] if text[at:].startswith(_FINAL_MARK) else text[:at].rstrip()
