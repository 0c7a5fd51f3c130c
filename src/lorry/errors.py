"""Every error that leaves Lorry, in one tree.

LorryError
├── CallerError                      the caller can mend it
│   ├── RequestInvalid          400  request_invalid
│   ├── ModelUnsupported        400  model_unsupported
│   ├── ModelInvalid            400  model_invalid
│   ├── SourceUnsupported       400  source_unsupported
│   ├── Unauthorized            401  unauthorized
│   ├── Forbidden               403  forbidden
│   ├── SourceDenied            403  source_denied
│   ├── AdapterNotFound         404  adapter_not_found
│   │   └── AdapterUnloading    404  adapter_unloading
│   ├── SourceNotFound          404  source_not_found
│   ├── OperationNotFound       404  operation_not_found
│   ├── RouteNotFound           404  route_not_found
│   ├── MethodNotAllowed        405  method_not_allowed
│   ├── BodyTooLarge            413  body_too_large
│   ├── AdapterConflict         409  adapter_conflict
│   │   ├── VersionMismatch     409  version_mismatch
│   │   └── OperationCancelled  409  operation_cancelled
│   └── AdapterInvalid          422  adapter_invalid
│       └── DigestMismatch      422  digest_mismatch
├── Busy                             nothing is wrong, there is only no room now
│   ├── QueueFull               429  queue_full
│   ├── CapacityExhausted       503  capacity_exhausted
│   └── AllPinned               409  all_pinned
├── AdapterUnavailable          503  adapter_unavailable
├── SourceUnreachable           503  source_unreachable
├── RequestAborted              503  request_aborted
├── ShuttingDown                503  shutting_down
├── StorageFailed               500  storage_failed
├── EngineError
│   ├── EngineRejected          500  engine_rejected
│   ├── EngineUnreachable       503  engine_unreachable
│   └── EngineTimeout           504  engine_timeout
├── BrokenInvariant             500  broken_invariant      our own bug
├── ServerUnreachable           503  server_unreachable    raised by lorry.Client alone: no answer
├── AnswerLost                  504  answer_lost           came, it was lost on the way, or it was
└── AnswerInvalid               502  answer_invalid        none of Lorry's

An error says whose fault it is, which HTTP status fits, and what to do next. Inside the core errors
are values; they are raised only at a border.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Any, ClassVar


class Fault(StrEnum):
    """Whose fault an error is."""

    CALLER = "caller"
    CAPACITY = "capacity"
    ADAPTER = "adapter"
    ENGINE = "engine"
    OPERATOR = "operator"
    LORRY = "lorry"


class LorryError(Exception):
    """The root of all errors; by itself, a failure that no other code fits.

    `str(error)` is one sentence that names the thing and the cause."""

    code: ClassVar[str] = "lorry_error"
    status: ClassVar[int] = 500
    fault: ClassVar[Fault] = Fault.LORRY
    retryable: ClassVar[bool] = False
    retry_after_s: float | None = None
    action: ClassVar[str] = "Report it, with the server's log."
    """What the reader should do about it, in one sentence."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        details: Sequence[str] = (),
        retry_after_s: float | None = None,
    ) -> None:
        """`param` names the request field at fault; `details` lists every problem found, one each;
        `retry_after_s` overrides what is usual for the class."""
        super().__init__(message)
        if retry_after_s is not None:
            self.retry_after_s = retry_after_s
        self.message = message
        self.param = param
        self.details = tuple(details)


class CallerError(LorryError):
    """The caller sent something that cannot be done as asked."""

    code = "caller_error"
    status = 400
    fault = Fault.CALLER
    action = "Change the request as the message says."


class RequestInvalid(CallerError):
    """A field of the request is missing, of the wrong type or out of range."""

    code = "request_invalid"
    status = 400


class ModelUnsupported(CallerError):
    """The base model is of a kind that the embedded engine does not compute; found before a weight
    is read."""

    code = "model_unsupported"
    status = 400
    fault = Fault.OPERATOR
    action = "Serve a supported base model, or this one through another engine (--engine)."


