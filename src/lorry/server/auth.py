"""Keys: who may use the server."""

import hmac
from collections.abc import Iterable, Mapping

from lorry.errors import Unauthorized

OPEN_PATHS = frozenset({"/health"})
"""What a load balancer without a key may ask."""


class KeyRing:
    """The server's keys."""

    def __init__(self, keys: Iterable[str]) -> None:
        """No keys: everybody may do everything."""
        self._keys = [key.encode() for key in keys]

    def check(self, path: str, headers: Mapping[bytes, bytes]) -> None:
        """Raises `Unauthorized` unless the path is open or the request carries one of the keys."""
        if not self._keys or path in OPEN_PATHS:
            return
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer" or not self._has(given.strip()):
            said = "The API key is wrong." if given else "The request carries no API key."
            raise Unauthorized(said)

    def _has(self, given: bytes) -> bool:
        # Each comparison takes the same time, so it tells nothing about a key.
        return any(hmac.compare_digest(given, key) for key in self._keys)
