"""URIs of remote sources: what is taken as one, what its parts are, and how it may be shown.

Nothing that could be a credential is ever shown: `redact` takes user info, query and fragment out
of any text that looks like a URI, well-formed or not."""

import re
from dataclasses import dataclass, replace
from urllib.parse import quote, unquote, urlsplit

from lorry.errors import RequestInvalid

SCHEMES = ("hf", "s3", "gs", "https")

URI_CHARACTERS_MAX = 4096

_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]+:/+")
"""Two letters at least: `c:/x` is a path on some machines and a URI on none."""
_USER_INFO = re.compile(r"(:/+)[^/?#]*@")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._\-]{1,220}[a-z0-9]")
_NUMERIC = re.compile(r"[0-9.]+")
_HOST = re.compile(r"[a-z0-9](?:[a-z0-9.\-]*[a-z0-9])?|\[[0-9a-f:.]+\]")
_HUB_PART = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._\-]{0,94}[A-Za-z0-9])?")
_REVISION = re.compile(r"[A-Za-z0-9._/\-]{1,128}")
_COMMIT = re.compile(r"[0-9a-f]{40}")

FORMS = {
    "hf": "hf://org/repo, hf://org/repo@revision or hf://org/repo@revision/folder",
    "s3": "s3://bucket/folder",
    "gs": "gs://bucket/folder",
    "https": "https://host/folder",
}
"""How each is written, for messages."""


@dataclass(frozen=True, slots=True)
class RemoteUri:
    """One remote folder."""

    scheme: str
    host: str
    """Host and port, bucket, or `org/repo`."""
    path: str = ""
    """Without slashes at its ends; may be empty."""
    revision: str | None = None
    """Of `hf://` alone."""
    query: str = ""
    """Of `https://` alone, without the question mark. It may hold a signature: never shown."""

    def __str__(self) -> str:
        """Without the query, so that it can be shown and kept."""
        revision = f"@{quote(self.revision, safe='')}" if self.revision else ""
        path = f"/{self.path}" if self.path else ""
        return f"{self.scheme}://{self.host}{revision}{path}"

    @property
    def pinned(self) -> bool:
        """Whether its revision is a commit, which never changes."""
        return self.revision is not None and _COMMIT.fullmatch(self.revision) is not None

    def at(self, commit: str) -> "RemoteUri":
        """The same at one commit."""
        return replace(self, revision=commit)


def is_remote(source: str) -> bool:
    """Whether a source is meant as a URI of another place; `file://` is a folder here."""
    return _URI.match(source) is not None and not source.lower().startswith("file:")


def redact(text: str) -> str:
    """A source as it may be shown and logged: user info, query and fragment are taken out."""
    if not is_remote(text):
        return text
    return re.split(r"[?#]", _USER_INFO.sub(r"\1", text), maxsplit=1)[0]


def parse_uri(source: str) -> RemoteUri:
    """The parts of a remote source. Raises `RequestInvalid`, which shows no credential."""
    scheme = source.partition(":")[0].lower()
    if scheme not in SCHEMES:
        raise _invalid(source, f"has the scheme {scheme}://, expected one of {_listed()}")
    if len(source) > URI_CHARACTERS_MAX:
        raise _invalid(source[:80], f"has more than {URI_CHARACTERS_MAX} characters")
    if not source.isprintable() or "\\" in source:
        raise _invalid(ascii(redact(source)), "holds a control character or a backslash")
    try:
        parts = urlsplit(source)
        port = parts.port
    except ValueError:
        raise _invalid(source, f"is no URI, expected {FORMS[scheme]}") from None
    if "@" in parts.netloc and scheme != "hf":
        raise _invalid(source, "holds a user name, but credentials come from the environment only")
    if parts.fragment or (parts.query and scheme != "https"):
        raise _invalid(source, f"has a query or a fragment, expected {FORMS[scheme]}")
    if any(part in (".", "..") for part in unquote(parts.path).split("/")):
        raise _invalid(source, "has '.' or '..' as one of its parts")
    if scheme == "hf":
        return _hub(source, (parts.netloc + parts.path).strip("/"))
    path = parts.path.strip("/")
    if scheme == "https":
        return _web(source, (parts.hostname or "").lower(), port, path, parts.query)
    if not _BUCKET.fullmatch(parts.netloc) or _NUMERIC.fullmatch(parts.netloc):
        raise _invalid(source, f"names no bucket, expected {FORMS[scheme]}")
    return RemoteUri(scheme, parts.netloc, path)


def _web(source: str, host: str, port: int | None, path: str, query: str) -> RemoteUri:
    host = f"[{host}]" if ":" in host else host
    if not _HOST.fullmatch(host):
        raise _invalid(source, f"names no host, expected {FORMS['https']}")
    return RemoteUri("https", host if port in (None, 443) else f"{host}:{port}", path, query=query)


def _hub(source: str, rest: str) -> RemoteUri:
    org, _, rest = rest.partition("/")
    repo, _, path = rest.partition("/")
    repo, at, revision = repo.partition("@")
    revision = unquote(revision)
    fits = _HUB_PART.fullmatch(org) and _HUB_PART.fullmatch(repo)
    if not fits or (at and not _REVISION.fullmatch(revision)) or ".." in revision:
        raise _invalid(source, f"is not written as {FORMS['hf']}")
    return RemoteUri("hf", f"{org}/{repo}", path.strip("/"), revision or None)


def _listed() -> str:
    return ", ".join(f"{scheme}://" for scheme in SCHEMES)


def _invalid(source: str, what: str) -> RequestInvalid:
    return RequestInvalid(f"The adapter's source {redact(source)!r} {what}.", param="source")
