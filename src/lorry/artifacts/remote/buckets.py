"""Folders in object stores, `s3://` and `gs://`, through fsspec's own file systems.

The caller never chooses the host here: it is the store's, or the one that the operator's
environment names (`AWS_ENDPOINT_URL`, `STORAGE_EMULATOR_HOST`), so addresses are not checked.
Credentials are found where each store's tools look for them; without any, the bucket is read as
everybody may read it."""

import importlib
import importlib.util
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, TypeVar

from anyio import to_thread

from lorry.artifacts.remote.guarded import CONNECT_TIMEOUT_S, READ_TIMEOUT_S
from lorry.artifacts.remote.site import (
    LISTED_FILES_MAX,
    Interrupted,
    Listing,
    RemoteFile,
    is_wanted,
    telling,
    without_spares,
)
from lorry.artifacts.remote.uri import RemoteUri
from lorry.errors import LorryError, SourceDenied, SourceNotFound, SourceUnsupported

MODULES = {"s3": "s3fs", "gs": "gcsfs"}

Answer = TypeVar("Answer")


def require_extra(scheme: str) -> None:
    """Raise `SourceUnsupported` when what a scheme needs is not installed."""
    module = MODULES.get(scheme)
    if module is not None and importlib.util.find_spec(module) is None:
        raise SourceUnsupported(
            f"Sources of {scheme}:// need the extra '{scheme}', which is not installed: "
            f"pip install 'lorry[{scheme}]'.",
            param="source",
        )


class BucketSite:
    """One folder of one bucket. Nothing is cached between two sites."""

    def __init__(self, uri: RemoteUri) -> None:
        """Connects to nothing yet. Raises `SourceUnsupported`."""
        require_extra(uri.scheme)
        self._uri = uri
        self._root = f"{uri.host}/{uri.path}" if uri.path else uri.host
        self._files: Any = None
        self._session: Any = None

    async def listing(self) -> Listing:
        """One listing of the folder itself, none of the folders in it."""
        entries = await self._tried(self._list)
        prefix = f"{self._root}/"
        found = {
            str(entry["name"]).removeprefix(prefix): entry
            for entry in entries
            if entry["type"] == "file"
        }
        files = [_file(name, entry) for name, entry in found.items() if is_wanted(name)]
        if not files and not telling(found):
            raise SourceNotFound(f"There is no adapter at '{self._uri}'.", param="source")
        return Listing(str(self._uri), without_spares(files), telling=telling(found))

    async def read(self, file: RemoteFile, begin: int, end: int) -> bytes:
        """A part."""

        async def ask() -> bytes:
            files = await self._opened()
            found: bytes = await files._cat_file(f"{self._root}/{file.name}", start=begin, end=end)
            return found

        data = await self._tried(ask)
        if len(data) != end - begin:
            raise Interrupted(f"{file.name} has {len(data)} bytes where {end - begin} were listed")
        return data

    async def stream(self, file: RemoteFile) -> AsyncIterator[bytes]:
        """In one piece: these stores know parts, so only an empty file comes here."""
        yield await self.read(file, 0, file.size or 0)

    async def aclose(self) -> None:
        """Close the session of this loop."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _list(self) -> list[dict[str, Any]]:
        files = await self._opened()
        if self._uri.scheme == "s3":
            listed: list[dict[str, Any]] = await files._lsdir(
                self._root, max_items=LISTED_FILES_MAX
            )
            return listed
        found, _ = await files._do_list_objects(
            f"{self._root}/", max_results=LISTED_FILES_MAX, delimiter="/"
        )
        return [{**entry, "type": "file"} for entry in found]

    async def _tried(self, ask: Callable[[], Awaitable[Answer]]) -> Answer:
        """The store's answer, with its errors translated."""
        try:
            return await ask()
        except LorryError:
            raise
        except Exception as error:  # noqa: BLE001 - each store has errors of its own
            raise self._translated(error) from None

    async def _opened(self) -> Any:
        """The store, spoken to in this loop. Credentials are looked for in a thread: that may ask
        a service of the machine, which takes seconds where there is none."""
        if self._files is None:
            s3 = self._uri.scheme == "s3"
            look = _has_aws_keys if s3 else _google_token
            found = await to_thread.run_sync(look, abandon_on_cancel=True)
            files = _s3(bool(found)) if s3 else _gs(str(found))
            self._session = await (files.set_session() if s3 else files._set_session())
            self._files = files
        return self._files

    def _translated(self, error: Exception) -> Exception:
        """What a store's error means. Its own words are not repeated: they may hold keys."""
        status = _status(error)
        if isinstance(error, FileNotFoundError) or status == 404:
            return SourceNotFound(f"There is no '{self._uri}'.", param="source")
        # gcsfs has no class for a 403, and nothing else tells it from a broken connection.
        forbidden = type(error) is OSError and str(error).startswith("Forbidden")
        no_key = type(error).__name__ in ("NoCredentialsError", "RefreshError")
        if isinstance(error, PermissionError) or status in (401, 403) or forbidden or no_key:
            return SourceDenied(f"'{self._uri}' may not be read.", param="source")
        return Interrupted(f"{self._uri.scheme}://{self._uri.host}: {type(error).__name__}")


def _status(error: Exception) -> int | None:
    """The HTTP status in a store's error, if it has one."""
    answer = getattr(error, "response", None)
    if isinstance(answer, Mapping):
        status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
    else:
        status = getattr(error, "code", getattr(error, "status", None))
    try:
        return int(status) if status is not None else None
    except (TypeError, ValueError):
        return None


def _file(name: str, entry: Mapping[str, Any]) -> RemoteFile:
    tag = entry.get("ETag") or entry.get("etag") or entry.get("generation") or ""
    return RemoteFile(name, int(entry["size"]), str(tag))


def _has_aws_keys() -> bool:
    """Whether any of the places where the AWS tools look has keys: variables, profiles, roles of
    the machine."""
    if os.environ.get("AWS_ACCESS_KEY_ID"):
        return True
    session = importlib.import_module("botocore.session").get_session()
    return session.get_credentials() is not None


def _s3(has_keys: bool) -> Any:
    files = importlib.import_module("s3fs").S3FileSystem(
        anon=not has_keys,
        asynchronous=True,
        skip_instance_cache=True,
        use_listings_cache=False,
        config_kwargs={
            "connect_timeout": CONNECT_TIMEOUT_S,
            "read_timeout": READ_TIMEOUT_S,
            "retries": {"max_attempts": 1},
        },
    )
    files.retries = 1  # parts are tried again where they are counted
    return files


def _google_token() -> str:
    """What gcsfs should use: the default credentials of Google's tools, or nobody's for public
    buckets and emulators."""
    if os.environ.get("STORAGE_EMULATOR_HOST"):
        return "anon"
    auth = importlib.import_module("google.auth")
    try:
        auth.default()
    except auth.exceptions.DefaultCredentialsError:
        return "anon"
    return "google_default"


def _gs(token: str) -> Any:
    return importlib.import_module("gcsfs.core").GCSFileSystem(
        token=token,
        asynchronous=True,
        skip_instance_cache=True,
        use_listings_cache=False,
        requests_timeout=READ_TIMEOUT_S,
    )
