"""Planted bugs of the shell and the server, each of which the smoke seeds must find. None of them
is in the core, whose own are in level one."""

import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from functools import partial

import anyio
import anyio.abc
import pytest
from anyio import to_thread

from lorry.engine import Engine, GenerateRequest, TokenChunk
from lorry.errors import LorryError, StorageFailed
from lorry.ids import ReplicaId
from lorry.lifecycle import commands as cm
from lorry.lifecycle import events as ev
from lorry.server import sse
from lorry.supervisor import requests
from lorry.supervisor.foreign import engine_error
from lorry.supervisor.registry import Registry
from lorry.supervisor.requests import Request
from lorry.supervisor.shell import Shell

Plant = Callable[[pytest.MonkeyPatch], None]


def release_forgotten_when_the_client_leaves(patch: pytest.MonkeyPatch) -> None:
    """Only an answer that came to its end is told to the core."""
    real = Request.release

    def release(self: Request) -> None:
        if not isinstance(sys.exc_info()[1], anyio.get_cancelled_exc_class()):
            real(self)

    patch.setattr(Request, "release", release)


def report_dropped_when_a_load_times_out(patch: pytest.MonkeyPatch) -> None:
    """A load without an answer is not answered for."""
    real = Shell.feed

    def feed(self: Shell, event: ev.Event) -> None:
        if not (isinstance(event, ev.LoadFailed) and event.unsure):
            real(self, event)

    patch.setattr(Shell, "feed", feed)


def false_from_remove_is_an_error(patch: pytest.MonkeyPatch) -> None:
    """What is not there cannot be removed (the field report on unload)."""
    real = Shell.feed

    def feed(self: Shell, event: ev.Event) -> None:
        if isinstance(event, ev.Unloaded) and not event.existed:
            event = ev.UnloadFailed(event.operation, LorryError("It is not there."))
        real(self, event)

    patch.setattr(Shell, "feed", feed)


def record_applied_before_it_is_written(patch: pytest.MonkeyPatch) -> None:
    """Memory first; the store will follow."""

    async def commit(self: Shell, command: cm.Commit) -> None:
        at_s = self.clock.wall_s()
        record = self.registry.change(command, at_s)
        old = self.registry.records.get(command.name)
        self.registry.apply(command, record)
        self.feed(ev.Committed(command.operation))
        if record is None and old is not None:
            self.registry.records[command.name] = old
        write = partial(self.registry.write, command, record, at_s)
        try:
            await to_thread.run_sync(write, limiter=self._store_thread)
        except StorageFailed:
            return

    patch.setattr(Shell, "_commit", commit)


def lost_answer_of_a_commit_taken_for_a_failure(patch: pytest.MonkeyPatch) -> None:
    """What the store says it did not write is not asked for again."""
    patch.setattr(Registry, "_holds", lambda self, name, record: False)


def commit_given_up_when_its_caller_has_gone(patch: pytest.MonkeyPatch) -> None:
    """A write that takes long is not waited for; it goes on by itself."""

    async def commit(self: Shell, command: cm.Commit) -> None:
        at_s = self.clock.wall_s()
        record = self.registry.change(command, at_s)
        write = partial(self.registry.write, command, record, at_s)
        try:
            with anyio.fail_after(0.3):
                await to_thread.run_sync(write, limiter=self._store_thread, abandon_on_cancel=True)
        except (TimeoutError, LorryError):
            self.feed(ev.CommitFailed(command.operation, StorageFailed("It takes too long.")))
            return
        self.registry.apply(command, record)
        self.feed(ev.Committed(command.operation))

    patch.setattr(Shell, "_commit", commit)


def late_listing_is_believed(patch: pytest.MonkeyPatch) -> None:
    """What an engine held when it was asked is what it holds when it answers."""

    async def see(self: Shell, replica: ReplicaId, engine: Engine) -> None:
        try:
            with anyio.fail_after(self.settings.command_timeout_s):
                residents = await engine.list_loras()
        except Exception:  # noqa: BLE001 - as the real one
            return
        self.feed(ev.EngineSeen(replica, residents, self.fleet.revision))

    patch.setattr(Shell, "_see", see)


def unload_has_no_deadline(patch: pytest.MonkeyPatch) -> None:
    """The engine will answer some time."""

    async def unload(self: Shell, command: cm.Unload) -> None:
        try:
            existed = await self.engines[command.replica].remove_lora(command.engine_id)
        except Exception as problem:  # noqa: BLE001 - as the real one
            self.feed(ev.UnloadFailed(command.operation, engine_error("unload", problem)))
        else:
            self.feed(ev.Unloaded(command.operation, existed))

    patch.setattr(Shell, "_unload", unload)


def stream_follows_the_name(patch: pytest.MonkeyPatch) -> None:
    """A stream goes on with whatever the name stands for now."""
    real = Request.stream

    async def stream(
        self: Request, engine: Engine, request: GenerateRequest
    ) -> AsyncGenerator[TokenChunk]:
        others = [v for v in getattr(engine, "_held", {}).values() if v.version != request.version]
        if others and request.version is not None:
            last = others[-1]
            request = replace(request, engine_id=last.engine_id, version=last.version)
        async with aclosing(real(self, engine, request)) as chunks:
            async for chunk in chunks:
                yield chunk

    patch.setattr(Request, "stream", stream)


def foreign_errors_leave_the_server(patch: pytest.MonkeyPatch) -> None:
    """An engine raises only our errors."""

    def as_it_is(what: str, problem: Exception) -> Exception:
        return problem

    patch.setattr(requests, "engine_error", as_it_is)


def engine_that_does_not_close_is_waited_for(patch: pytest.MonkeyPatch) -> None:
    """An error at the end of a stream comes out."""

    async def close(self: Request, chunks: AsyncGenerator[TokenChunk]) -> None:
        await chunks.aclose()

    patch.setattr(Request, "_close", close)


def head_can_be_cancelled(patch: pytest.MonkeyPatch) -> None:
    """A stream's head is sent like everything else."""

    async def head(self: sse.Writer) -> None:
        self.started = True
        await self._send({"type": "http.response.start", "status": 200, "headers": sse.HEADERS})

    patch.setattr(sse.Writer, "_send_head", head)


MUTANTS: dict[Plant, int] = {
    release_forgotten_when_the_client_leaves: 9,
    report_dropped_when_a_load_times_out: 18,
    false_from_remove_is_an_error: 4,
    record_applied_before_it_is_written: 53,
    lost_answer_of_a_commit_taken_for_a_failure: 23,
    commit_given_up_when_its_caller_has_gone: 2,
    late_listing_is_believed: 32,
    unload_has_no_deadline: 2,
    stream_follows_the_name: 2,
    foreign_errors_leave_the_server: 4,
    engine_that_does_not_close_is_waited_for: 18,
    head_can_be_cancelled: 18,
}
"""With the seed that is tried first, because it found the bug once."""
