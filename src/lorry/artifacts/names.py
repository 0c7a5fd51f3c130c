"""Which names an adapter may have: what a request can carry, a log line can show and a version
suffix cannot blur."""

import re
from collections.abc import Collection

from lorry.errors import AdapterConflict, RequestInvalid
from lorry.ids import SHORT_VERSION_DIGITS

NAME_CHARACTERS_MAX = 256
"""Long enough for a path or a hub name with a revision; short enough for a log line and a metric
label."""

_LOOKS_LIKE_VERSION = re.compile(rf"@[0-9a-fA-F]{{{SHORT_VERSION_DIGITS},64}}$")


def check_adapter_name(name: str, base_names: Collection[str]) -> None:
    """Accept a new adapter's name or say why not.

    Raises `RequestInvalid` for a name that cannot be sent, shown or told from `name@version`, and
    `AdapterConflict` for one that a served base model has."""
    fault = _fault(name)
    if fault is not None:
        raise RequestInvalid(f"The adapter name {_shown(name)} {fault}.", param="name")
    if name in base_names:
        raise AdapterConflict(
            f"The adapter name {name!r} is the name of the base model that is served; choose "
            "another name.",
            param="name",
        )


def _fault(name: str) -> str | None:
    """Why the name cannot be used, as the end of a sentence."""
    if not name:
        return "is empty; give it at least one character"
    if len(name) > NAME_CHARACTERS_MAX:
        return f"has {len(name)} characters; at most {NAME_CHARACTERS_MAX} are allowed"
    if not name.isprintable():
        return (
            "holds a control, newline or other unprintable character; use printable characters only"
        )
    if name != name.strip():
        return "begins or ends with a blank; take the blank away"
    if any(part in {".", ".."} for part in name.split("/")):
        return "has '.' or '..' as one of its parts; clients and proxies rewrite such addresses"
    if _LOOKS_LIKE_VERSION.search(name):
        return (
            "ends like '@' and a version, which names one version of another adapter; choose "
            "another ending"
        )
    return None


def _shown(name: str) -> str:
    shown = repr(name[:60])
    return shown if len(name) <= 60 else f"{shown}..."
