"""Operations, which long calls become, and the feed of changes."""

import copy
from contextlib import aclosing
from typing import Annotated, Any

from fastapi import Depends, Header, Query
from starlette.responses import Response

from lorry.errors import LorryError
from lorry.ids import OperationId, short
from lorry.server.errors import error_body, json_response, to_json
from lorry.server.service import Service, service_of
from lorry.server.sse import EventStream, Writer
from lorry.views import ChangeEvent, OperationView

Caller = Annotated[Service, Depends(service_of)]


async def list_operations(service: Caller) -> dict[str, Any]:
    """The running ones and those that ended lately."""
    data = [operation_shape(one) for one in service.supervisor.operations()]
    return {"object": "list", "data": data}


async def show_operation(operation: int, service: Caller) -> dict[str, Any]:
    """How far one is."""
    return operation_shape(service.supervisor.operation(OperationId(operation)))


async def cancel_operation(operation: int, service: Caller) -> dict[str, Any]:
    """Stop one, as far as that is still possible; the answer says what it is now."""
    return operation_shape(service.supervisor.cancel(OperationId(operation)))


async def follow_events(
    service: Caller,
    after: Annotated[int, Query(ge=0, description="the last sequence number already known")] = 0,
    name: Annotated[str | None, Query(description="only of this adapter")] = None,
    follow: Annotated[bool, Query(description="false: what is known now, as one list")] = True,
    last_event_id: Annotated[str | None, Header()] = None,
) -> Response:
    """What happens to adapters and why: loads, evictions and for whom, waits and who has the room.
    Changes come as they happen, as server-sent events; reconnecting browsers say where they
    were."""
    if last_event_id is not None and last_event_id.isdigit():
        after = int(last_event_id)
    if not follow:
        known = service.supervisor.events_so_far(after)
        data = [event_shape(change) for change in known if name in (None, change.name)]
        return json_response({"object": "list", "data": data})

    async def produce(writer: Writer) -> None:
        with service.shutdown.feed():
            async with aclosing(service.supervisor.events(after)) as changes:
                async for change in changes:
                    if name in (None, change.name):
                        await writer.write(_event(change))

    return EventStream(produce, heartbeat_s=service.settings.heartbeat_s, done=False)


async def finish(service: Service, operation: OperationView) -> OperationView:
    """Wait for the end. Raises the operation's error, with the adapter's name in the message."""
    try:
        with service.shutdown.request():
            return await service.supervisor.wait(operation.id)
    except LorryError as error:
        raise _naming(error, operation) from error


def _naming(error: LorryError, operation: OperationView) -> LorryError:
    """The error as it is, or with the adapter's name put before: people load many at once."""
    if repr(operation.name) in error.message or f'"{operation.name}"' in error.message:
        return error
    named = copy.copy(error)
    named.message = f"{operation.kind} of '{operation.name}' failed: {error.message}"
    named.args = (named.message,)
    return named


def accepted(operation: OperationView) -> Response:
    """202: it runs; `Location` is where to look."""
    place = f"/v1/operations/{operation.id}"
    return json_response(operation_shape(operation), 202, {"Location": place})


def operation_shape(operation: OperationView) -> dict[str, Any]:
    """An operation in JSON."""
    return {
        "object": "operation",
        "id": operation.id,
        "kind": operation.kind,
        "name": operation.name,
        "version": operation.version,
        "status": str(operation.status),
        "phase": operation.phase,
        "error": _error(operation.error),
        "began": operation.began_s,
        "ended": operation.ended_s,
    }


def _error(error: LorryError | None) -> Any:
    return None if error is None else error_body(error)["error"]


def event_shape(change: ChangeEvent) -> dict[str, Any]:
    """A change in JSON."""
    return {
        "sequence": change.sequence,
        "at": change.at_s,
        "kind": change.kind,
        "name": change.name,
        "version": change.version,
        "short_version": change.version and short(change.version),
        "text": change.text,
    }


def _event(change: ChangeEvent) -> bytes:
    return b"id: %d\nevent: %b\ndata: %b\n\n" % (
        change.sequence,
        change.kind.encode(),
        to_json(event_shape(change)),
    )
