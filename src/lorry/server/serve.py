"""Running the app on a socket, and stopping it in order.

SIGTERM and SIGINT: no new connections and requests; running requests get `drain_timeout_s`; what is
left is aborted with a clear error; then the supervisor and its engines end. A second SIGINT skips
the waiting.
"""

import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import anyio
import uvicorn
from fastapi import FastAPI

from lorry.server.service import Service

log = logging.getLogger(__name__)

BACKLOG = 2048
ABORT_GRACE_S = 5.0
"""Between the abort of the last requests and the end of their connections."""


def bind(host: str, port: int) -> socket.socket:
    """A socket with its address; port 0 takes a free one. Raises OSError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        problem = f"Cannot listen on {host}, port {port}: {error.strerror}"
        advice = "choose another --host or --port, or stop what listens there"
        raise OSError(error.errno, f"{problem}; {advice}.") from None
    return listener


async def serve(
    app: FastAPI,
    host: str,
    port: int,
    *,
    on_listening: Callable[[str], None] = lambda url: log.info("Listening on %s", url),
) -> None:
    """Serve until a signal. `on_listening` gets the URL once requests are answered.

    Raises what keeps the supervisor from starting, and what ends it: the lifespan is entered here
    and not by uvicorn, which would log such an error and go on serving without a supervisor.
    """
    service: Service = app.state.service
    # Before the model is loaded, so that a port in use is found out at once.
    listener = bind(host, port)
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        backlog=BACKLOG,
        timeout_graceful_shutdown=int(service.settings.drain_timeout_s + ABORT_GRACE_S) + 1,
        server_header=False,
        ws="none",
    )
    server = _Server(config, service, lambda: on_listening(_url(host, listener)))
    with closing(listener):
        async with app.router.lifespan_context(app):
            await server.serve(sockets=[listener])


def _url(host: str, listener: socket.socket) -> str:
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{listener.getsockname()[1]}"


class _Server(uvicorn.Server):
    """uvicorn's server, with our own end of requests."""

    def __init__(
        self, config: uvicorn.Config, service: Service, on_listening: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._service = service
        self._on_listening = on_listening

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Tell when it is done."""
        await super().startup(sockets)
        if self.started:
            self._on_listening()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End requests first, each with an answer."""
        self._service.shutdown.begin()
        async with anyio.create_task_group() as group:
            group.start_soon(self._abort_late)
            await super().shutdown(sockets)
            group.cancel_scope.cancel()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn does, but without raising the signal again at the end: a stop that was asked
        for is a success, and the process ends with 0."""
        with super().capture_signals():
            try:
                yield
            finally:
                self._captured_signals.clear()

    async def _abort_late(self) -> None:
        await anyio.sleep(self._service.settings.drain_timeout_s)
        self._service.shutdown.abort()
