"""Folders on a web server, `https://`: there is no listing, so the files that an adapter may have
are asked for by name."""

import json
import netrc
import os
import re
from base64 import b64encode
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import anyio
import httpx

from lorry.artifacts.adapter_config import CONFIG_FILE
from lorry.artifacts.reading import INDEX_BYTES_MAX, WEIGHTS_FILE
from lorry.artifacts.remote.guarded import TRANSIENT, GuardedHttp, body
from lorry.artifacts.remote.policy import SourcePolicy
from lorry.artifacts.remote.site import (
    INDEX_FILES,
    SIDE_FILES,
    SINGLE_FILES,
    Interrupted,
    Listing,
    RemoteFile,
    is_wanted,
    without_spares,
)
from lorry.artifacts.remote.uri import RemoteUri
from lorry.errors import AdapterInvalid, Forbidden, SourceDenied, SourceNotFound

PICKLE = "adapter_model.bin"
SHARDS_MAX = 1000

_ABSENT = frozenset({403, 404, 410})
"""Object stores answer 403 for what is not there to those who may not list."""
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")


class WebFiles:
    """Files by URL over checked HTTP; what `https://` and `hf://` share."""

    def __init__(self, http: GuardedHttp, shown: str, secret: Mapping[str, str]) -> None:
        """`shown` names the source in errors; the headers in `secret` hold credentials."""
        self._http = http
        self._shown = shown
        self._secret = secret

    async def probe(self, url: httpx.URL, name: str) -> RemoteFile | None:
        """What a file is like, from a request for its first byte; None when it is absent."""
        async with self._http.get(url, {"Range": "bytes=0-0"}, self._secret) as response:
            status = response.status_code
            if status in _ABSENT:
                if status == 403 and name == CONFIG_FILE:
                    raise self.denied(status)
                return None
            tag = response.headers.get("etag") or response.headers.get("last-modified", "")
            if status == 206:
                first, _, size = self._content_range(response)
                if first == 0:
                    return RemoteFile(name, size, tag)
            if status == 416:  # an empty file has no first byte
                return RemoteFile(name, 0, tag)
            if status != 200:
                raise self.failed(status)
            length = response.headers.get("content-length", "")
            size_or_none = int(length) if length.isdigit() else None
            return RemoteFile(name, size_or_none, tag, ranges=False)

    async def read(self, url: httpx.URL, file: RemoteFile, begin: int, end: int) -> bytes:
        """A part of a file. Raises `Interrupted` when another part came, or less."""
        async with self._http.get(
            url, {"Range": f"bytes={begin}-{end - 1}"}, self._secret
        ) as response:
            whole = response.status_code == 200 and (begin, end) == (0, file.size)
            if response.status_code == 416:
                raise Interrupted(f"{file.name} has changed")
            if response.status_code != 206 and not whole:
                raise self.failed(response.status_code)
            if not whole and self._content_range(response) != (begin, end - 1, file.size):
                raise Interrupted(f"{file.name} has changed, or its server sent another part")
            return await self._whole(response, end - begin, exact=True)

    async def stream(self, url: httpx.URL) -> AsyncIterator[bytes]:
        """All of a file whose server knows no parts."""
        async with self._http.get(url, {}, self._secret) as response:
            if response.status_code != 200:
                raise self.failed(response.status_code)
            async for piece in body(response):
                yield piece

    async def small(self, url: httpx.URL, bytes_max: int) -> bytes:
        """All of a small file. Raises `AdapterInvalid` when it is not small."""
        async with self._http.get(url, {}, self._secret) as response:
            if response.status_code != 200:
                raise self.failed(response.status_code)
            return await self._whole(response, bytes_max, exact=False)

    async def _whole(self, response: httpx.Response, bytes_max: int, *, exact: bool) -> bytes:
        found = bytearray()
        async for piece in body(response):
            found += piece
            if len(found) > bytes_max:
                break
        if len(found) > bytes_max or (exact and len(found) != bytes_max):
            if exact:
                raise Interrupted(f"{response.request.url.host} sent another number of bytes")
            raise AdapterInvalid(
                f"A file of '{self._shown}' has more than {bytes_max} bytes; shorten it."
            )
        return bytes(found)

    def _content_range(self, response: httpx.Response) -> tuple[int, int, int]:
        found = _CONTENT_RANGE.fullmatch(response.headers.get("content-range", ""))
        if found is None:
            raise Interrupted(f"{response.request.url.host} sent a part without saying which")
        return int(found[1]), int(found[2]), int(found[3])

    def denied(self, status: int) -> SourceDenied:
        """The other side wants other credentials."""
        return SourceDenied(f"'{self._shown}' may not be read: HTTP {status}.", param="source")

    def failed(self, status: int) -> Exception:
        """What a status other than the wanted one means."""
        if status in (401, 403, 407):
            return self.denied(status)
        if status in (404, 410):
            return SourceNotFound(f"There is no adapter at '{self._shown}'.", param="source")
        if status in TRANSIENT:
            return Interrupted(f"HTTP {status}")
        return SourceNotFound(f"'{self._shown}' cannot be fetched: HTTP {status}.", param="source")


