"""An orderly end: no new requests, a while for the running ones, then a clear error for what is
left."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import anyio

from lorry.errors import RequestAborted, ShuttingDown


class Shutdown:
    """Knows every long request that runs, and whether the server is stopping."""

    def __init__(self) -> None:
        """Nothing runs yet."""
        self.stopping = False
        self._aborting = False
        self._patient: set[anyio.CancelScope] = set()
        self._impatient: set[anyio.CancelScope] = set()

    def begin(self) -> None:
        """Take no more requests, and end what would never end by itself, such as event feeds."""
        self.stopping = True
        for scope in self._impatient:
            scope.cancel()

    def abort(self) -> None:
        """End the requests that still run, each with `ShuttingDown`."""
        self.begin()
        self._aborting = True
        for scope in self._patient:
            scope.cancel()

    def check(self) -> None:
        """Raises `ShuttingDown` once the server is stopping."""
        if self.stopping:
            raise ShuttingDown("The server is stopping and takes no new requests.")

    @contextmanager
    def request(self, timeout_s: float = math.inf) -> Iterator[None]:
        """Around a request: raises `RequestAborted` after `timeout_s`, `ShuttingDown` on abort."""
        scope = anyio.CancelScope(deadline=anyio.current_time() + timeout_s)
        with self._listed(self._patient, scope), scope:
            yield
        if scope.cancelled_caught and self._aborting:
            raise ShuttingDown("The server is stopping; the request was ended before it was done.")
        if scope.cancelled_caught:
            raise RequestAborted(
                f"The request was ended after {timeout_s:g} s, the server's --request-timeout."
            )

    @contextmanager
    def feed(self) -> Iterator[None]:
        """Around an endless feed: ends quietly when the server begins to stop."""
        scope = anyio.CancelScope()
        with self._listed(self._impatient, scope), scope:
            yield

    @contextmanager
    def _listed(self, scopes: set[anyio.CancelScope], scope: anyio.CancelScope) -> Iterator[None]:
        scopes.add(scope)
        try:
            yield
        finally:
            scopes.discard(scope)
