"""Repositories of the Hugging Face hub, or of a server that speaks as it does (`HF_ENDPOINT`).

The revision is turned into the commit that it means now, and everything is fetched at that commit:
a branch that moves meanwhile does not mix two adapters, and a lost snapshot is fetched again as it
was. The token is the one that huggingface_hub finds (`HF_TOKEN`, or its own file); it is sent to
the hub and never to where the hub redirects."""

import os
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import httpx
from anyio import to_thread

from lorry.artifacts.remote.guarded import CONNECT_TIMEOUT_S, TRANSIENT, GuardedHttp
from lorry.artifacts.remote.policy import Address, SourcePolicy
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
from lorry.artifacts.remote.web import WebFiles
from lorry.errors import Forbidden, SourceNotFound

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo

HUB = "https://huggingface.co"


class HubSite:
    """One folder of one repository."""

    def __init__(self, uri: RemoteUri, policy: SourcePolicy) -> None:
        """Connects to nothing yet."""
        self._uri = uri
        self._policy = policy
        self._endpoint = httpx.URL((os.environ.get("HF_ENDPOINT") or HUB).rstrip("/"))
        self._http = GuardedHttp(self._may_connect, self._check_hop)
        self._files = WebFiles(self._http, str(uri), _authorization())

    async def listing(self) -> Listing:
        """One question: which commit it is, and what lies there."""
        info = await to_thread.run_sync(self._info, abandon_on_cancel=True)
        prefix = f"{self._uri.path}/" if self._uri.path else ""
        siblings = {
            entry.rfilename.removeprefix(prefix): entry
            for entry in (info.siblings or ())[:LISTED_FILES_MAX]
            if entry.rfilename.startswith(prefix)
        }
        files = [_file(name, entry) for name, entry in siblings.items() if is_wanted(name)]
        if not files and not telling(siblings):
            raise SourceNotFound(f"There is no adapter at '{self._uri}'.", param="source")
        self._uri = self._uri.at(str(info.sha))
        kept = without_spares(files)
        return Listing(str(self._uri), kept, fixed=True, telling=telling(siblings))

    def _info(self) -> "ModelInfo":
        """In a worker thread."""
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

        api = HfApi(endpoint=str(self._endpoint).rstrip("/"))
        try:
            return api.model_info(
                self._uri.host,
                revision=self._uri.revision,
                files_metadata=True,
                timeout=CONNECT_TIMEOUT_S,
            )
        except HfHubHTTPError as error:
            raise self._translated(error.response.status_code) from None
        except OfflineModeIsEnabled:
            raise Forbidden(
                "HF_HUB_OFFLINE is set, so nothing is fetched from the hub.", param="source"
            ) from None
        except (OSError, RuntimeError) as error:
            raise Interrupted(f"{self._endpoint.host}: {type(error).__name__}") from None
        except Exception as error:
            # huggingface_hub lets the errors of whichever HTTP client it was built on through.
            if type(error).__module__.partition(".")[0] not in _CLIENTS:
                raise
            raise Interrupted(f"{self._endpoint.host}: {type(error).__name__}") from None

    def _translated(self, status: int) -> Exception:
        """The hub answers 401 for repositories that do not exist, to those without a token."""
        if status in TRANSIENT:
            return Interrupted(f"{self._endpoint.host}: HTTP {status}")
        if status in (401, 404):
            return SourceNotFound(
                f"The hub has no '{self._uri}', or it is private and HF_TOKEN does not open it.",
                param="source",
            )
        return self._files.failed(status)

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
        path = quote(f"{self._uri.path}/{name}" if self._uri.path else name)
        revision = quote(self._uri.revision or "main", safe="")
        return httpx.URL(f"{self._endpoint}/{self._uri.host}/resolve/{revision}/{path}")

    def _may_connect(self, host: str, address: Address) -> bool:
        """The hub itself was named by the operator; where it redirects to was not."""
        return host == self._endpoint.host or self._policy.may_connect(host, address)

    def _check_hop(self, url: httpx.URL) -> None:
        if url.scheme not in ("https", self._endpoint.scheme):
            raise Forbidden(
                f"'{self._uri}' redirects to {url.scheme}://, which is not followed.",
                param="source",
            )


_CLIENTS = frozenset({"httpx", "httpx2", "httpcore", "httpcore2", "requests"})


def _file(name: str, entry: Any) -> RemoteFile:
    """A file as the hub describes it: by its content's SHA-256 if it is a large one."""
    lfs = entry.lfs
    sha256 = str(lfs.sha256) if lfs is not None and getattr(lfs, "sha256", None) else None
    return RemoteFile(name, entry.size, sha256 or str(entry.blob_id or ""), sha256=sha256)


def _authorization() -> dict[str, str]:
    from huggingface_hub import get_token

    token = get_token()
    return {"Authorization": f"Bearer {token}"} if token else {}