class ModelInvalid(CallerError):
    """The base model's files are missing, cut, or contradict each other."""

    code = "model_invalid"
    status = 400
    fault = Fault.OPERATOR
    action = "Fetch or convert the model again, then start the server again."


class SourceUnsupported(CallerError):
    """Adapters cannot be fetched from such a place, because a part of Lorry is not installed."""

    code = "source_unsupported"
    status = 400
    fault = Fault.OPERATOR
    action = "Install the extra that the message names, and start the server again."


class Unauthorized(CallerError):
    """The server has an API key and the request did not carry it."""

    code = "unauthorized"
    status = 401
    action = "Send the server's key as 'Authorization: Bearer KEY'."


class Forbidden(CallerError):
    """The request names something outside what the operator allows."""

    code = "forbidden"
    status = 403
    action = (
        "Use a path below one of the server's --adapter-root folders, or a source that "
        "--allow-source and --private-source let through."
    )


class SourceDenied(CallerError):
    """The place that the adapter is to be fetched from does not let the server in."""

    code = "source_denied"
    status = 403
    fault = Fault.OPERATOR
    action = "Give the server's environment credentials that may read the source."


class AdapterNotFound(CallerError):
    """No adapter of that name is registered."""

    code = "adapter_not_found"
    status = 404
    action = "See GET /v1/models for the names there are, or load the adapter first."


class AdapterUnloading(AdapterNotFound):
    """The adapter is being unloaded and takes no new requests."""

    code = "adapter_unloading"
    action = "Load the adapter again once the unload has ended, if it is still wanted."


class SourceNotFound(CallerError):
    """Nothing is where the adapter was said to be."""

    code = "source_not_found"
    status = 404
    action = "Check the path; it is read on the server's machine."


class OperationNotFound(CallerError):
    """No operation has that id, or it ended too long ago to be remembered."""

    code = "operation_not_found"
    status = 404
    action = "Ask for the adapter itself instead: GET /v1/adapters/{name}."


class RouteNotFound(CallerError):
    """The server has nothing under that path."""

    code = "route_not_found"
    status = 404
    action = "See GET /openapi.json for the routes there are."


class MethodNotAllowed(CallerError):
    """The path is right, but not with that HTTP method."""

    code = "method_not_allowed"
    status = 405
    action = "Use one of the methods in the Allow header."


class BodyTooLarge(CallerError):
    """The request's body is longer than the server takes."""

    code = "body_too_large"
    status = 413
    action = "Send less in one request."


class AdapterConflict(CallerError):
    """The name is taken."""

    code = "adapter_conflict"
    status = 409
    action = "Choose another name, or ask to replace the adapter that has it."


class VersionMismatch(AdapterConflict):
    """`If-Match` named another version than the one that is served."""

    code = "version_mismatch"
    action = "Read the adapter again and decide on its present version."


class OperationCancelled(AdapterConflict):
    """Somebody cancelled the operation before it had changed anything."""

    code = "operation_cancelled"
    action = "Ask again if it is still wanted."


class AdapterInvalid(CallerError):
    """The adapter's files cannot be served on this base model."""

    code = "adapter_invalid"
    status = 422
    fault = Fault.ADAPTER
    action = "Mend the adapter as each detail says; nothing that was served has changed."


class DigestMismatch(AdapterInvalid):
    """What was found is not what `expected_digest` names."""

    code = "digest_mismatch"
    action = "Find out who changed the source, or ask for the digest that it has now."


class Busy(LorryError):
    """There is no room for it now."""

    code = "busy"
    status = 503
    fault = Fault.CAPACITY
    retryable = True
    retry_after_s: float | None = 1.0
    action = "Try again after the time in Retry-After."


class QueueFull(Busy):
    """More requests wait than the server allows."""

    code = "queue_full"
    status = 429


