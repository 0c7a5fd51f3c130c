"""What may be fetched from elsewhere, and how much of it: decided before a connection is made, and
again for each address that a name leads to.

Two dangers are kept out. A caller who names a source makes the server connect somewhere, so an
address that only the server can reach (its own machine, its network, a cloud's metadata service) is
refused unless the operator named it; the check is on the address that is connected to, so neither a
redirect nor a name server gets around it. And what comes back may be endless, so bytes, files and
time have limits."""

import ipaddress
from collections.abc import Callable
from dataclasses import dataclass

from lorry.artifacts.remote.uri import SCHEMES, RemoteUri
from lorry.errors import Forbidden

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

GIB = 1024**3

_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


@dataclass(frozen=True, slots=True)
class AllowedSource:
    """One entry of the allow-list."""

    scheme: str
    host: str = ""
    """Empty: any. `*.example.com` is every host below it. Of hf:// it is the organisation."""
    path: str = ""
    """Only what lies below it."""

    @classmethod
    def parse(cls, text: str) -> "AllowedSource":
        """From `https://`, `https://host`, `s3://bucket/folder`, `hf://org` or `hf://org/repo`.
        Raises ValueError."""
        scheme, separator, rest = text.partition("://")
        if not separator or scheme.lower() not in SCHEMES:
            listed = ", ".join(f"{each}://" for each in SCHEMES)
            raise ValueError(f"must begin with one of {listed}, not {text!r}")
        if any(mark in rest for mark in "?#@\\") or ".." in rest.split("/"):
            raise ValueError(f"must be a scheme, a host and a folder, not {text!r}")
        host, _, path = rest.strip("/").partition("/")
        return cls(scheme.lower(), host if scheme == "hf" else host.lower(), path.strip("/"))

    def allows(self, uri: RemoteUri) -> bool:
        """Whether the entry covers a source."""
        if uri.scheme != self.scheme:
            return False
        whole = f"{uri.host}/{uri.path}" if uri.path else uri.host
        host, _, path = whole.partition("/")
        return self._has_host(host) and (
            not self.path or path == self.path or path.startswith(f"{self.path}/")
        )

    def _has_host(self, host: str) -> bool:
        if self.host.startswith("*."):
            return host.partition(":")[0].endswith(self.host[1:])
        return self.host in ("", host)


@dataclass(frozen=True, slots=True)
class PrivatePlace:
    """A host or network that may be reached although its address is private."""

    host: str = ""
    network: Network | None = None

    @classmethod
    def parse(cls, text: str) -> "PrivatePlace":
        """From a host's name, an address, or a network such as 10.0.0.0/8. Raises ValueError."""
        try:
            return cls(network=ipaddress.ip_network(text.strip("[]")))
        except ValueError:
            strange = any(mark in text for mark in "/:@?# ")
            if not text or strange or text.replace(".", "").isdigit():
                raise ValueError(
                    f"must be a host, an address or a network such as 10.0.0.0/8, not {text!r}"
                ) from None
        return cls(host=text.lower())

    def has(self, host: str, address: Address) -> bool:
        """Whether the connection goes there."""
        if self.network is None:
            return host.lower() == self.host
        return address.version == self.network.version and address in self.network


@dataclass(frozen=True, slots=True)
class SourcePolicy:
    """Everything that limits fetching. Times in seconds, sizes in bytes."""

    allowed: tuple[AllowedSource, ...] | None = None
    """None: every source of a known scheme; empty: no remote source at all."""
    private: tuple[PrivatePlace, ...] = ()
    any_address: bool = False
    """No check of addresses: for a person at a terminal, who could connect there anyway."""
    source_bytes_max: int = 4 * GIB
    """Of one adapter."""
    download_bytes_max: int = 10 * GIB
    """Of all that is being downloaded, and of parts kept to be resumed."""
    fetch_timeout_s: float = 120.0
    """For one adapter, from the first connection to the last byte."""

    def check(self, uri: RemoteUri) -> None:
        """Raises `Forbidden` unless the operator allows the source."""
        if self.allowed is not None and not any(rule.allows(uri) for rule in self.allowed):
            raise Forbidden(
                f"The source '{uri}' is not among those that adapters may be fetched from.",
                param="source",
            )

    def may_connect(self, host: str, address: Address) -> bool:
        """Whether a connection to this address, found under this name, may be made."""
        plain = unwrapped(address)
        if self.any_address or (plain.is_global and not plain.is_multicast):
            return True
        return any(place.has(host, each) for place in self.private for each in (plain, address))


def unwrapped(address: Address) -> Address:
    """The IPv4 address that an IPv6 address stands for, if it does; else itself."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    inner = address.ipv4_mapped or address.sixtofour
    if inner is None and address.teredo is not None:
        inner = address.teredo[1]
    return inner or address


CheckHost = Callable[[str, Address], bool]
"""As `SourcePolicy.may_connect`."""
