"""HTTP that checks where it goes: each address before it is connected to, and each redirect before
it is followed.

Names are resolved here and the connection is made to the address that was checked, so a name server
that answers otherwise the second time gains nothing. Proxies are not used: behind one, nobody could
tell which address is reached. httpx's client is not used either, only its transport: the client
writes whole URLs to the log, with their signatures."""

import ipaddress
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpcore
import httpx

from lorry.artifacts.remote.policy import Address, CheckHost
from lorry.artifacts.remote.site import Interrupted
from lorry.errors import Forbidden

REDIRECTS_MAX = 5

CONNECT_TIMEOUT_S = 10.0
READ_TIMEOUT_S = 30.0
"""A side that is silent for so long is taken as gone; the fetch as a whole has its own limit."""

CONNECTIONS_MAX = 16
ADDRESSES_MAX = 4
"""Tried of one name."""

TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Statuses that may pass."""

REDIRECTS = frozenset({301, 302, 303, 307, 308})

CheckHop = Callable[[httpx.URL], None]
"""Raises for an address that must not be followed to."""


class _Stream(httpcore.AsyncNetworkStream):
    """A connection without encryption. httpcore does not close it when the handshake that is to
    encrypt it is cancelled."""

    def __init__(self, inner: httpcore.AsyncNetworkStream) -> None:
        self._inner = inner

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """As httpcore's."""
        return await self._inner.read(max_bytes, timeout)

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        """As httpcore's."""
        await self._inner.write(buffer, timeout)

    async def aclose(self) -> None:
        """As httpcore's."""
        await self._inner.aclose()

    async def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """As httpcore's, but leaves nothing open when it fails."""
        try:
            return await self._inner.start_tls(ssl_context, server_hostname, timeout)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self._inner.aclose()
            raise

    def get_extra_info(self, info: str) -> Any:
        """As httpcore's."""
        return self._inner.get_extra_info(info)


class _Backend(httpcore.AsyncNetworkBackend):
    """Resolves, checks, connects."""

    def __init__(self, may_connect: CheckHost) -> None:
        self._inner = httpcore.AnyIOBackend()
        self._may_connect = may_connect

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """As httpcore asks for it. Raises `Forbidden`."""
        allowed = [each for each in await _addresses(host) if self._may_connect(host, each)]
        if not allowed:
            raise Forbidden(
                f"The host '{host}' has a private address, which sources are not fetched from.",
                param="source",
            )
        failure: Exception = httpcore.ConnectError("no address")
        for address in allowed[:ADDRESSES_MAX]:
            try:
                stream = await self._inner.connect_tcp(
                    str(address), port, timeout, local_address, socket_options
                )
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failure = error
            else:
                return _Stream(stream)
        raise failure

    async def connect_unix_socket(
        self, path: str, timeout: float | None = None, socket_options: Any = None
    ) -> httpcore.AsyncNetworkStream:
        """Never: a source is no socket of this machine."""
        raise Forbidden("Sources are not fetched from sockets.", param="source")

    async def sleep(self, seconds: float) -> None:
        """Between httpcore's own tries."""
        await anyio.sleep(seconds)


async def _addresses(host: str) -> list[Address]:
    try:
        found = await anyio.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise httpcore.ConnectError("the name is not known") from None
    texts = dict.fromkeys(str(entry[4][0]).partition("%")[0] for entry in found)
    return [ipaddress.ip_address(text) for text in texts]


class _Transport(httpx.AsyncHTTPTransport):
    """httpx's own, with connections made by the checking backend."""

    def __init__(self, context: ssl.SSLContext, may_connect: CheckHost) -> None:
        super().__init__(verify=context)
        self._pool = httpcore.AsyncConnectionPool(
            ssl_context=context,
            max_connections=CONNECTIONS_MAX,
            max_keepalive_connections=CONNECTIONS_MAX,
            network_backend=_Backend(may_connect),
        )


class GuardedHttp:
    """GET requests to one place and to where it redirects."""

    def __init__(self, may_connect: CheckHost, check_hop: CheckHop) -> None:
        """Certificates are checked against SSL_CERT_FILE or SSL_CERT_DIR if set, else certifi's."""
        self._transport = _Transport(httpx.create_ssl_context(), may_connect)
        self._check_hop = check_hop

    async def aclose(self) -> None:
        """Close all connections."""
        await self._transport.aclose()

    @asynccontextmanager
    async def get(
        self, url: httpx.URL, headers: Mapping[str, str], secret: Mapping[str, str]
    ) -> AsyncIterator[httpx.Response]:
        """The answer after at most `REDIRECTS_MAX` redirects, its body not yet read. The headers in
        `secret` go to the first origin only. Raises `Interrupted`, `Forbidden`."""
        origin = _origin(url)
        for _ in range(REDIRECTS_MAX + 1):
            self._check_hop(url)
            own = {**headers, **secret} if _origin(url) == origin else headers
            response = await self._send(url, own)
            try:
                target = response.headers.get("location")
                if response.status_code not in REDIRECTS or target is None:
                    yield response
                    return
            finally:
                await response.aclose()
            url = _target(url, target)
        raise Interrupted(f"{origin} redirects more than {REDIRECTS_MAX} times")

    async def _send(self, url: httpx.URL, headers: Mapping[str, str]) -> httpx.Response:
        times = {"connect": CONNECT_TIMEOUT_S, "pool": None, "write": READ_TIMEOUT_S}
        request = httpx.Request(
            "GET",
            url,
            headers={"Accept-Encoding": "identity", "User-Agent": "lorry", **headers},
            extensions={"timeout": {**times, "read": READ_TIMEOUT_S}},
        )
        with transient_errors(url):
            response = await self._transport.handle_async_request(request)
        response.request = request
        return response


class transient_errors:  # noqa: N801 - read as a phrase: `with transient_errors(url):`
    """Turns the transport's errors into `Interrupted`, which names the host and nothing else."""

    def __init__(self, url: httpx.URL) -> None:
        self._host = url.host

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Translate."""
        if isinstance(error, httpx.TransportError):
            reason = str(error) if isinstance(error, httpx.ConnectError) else ""
            name = type(error).__name__
            raise Interrupted(f"{self._host}: {reason or name}") from None


async def body(response: httpx.Response) -> AsyncIterator[bytes]:
    """The body as it comes. Raises `Interrupted`."""
    with transient_errors(response.request.url):
        async for piece in response.aiter_raw():
            yield piece


def _origin(url: httpx.URL) -> str:
    return f"{url.scheme}://{url.host}:{url.port or 0}"


def _target(url: httpx.URL, location: str) -> httpx.URL:
    try:
        return url.join(location)
    except (httpx.InvalidURL, ValueError):
        raise Interrupted(f"{url.host} redirects to something that is no URL") from None
