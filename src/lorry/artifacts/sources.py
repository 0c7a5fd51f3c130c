"""From what a caller wrote to a folder that may be read, decided without opening anything outside
the allowed roots."""

import os
import stat
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

from lorry.errors import AdapterInvalid, Forbidden, RequestInvalid, SourceNotFound

SOURCE_CHARACTERS_MAX = 4096
"""The kernel's PATH_MAX: nothing longer can be a path."""


def resolve_local(source: str, roots: Sequence[Path]) -> Path:
    """The absolute folder that `source` names, every link followed.

    With `roots`, only what lies in one of them is allowed; a path outside is refused whether or not
    it exists, and nothing outside is opened or listed. A relative path that is not on disk is never
    looked up anywhere else.

    Raises `RequestInvalid`, `Forbidden`, `SourceNotFound`, or `AdapterInvalid` for a file in place
    of a folder."""
    path = Path(os.path.realpath(_to_path(source)))
    require_inside(path, roots, shown=source)
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise SourceNotFound(
            f"There is no folder {str(path)!r} on the server's machine (asked for as {source!r}).",
            param="source",
        ) from None
    except OSError as error:
        raise SourceNotFound(
            f"The folder {str(path)!r} cannot be reached: {error.strerror}.", param="source"
        ) from error
    if not stat.S_ISDIR(mode):
        raise AdapterInvalid(
            f"{str(path)!r} is not a folder; give the folder that holds adapter_config.json.",
            param="source",
        )
    return path


def require_inside(path: Path, roots: Sequence[Path], *, shown: str) -> None:
    """Raise `Forbidden` unless the resolved `path` lies in one of `roots`; no roots allow
    everything."""
    if roots and not any(path.is_relative_to(os.path.realpath(root)) for root in roots):
        raise Forbidden(
            f"{shown!r} leads outside the folders that adapters may be loaded from.", param="source"
        )


def _to_path(source: str) -> str:
    """The file system path of a source, not yet resolved."""
    if not source.strip():
        raise RequestInvalid(
            "The adapter's source is empty; give a folder on the server's machine.", param="source"
        )
    if len(source) > SOURCE_CHARACTERS_MAX:
        raise RequestInvalid(
            f"The adapter's source has {len(source)} characters; a path has at most "
            f"{SOURCE_CHARACTERS_MAX}.",
            param="source",
        )
    _refuse_control_characters(source, source)
    path = _from_url(source) if source.lower().startswith("file:") else os.path.expanduser(source)  # noqa: PTH111
    _refuse_control_characters(path, source)
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        raise RequestInvalid(
            f"The adapter's source {source!r} cannot be a path on this machine; give a plain path.",
            param="source",
        ) from None
    return path


def _refuse_control_characters(text: str, source: str) -> None:
    """A NUL would end the path early, a newline the log line; a URL may hide either."""
    if any(ord(character) < 32 or ord(character) == 127 for character in text):
        raise RequestInvalid(
            f"The adapter's source {source!r} holds a control character; give a plain path.",
            param="source",
        )


def _from_url(source: str) -> str:
    """The path of a `file://` URL. Query and fragment are refused rather than dropped."""
    try:
        parts = urlsplit(source)
    except ValueError:
        parts = urlsplit("file://invalid")
    if (
        parts.netloc not in {"", "localhost"}
        or not parts.path.startswith("/")
        or parts.query
        or parts.fragment
    ):
        raise RequestInvalid(
            f"The adapter's source {source!r} is not a local file URL; write "
            "file:///absolute/folder.",
            param="source",
        )
    return unquote(parts.path)
