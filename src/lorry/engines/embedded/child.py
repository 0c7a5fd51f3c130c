"""One life of the engine's process, seen from the server: start, talk, notice its end, end it."""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable

import psutil

from lorry.engines.embedded import wire
from lorry.engines.embedded.settings import EmbeddedSettings
from lorry.errors import LorryError

STOP_TIMEOUT_S = 5.0
"""Between asking the process to end and killing it."""

QUIET_WAITING = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0", "KMP_BLOCKTIME": "0"}
"""Threads that wait must sleep: spinning ones steal the server's cores, and each other's."""


class Child(asyncio.Protocol):
    """A running engine process and the socket to it; `lost` is set once, when that breaks."""

    def __init__(self, on_message: Callable[[object], None]) -> None:
        """`on_message` gets every frame, in order, on the event loop."""
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.heard = 0
        """Reads so far, for whoever watches for a hang."""
        self.process: asyncio.subprocess.Process | None = None
        self._cpu_s = 0.0
        self._on_message = on_message
        self._unpacker = wire.Unpacker()
        self._transport: asyncio.Transport | None = None

    async def launch(self, settings: EmbeddedSettings) -> None:
        """Start the process and have it load the model. Raises `OSError`."""
        ours, theirs = socket.socketpair()
        with theirs:
            ours.setblocking(False)
            loop = asyncio.get_running_loop()
            self._transport, _ = await loop.create_unix_connection(lambda: self, sock=ours)
            # A group of its own: an interrupt typed for the server is the server's to handle. Not a
            # session, between which Linux shares the cores evenly whatever a thread's niceness is.
            self.process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "lorry.engines.embedded.process", str(theirs.fileno())),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=child_environment(settings),
                process_group=0,
            )
        self.send(wire.Start(settings))

    def send(self, message: wire.ToEngine) -> None:
        """Hand over a message; one to a lost process is dropped, for its end is told otherwise."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(wire.pack(message))

    def has_computed(self) -> bool:
        """Whether it has used processor time since this was asked last: what says nothing for long
        may be in a long step."""
        before = self._cpu_s
        if self.process is not None:
            self._cpu_s = _cpu_s(self.process.pid)
        return self._cpu_s > before

    def is_stopped(self) -> bool:
        """By a signal, a debugger or a frozen container: it goes on when it is let."""
        if self.process is None:
            return False
        try:
            status = psutil.Process(self.process.pid).status()
        except psutil.Error:
            return False
        return status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)

    async def stop(self) -> str:
        """Tell it, wait with a limit, force; returns how it ended."""
        if self._transport is not None:
            self._transport.close()
        if self.process is None:
            return "it did not start"
        try:
            await asyncio.wait_for(self.process.wait(), STOP_TIMEOUT_S)
        except TimeoutError:
            self.kill()
            await self.process.wait()
        return end_reason(self.process.returncode)

    def kill(self) -> None:
        """At once."""
        if self.process is not None and self.process.returncode is None:
            self.process.kill()

    def data_received(self, data: bytes) -> None:
        """Of `asyncio.Protocol`. What cannot be read ends this life: the stream is broken then."""
        self.heard += 1
        try:
            for message in self._unpacker.feed(data):
                self._on_message(message)
        except LorryError as error:
            self._lose(error.message)

    def connection_lost(self, exc: Exception | None) -> None:
        """Of `asyncio.Protocol`: the process ended, or will when it sees the socket closed."""
        self._lose(f"its socket failed: {exc}" if exc else "its process ended")

    def _lose(self, reason: str) -> None:
        if not self.lost.done():
            self.lost.set_result(reason)


def child_environment(settings: EmbeddedSettings) -> dict[str, str]:
    """The server's environment, with the number of threads and how they wait."""
    threads = str(settings.compute_threads())
    counts = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), threads)
    return {**os.environ, **QUIET_WAITING, **counts}


def _cpu_s(pid: int) -> float:
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)


def end_reason(returncode: int | None) -> str:
    """In words."""
    if returncode is None:
        return "it is still running"
    if returncode < 0:
        return f"its process was ended by {signal.Signals(-returncode).name}"
    return f"its process ended with status {returncode}"
