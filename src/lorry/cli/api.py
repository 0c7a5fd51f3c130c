"""The native API as the command line needs it; every foreign error is translated here."""

import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self, cast
from urllib.parse import quote

import httpx

DEFAULT_URL = "http://127.0.0.1:8000"

ANSWER_TIMEOUT_S = 30.0
"""For one HTTP answer. Loads and unloads are followed by polling, so none of them takes long."""

POLL_S = 0.2
"""Between two looks at a running operation: quick to the eye and nothing to the server."""

Json = dict[str, Any]


class ServerRefused(Exception):
    """The server answered with an error; its own words are kept."""

    def __init__(self, error: Mapping[str, Any], status: int | None = None) -> None:
        self.message = str(error.get("message") or "the server gave no reason")
        super().__init__(self.message)
        self.code = str(error.get("code") or "")
        self.action = str(error.get("action") or "")
        self.details = tuple(str(each) for each in error.get("details") or ())
        self.status = status

    @property
    def note(self) -> str:
        """Code and status, for those who report it."""
        status = f"HTTP {self.status}" if self.status else ""
        return ", ".join(part for part in (self.code, status) if part)


class ServerUnreachable(Exception):
    """There was no answer that Lorry could have given."""


class Api:
    """A running server. Raises `ServerRefused` and `ServerUnreachable`, nothing else."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url = url.rstrip("/")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        try:
            self._http = httpx.Client(
                base_url=self.url, headers=headers, timeout=ANSWER_TIMEOUT_S, trust_env=False
            )
        except (httpx.InvalidURL, ValueError) as error:
            raise ServerUnreachable(f"{url!r} is no usable URL: {error}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._http.close()

    def call(
        self,
        method: str,
        path: str,
        *,
        body: Mapping[str, object] | None = None,
        params: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = ANSWER_TIMEOUT_S,
    ) -> Json:
        """One exchange; the JSON object that came back, {} for an empty body."""
        try:
            answer = self._http.request(
                method, path, json=body, params=params, headers=headers, timeout=timeout_s
            )
        except httpx.ConnectError:
            raise ServerUnreachable(f"No server answers at {self.url}.") from None
        except httpx.TimeoutException:
            raise ServerUnreachable(f"{self.url} did not answer within {timeout_s:g} s.") from None
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
            raise ServerUnreachable(f"{self.url}: {error}") from None
        return self._read(answer)

    def _read(self, answer: httpx.Response) -> Json:
        """The body, or the error that it stands for."""
        try:
            value = answer.json() if answer.content else {}
        except ValueError:
            value = None
        if answer.is_success and isinstance(value, dict):
            return value
        if isinstance(value, dict) and isinstance(value.get("error"), dict):
            raise ServerRefused(value["error"], answer.status_code)
        raise ServerUnreachable(
            f"{self.url} answered HTTP {answer.status_code} in a form that is not Lorry's; "
            "is another server running there?"
        )

    def adapters(self) -> list[Json]:
        """All adapters, by name."""
        return cast(list[Json], self.call("GET", "/v1/adapters").get("data", []))

    def adapter(self, name: str) -> Json:
        """One adapter."""
        return self.call("GET", adapter_path(name))

    def load(
        self,
        name: str,
        body: Mapping[str, object],
        *,
        if_match: str | None = None,
        progress: Callable[[str], None] = lambda _: None,
    ) -> Json:
        """Register or replace, and wait for the end; the adapter as it is then."""
        headers = {"If-Match": if_match} if if_match else None
        answer = self.call(
            "PUT", adapter_path(name), body=body, params={"wait": "false"}, headers=headers
        )
        self._follow(answer, progress)
        return self.adapter(name)

    def unload(
        self,
        name: str,
        *,
        drain_timeout: float | None = None,
        purge: bool = False,
        progress: Callable[[str], None] = lambda _: None,
    ) -> Json:
        """Unload, and wait for the end; the operation."""
        params = {"wait": "false", "purge": str(purge).lower()}
        if drain_timeout is not None:
            params["drain_timeout"] = str(drain_timeout)
        return self._follow(self.call("DELETE", adapter_path(name), params=params), progress)

    def roll_back(self, name: str, progress: Callable[[str], None] = lambda _: None) -> Json:
        """Serve the version before, and wait for the end; the adapter as it is then."""
        path = adapter_path(name) + "/rollback"
        self._follow(self.call("POST", path, params={"wait": "false"}), progress)
        return self.adapter(name)

    def pin(self, name: str, pinned: bool) -> Json:
        """Pin or unpin; the adapter as it is then."""
        self.call("PATCH", adapter_path(name), body={"pinned": pinned})
        return self.adapter(name)

    def _follow(self, answer: Json, progress: Callable[[str], None]) -> Json:
        """Poll an operation to its end. An answer that is none is the end already."""
        if "status" not in answer or "kind" not in answer:
            return answer
        operation = answer
        while operation["status"] == "running":
            progress(str(operation.get("phase") or operation["kind"]))
            time.sleep(POLL_S)
            operation = self.call("GET", f"/v1/operations/{operation['id']}")
        if operation["status"] != "done":
            error = operation.get("error") or {"message": f"it was {operation['status']}"}
            raise ServerRefused(error)
        return operation


def adapter_path(name: str) -> str:
    """Names may hold slashes."""
    return f"/v1/adapters/{quote(name, safe='')}"