class WebSite:
    """One folder of a web server."""

    def __init__(self, uri: RemoteUri, policy: SourcePolicy) -> None:
        """Connects to nothing yet."""
        self._uri = uri
        self._policy = policy
        self._http = GuardedHttp(policy.may_connect, self._check_hop)
        self._files = WebFiles(self._http, str(uri), _from_netrc(uri.host))

    async def listing(self) -> Listing:
        """Asks for each name that there may be."""
        found: dict[str, RemoteFile | None] = {}

        async def ask(name: str) -> None:
            found[name] = await self._files.probe(self._url(name), name)

        names = (*SINGLE_FILES, *SIDE_FILES, *INDEX_FILES)
        async with anyio.create_task_group() as group:
            for name in names:
                group.start_soon(ask, name)
        if found[WEIGHTS_FILE] is None:
            index = next((name for name in INDEX_FILES if found[name] is not None), None)
            others = await self._shards(index) if index is not None else (PICKLE,)
            async with anyio.create_task_group() as group:
                for name in others:
                    group.start_soon(ask, name)
        pickle = (PICKLE,) if found.pop(PICKLE, None) is not None else ()
        files = [file for file in found.values() if file is not None]
        if not files:
            raise SourceNotFound(
                f"There is no adapter at '{self._uri}': it has no {CONFIG_FILE}.", param="source"
            )
        return Listing(str(self._uri), without_spares(files), telling=pickle)

    async def _shards(self, index: str) -> tuple[str, ...]:
        """The files that an index names, as far as they can be files of an adapter; the judge says
        what is wrong with the index."""
        try:
            raw = json.loads(await self._files.small(self._url(index), INDEX_BYTES_MAX))
            names = {str(name) for name in raw["weight_map"].values()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return ()
        return tuple(sorted(name for name in names if is_wanted(name)))[:SHARDS_MAX]

    async def read(self, file: RemoteFile, begin: int, end: int) -> bytes:
        """A part."""
        return await self._files.read(self._url(file.name), file, begin, end)

    def stream(self, file: RemoteFile) -> AsyncIterator[bytes]:
        """The whole."""
        return self._files.stream(self._url(file.name))

    async def aclose(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    def _url(self, name: str) -> httpx.URL:
        path = f"/{self._uri.path}/{name}" if self._uri.path else f"/{name}"
        query = f"?{self._uri.query}" if self._uri.query else ""
        return httpx.URL(f"https://{self._uri.host}{path}{query}")

    def _check_hop(self, url: httpx.URL) -> None:
        """A redirect stays on https, and among the hosts that are allowed."""
        if url.scheme != "https":
            raise Forbidden(
                f"'{self._uri}' redirects to {url.scheme}://, which is not followed.",
                param="source",
            )
        host = f"{url.host}:{url.port}" if url.port not in (None, 443) else url.host
        if host != self._uri.host:
            self._policy.check(RemoteUri("https", host, url.path.strip("/")))


def _from_netrc(host: str) -> dict[str, str]:
    """The standard place for names and passwords of web servers: $NETRC or ~/.netrc."""
    place = Path(os.environ.get("NETRC") or Path.home() / ".netrc")
    try:
        found = netrc.netrc(str(place)).hosts.get(host.partition(":")[0])
    except (OSError, netrc.NetrcParseError):
        return {}
    if found is None:
        return {}
    token = b64encode(f"{found[0]}:{found[2]}".encode()).decode()
    return {"Authorization": f"Basic {token}"}