class CapacityExhausted(Busy):
    """No room could be made within the deadline."""

    code = "capacity_exhausted"
    status = 503
    retry_after_s = 5.0
    action = "Try again later, unload something, or raise --max-cpu-loras or --host-cache-bytes."


class AllPinned(Busy):
    """Pinned adapters leave no room, so nothing was begun."""

    code = "all_pinned"
    status = 409
    retryable = False
    retry_after_s = None
    action = "Unpin or unload an adapter first."


class AdapterUnavailable(LorryError):
    """The adapter is registered but could not be loaded lately; the message says why."""

    code = "adapter_unavailable"
    status = 503
    fault = Fault.ENGINE
    retryable = True
    retry_after_s = 1.0
    action = (
        "Try again after Retry-After; if it stays so, look at the adapter's reason and reload it."
    )


class SourceUnreachable(LorryError):
    """The place that the adapter is to be fetched from did not answer, or not to the end."""

    code = "source_unreachable"
    status = 503
    fault = Fault.OPERATOR
    retryable = True
    retry_after_s = 5.0
    action = "Try again after Retry-After; the fetch goes on from where it broke off."


class RequestAborted(LorryError):
    """A running request was ended early by an unload or its deadline."""

    code = "request_aborted"
    status = 503
    fault = Fault.OPERATOR
    action = "Send the request again if its adapter is still listed."


class ShuttingDown(LorryError):
    """The server is stopping."""

    code = "shutting_down"
    status = 503
    fault = Fault.OPERATOR
    retryable = True
    retry_after_s = 5.0
    action = "Send the request to another server, or again once this one is back."


class StorageFailed(LorryError):
    """The state file or the disk cache could not be read or written."""

    code = "storage_failed"
    status = 500
    fault = Fault.OPERATOR
    action = "Free space or mend the permissions of the state folder; what is served goes on."


class EngineError(LorryError):
    """The engine did not do what it was asked."""

    code = "engine_error"
    status = 500
    fault = Fault.ENGINE


class EngineRejected(EngineError):
    """The engine answered a command with an error."""

    code = "engine_rejected"
    status = 500
    action = "Nothing has changed; see the message for the engine's own words."


class EngineUnreachable(EngineError):
    """The engine is down or starting."""

    code = "engine_unreachable"
    status = 503
    retryable = True
    retry_after_s = 2.0
    action = "Try again after Retry-After: the engine is being restarted."


class EngineTimeout(EngineError):
    """The engine did not answer within the deadline."""

    code = "engine_timeout"
    status = 504
    retryable = True
    retry_after_s = 5.0
    action = "Try again; if it stays so, look at GET /health."


class BrokenInvariant(LorryError):
    """A promise that Lorry makes was about to be broken: a bug of ours."""

    code = "broken_invariant"
    status = 500
    action = "Report it, with the promise's number and the server's log."

    def __init__(self, promise: int, message: str) -> None:
        """`promise` is the number in the design."""
        super().__init__(f"Promise {promise}: {message}")
        self.promise = promise

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies are made for several callers, and of `args` alone none could be."""
        return type(self), (self.promise, ""), {**self.__dict__, "args": self.args}


class ServerUnreachable(LorryError):
    """Lorry's client could not reach a server, so nothing was asked of one."""

    code = "server_unreachable"
    status = 503
    fault = Fault.OPERATOR
    retryable = True
    retry_after_s = 1.0
    action = "Start a server with lorry serve MODEL, or name another with --url or LORRY_URL."


class AnswerLost(LorryError):
    """Lorry's client sent a call, and no whole answer came back."""

    code = "answer_lost"
    status = 504
    fault = Fault.OPERATOR
    action = "Look what is there now: the call may have been carried out."


class AnswerInvalid(LorryError):
    """What answered Lorry's client does not speak as Lorry does."""

    code = "answer_invalid"
    status = 502
    fault = Fault.CALLER
    action = "Check the URL: another server, or a proxy, answers there."
