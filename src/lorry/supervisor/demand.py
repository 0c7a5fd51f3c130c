"""The two ways in which adapters come without an admin call, tied to the supervisor's own calls:
names on demand and folders that are followed."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from lorry.ids import AdapterName, OperationId, VersionId
from lorry.supervisor.checking import CheckView
from lorry.views import AdapterView, OperationView


class Admin(Protocol):
    """What the supervisor can be asked."""

    def adapter(self, name: AdapterName) -> AdapterView:
        """A registered adapter."""

    def unload(self, name: AdapterName) -> OperationView:
        """Begin an unload."""

    async def check(self, source: str) -> CheckView:
        """What a load would find."""

    async def wait(self, operation: OperationId) -> OperationView:
        """The end of a call."""


class AdminCalls:
    """Admin calls as learning and following make them. New names are registered and no more: the
    first request loads them."""

    def __init__(self, admin: Admin, load: Callable[..., OperationView]) -> None:
        """`load` takes the fields of a `LoadRequest`."""
        self._admin = admin
        self._load = load

    def register(self, name: AdapterName, source: str, labels: Mapping[str, str]) -> OperationId:
        """Begin to register a new name."""
        return self._begin(name=name, source=source, mode="create", labels=labels, load=False)

    def publish(self, name: AdapterName, source: str, *, new: bool) -> OperationId:
        """Begin to register a name, or to replace what it stands for: loaded first if the old
        version is in an engine, so that nobody waits for the new one."""
        if new:
            return self._begin(name=name, source=source, mode="create", load=False)
        return self._begin(name=name, source=source, mode="replace", load=self._is_loaded(name))

    async def version_at(self, source: str) -> VersionId | None:
        """The version that a source holds; None when it cannot be served."""
        manifest = (await self._admin.check(source)).report.manifest
        return None if manifest is None else manifest.version

    def forget(self, name: AdapterName) -> OperationId:
        """Begin to unload a name."""
        return self._admin.unload(name).id

    async def ended(self, operation: OperationId) -> None:
        """Wait for the end of a call; raises its error."""
        await self._admin.wait(operation)

    def is_idle(self, name: AdapterName) -> bool:
        """Whether nobody uses a registered name or waits for it."""
        view = self._admin.adapter(name)
        return not (view.waiting or view.unloading or any(one.leases for one in view.residency))

    def _begin(self, **request: Any) -> OperationId:
        return self._load(**request).id

    def _is_loaded(self, name: AdapterName) -> bool:
        return any(one.tier in ("host", "slot") for one in self._admin.adapter(name).residency)
