"""How an error of the catalogue's, and a text of a model's, are shown."""

import unicodedata

from lorry.cli.screen import report
from lorry.errors import AnswerInvalid, AnswerLost, LorryError, ServerUnreachable

NO_ANSWER = (ServerUnreachable, AnswerLost, AnswerInvalid)
"""Of the client's own: no server has said anything."""


def report_error(error: LorryError) -> None:
    """In the server's words where a server sent it."""
    answered = not isinstance(error, NO_ANSWER)
    note = f"{error.code}, HTTP {error.status}" if answered else error.code
    details = error.details
    if len(details) == 1 and details[0].rstrip(".") in error.message:
        details = ()  # it has been said
    report(error.message, details=details, action=error.action, note=note)


def plain(text: str) -> str:
    """A model's text without control characters: some of them would steer the terminal."""
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c) != "Cc")
