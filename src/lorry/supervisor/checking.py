"""The dry run of a load: the files judged as a load judges them, and the core asked what it would
do. Nothing is kept and nothing changes."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import PurePath

import anyio
from anyio import to_thread

from lorry.artifacts.checking import Report, check_source, problems_of
from lorry.artifacts.names import check_adapter_name
from lorry.artifacts.remote.fetcher import Fetcher
from lorry.artifacts.remote.uri import redact
from lorry.engine import EngineCapabilities
from lorry.errors import AdapterConflict, LorryError, RequestInvalid
from lorry.ids import AdapterName
from lorry.lifecycle.events import VersionSpec
from lorry.lifecycle.fleet import Fleet
from lorry.lifecycle.forecast import Forecast, forecast
from lorry.supervisor.sources import Fetching, stopping

CHECKS_MAX = 2
"""Folders read for dry runs at once. They have threads of their own, so that no load waits for a
check."""


@dataclass(frozen=True, slots=True)
class CheckView:
    """What a load would find and do."""

    report: Report
    room: Forecast | None
    """None when the files cannot be served."""


class Checker:
    """Makes dry runs for one fleet."""

    def __init__(self, fleet: Fleet, fetcher: Fetcher, base_names: Collection[str]) -> None:
        """`base_names` no adapter may have."""
        self._fleet = fleet
        self._fetcher = fetcher
        self._base_names = base_names
        self._threads = anyio.CapacityLimiter(CHECKS_MAX)

    async def check(
        self, source: str, name: str | None, capabilities: EngineCapabilities
    ) -> CheckView:
        """Every problem that a load of `source` as `name` (None: any free name) would meet. Raises
        `Forbidden` and `RequestInvalid` for a source that may not be read or is none."""
        problems = self._name_problems(name)
        called = name or PurePath(redact(source)).name or redact(source)
        fetching = Fetching()
        async with stopping(fetching):
            report = await to_thread.run_sync(
                self._judge, source, called, capabilities, fetching, limiter=self._threads
            )
        room = None
        if report.manifest is not None:
            spec = VersionSpec(report.manifest.version, report.manifest.host_bytes)
            room = forecast(self._fleet.world, AdapterName(name or ""), spec)
            problems += [] if room.error is None else [room.error]
        found = [problem for error in problems for problem in problems_of(error)]
        return CheckView(replace(report, problems=(*report.problems, *found)), room)

    def _judge(
        self, source: str, called: str, capabilities: EngineCapabilities, fetching: Fetching
    ) -> Report:
        """In a worker thread."""
        return check_source(
            called,
            source,
            self._fetcher,
            capabilities.base,
            capabilities.max_lora_rank,
            cancelled=fetching.stop.is_set,
        )

    def _name_problems(self, name: str | None) -> list[LorryError]:
        if name is None:
            return []
        try:
            check_adapter_name(name, self._base_names)
        except (RequestInvalid, AdapterConflict) as error:
            return [error]
        return []
