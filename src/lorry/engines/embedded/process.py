"""The engine's own process: carries out commands, and sends what each step did.

    reader thread ---> inbox ---> main thread: commands, then one step, then one frame of outputs
    loader threads --> inbox

Files are read and packed in loader threads, so decoding does not wait for a load. Nor does a load
or an unload wait for a step: while one computes, the thread that has a command carries it out
itself if it touches no request. It holds the core's books meanwhile, and overtakes nothing in the
inbox. The process ends when the other end of the socket does, whatever it is busy with.
"""

import ctypes
import gc
import logging
import os
import queue
import signal
import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from threading import Barrier, Lock, RLock, Thread
from typing import NoReturn

from lorry.engine import EngineHealth, LoraVersion
from lorry.engines.embedded import wire
from lorry.engines.embedded.build import Engine, build
from lorry.engines.embedded.lora import HostAdapter
from lorry.errors import EngineRejected
from lorry.ids import EngineId

logger = logging.getLogger(__name__)

READ_BYTES = 1 << 16
"""Per read of the socket."""

LOADERS = 4
"""Loads at a time: more than one, so that a slow disk under one adapter holds up no other."""

START_LOADERS_S = 10.0
"""Far more than four threads need to meet; they are of use even if they did not."""

STATUS_INTERVAL_S = 0.1
"""Between two status frames while steps run; going idle always sends one."""

CHECK_INTERVAL_S = 10.0
"""Between two checks of the books, done only when idle."""

SWITCH_INTERVAL_S = 0.0005
"""How long a thread that computes in Python keeps the others waiting. Python's own 5 ms are longer
than a step of a small model, and a load asks for its turn dozens of times."""

COMPUTE_NICENESS = 10
"""Of the threads that compute steps. They take all cores for as long as anybody asks for tokens; a
load, and the server's answer to anything, is a short piece of work that should not have to share a
core with them evenly. At 10 it gets nine tenths of it."""

PR_SET_PDEATHSIG = 1
"""From linux/prctl.h."""


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A loader is done."""

    command: int
    version: LoraVersion
    adapter: HostAdapter | None
    error: Exception | None
    seconds: float


@dataclass(slots=True)
class _Load:
    """A load under way."""

    command: int
    cancelled: bool = False
    removers: list[int] = field(default_factory=list)
    """Commands that want it gone; answered when it is."""


class Worker:
    """The main thread's work, and what others do in its stead."""

    def __init__(self, sock: socket.socket) -> None:
        """The other end of `sock` is the server's."""
        self._sock = sock
        self._sending = Lock()
        self._inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._books = RLock()
        """The core's, once there is one."""
        self._pending = 0
        """Messages in the inbox or just taken out of it, not yet carried out; guarded by the books.
        """
        self._loads: dict[EngineId, _Load] = {}
        self._added_by: dict[EngineId, int] = {}
        self._loaders = ThreadPoolExecutor(LOADERS, thread_name_prefix="load")
        self._last_status: EngineHealth | None = None
        self._status_due = 0.0
        self._check_due = 0.0
        self._engine: Engine
        self._ready = False

    def run(self) -> NoReturn:
        """Load the model, then step until the server goes away."""
        Thread(target=self._read, name="read", daemon=True).start()
        # Threads begin with the niceness of those who start them: the loaders before, the model's
        # after.
        self._start_loaders()
        compute_nicely()
        self._load_model()
        gc.freeze()  # what is there now stays; looking through it takes as long as many steps
        while True:
            if not self._engine.core.busy:
                self._rest()
                self._take_next()
            while not self._inbox.empty():
                self._take_next()
            self._step()

    def _start_loaders(self) -> None:
        """All of them, which a pool does only when each has something to do at the same time."""
        everyone = Barrier(LOADERS, timeout=START_LOADERS_S)
        for _ in range(LOADERS):
            self._loaders.submit(everyone.wait)

    def _take_next(self) -> None:
        message = self._inbox.get()
        with self._books:
            self._take(message)
            self._pending -= 1

    def deliver(self, message: object) -> None:
        """In the reader's thread or a loader's: carry it out at once, or leave it to the main
        thread, which is quick to take it unless a step computes. What goes wrong here goes wrong in
        the books, so the process ends, as it does when the main thread fails."""
        try:
            with self._books:
                if self._ready and not self._pending and self._fits_beside_a_step(message):
                    self._take(message)
                else:
                    self._pending += 1
                    self._inbox.put(message)
        except BaseException:
            logger.exception("a command failed beside a step")
            os._exit(1)

    def _fits_beside_a_step(self, message: object) -> bool:
        core = self._engine.core
        match message:
            case wire.AddLora() | wire.ListLoras() | _Loaded():
                return core.busy
            case wire.RemoveLora(_, engine_id):
                return core.busy and not core.uses(engine_id)
            case _:
                return False

    def _read(self) -> None:
        unpacker = wire.Unpacker()
        while data := self._receive():
            for message in unpacker.feed(data):
                self.deliver(message)
        os._exit(0)

    def _receive(self) -> bytes:
        try:
            return self._sock.recv(READ_BYTES)
        except OSError:
            return b""

    def _load_model(self) -> None:
        start = self._inbox.get()
        with self._books:
            self._pending -= 1
        assert isinstance(start, wire.Start)
        try:
            engine = build(start.settings, lambda *done: self._send(wire.Progress(*done)))
        except Exception as error:
            logger.debug("the model could not be loaded", exc_info=True)
            self._send(wire.Failed(wire.failure(error)))
            os._exit(1)
        self._send(wire.Ready(engine.capabilities, engine.core.health()))
        self.adopt(engine)

    def adopt(self, engine: Engine) -> None:
        """From now on commands are for this engine, and its books are guarded as the inbox is."""
        with self._books:
            engine.core.books = self._books
            self._engine, self._ready = engine, True

    def _step(self) -> None:
        core = self._engine.core
        if core.busy:
            core.step()
        self._send_outputs(core.take_outputs())
        now = time.monotonic()
        if now >= self._status_due:
            self._status_due = now + STATUS_INTERVAL_S
            self._send_status()

    def _rest(self) -> None:
        """Nothing to do: say so, and see whether the books are right."""
        self._send_status()
        if time.monotonic() >= self._check_due:
            with self._books:
                self._engine.core.check()
            self._check_due = time.monotonic() + CHECK_INTERVAL_S

    def _send_outputs(self, outputs: list[wire.Output]) -> None:
        if outputs:
            self._send(wire.Outputs(outputs))

    def _send_status(self) -> None:
        with self._books:
            health = self._engine.core.health()
        if health != self._last_status:
            self._last_status = health
            self._send(wire.Status(health))

    def _take(self, message: object) -> None:
        """Carry out one message; a command that fails is answered with its failure."""
        match message:
            case wire.Generate(key, request):
                self._engine.core.submit(key, request)
            case wire.Abort(key):
                self._engine.core.abort(key)
            case wire.Ping():
                self._send(wire.Pong())
            case wire.AddLora(command, version):
                self._answer(command, partial(self._add, command, version))
            case wire.RemoveLora(command, engine_id):
                self._answer(command, partial(self._remove, command, engine_id))
            case wire.ListLoras(command):
                self._answer(command, self._engine.core.host.ids)
            case wire.PinLora(command, engine_id, pinned):
                self._answer(command, partial(self._pin, engine_id, pinned))
            case wire.CancelAdd(command):
                self._cancel(command)
            case _Loaded():
                self._finish_load(message)
            case _:
                logger.error("unknown message %r", message)

    def _answer(self, command: int, work: Callable[[], object]) -> None:
        """Say what `work` returns; NotImplemented means that the answer comes later."""
        try:
            result = work()
        except Exception as error:
            if not isinstance(error, EngineRejected):
                logger.exception("a command failed")
            self._send(wire.Reply(command, None, wire.failure(error)))
            return
        if result is not NotImplemented:
            self._send(wire.Reply(command, result))

    def _add(self, command: int, version: LoraVersion) -> object:
        held = self._engine.core.host.get(version.engine_id)
        if held is not None and held.version.version == version.version:
            return wire.Added(held.adapter.bytes, 0.0)
        self._engine.core.host.reserve(version)
        self._loads[version.engine_id] = _Load(command)
        self._loaders.submit(self._load, command, version)
        return NotImplemented

    def _load(self, command: int, version: LoraVersion) -> None:
        """In a loader thread."""
        began = time.perf_counter()
        adapter: HostAdapter | None = None
        fault: Exception | None = None
        try:
            adapter = self._engine.load_adapter(version)
        except Exception as error:
            logger.debug("an adapter could not be loaded", exc_info=True)
            fault = error
        seconds = time.perf_counter() - began
        self.deliver(_Loaded(command, version, adapter, fault, seconds))

    def _finish_load(self, loaded: _Loaded) -> None:
        load = self._loads.pop(loaded.version.engine_id)
        self._answer(loaded.command, partial(self._hold, loaded, load))
        for command in load.removers:
            self._send(wire.Reply(command, True))

    def _hold(self, loaded: _Loaded, load: _Load) -> object:
        engine_id, name = loaded.version.engine_id, loaded.version.name
        if load.cancelled or loaded.adapter is None:
            self._engine.core.host.cancel(engine_id)
            raise loaded.error or EngineRejected(f"{name} was removed while it was being loaded.")
        size = self._engine.core.hold(loaded.version, loaded.adapter)
        self._added_by[engine_id] = loaded.command
        return wire.Added(size, loaded.seconds)

    def _remove(self, command: int, engine_id: EngineId) -> object:
        load = self._loads.get(engine_id)
        if load is not None:
            load.cancelled = True
            load.removers.append(command)
            return NotImplemented
        self._added_by.pop(engine_id, None)
        removed = self._engine.core.remove(engine_id)
        trim_memory()
        # Whoever ran on it hears of its end before the remover hears that it is gone.
        self._send_outputs(self._engine.core.take_outputs())
        return removed

    def _pin(self, engine_id: EngineId, pinned: bool) -> None:
        self._engine.core.pin(engine_id, pinned)

    def _cancel(self, command: int) -> None:
        for load in self._loads.values():
            load.cancelled |= load.command == command
        for engine_id, added_by in list(self._added_by.items()):
            if added_by == command:
                self._remove(command, engine_id)

    def _send(self, message: wire.FromEngine) -> None:
        try:
            with self._sending:
                self._sock.sendall(wire.pack(message))
        except OSError:
            os._exit(0)


def trim_memory() -> None:
    """Give freed pages back to the system, so that the process really shrinks."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):
        logger.debug("this C library has no malloc_trim; memory returns when it likes")


def compute_nicely() -> None:
    """Let this thread, and those that it starts, give way. Where niceness is the process's and not
    the thread's, loads give way too, and only the server gains."""
    try:
        os.nice(COMPUTE_NICENESS)
    except (OSError, AttributeError):
        logger.debug("this system has no niceness; steps share the cores evenly with loads")


def die_with_parent() -> None:
    """Ask the kernel to kill this process when the server dies, even in a step that never ends."""
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    except (OSError, AttributeError):
        logger.debug("this system has no prctl; the closed socket ends the process instead")


def main() -> NoReturn:
    """`python -m lorry.engines.embedded.process FD`: FD is one end of a socket pair."""
    logging.basicConfig(format="%(levelname)s engine: %(message)s", level=logging.INFO)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    die_with_parent()
    try:
        Worker(socket.socket(fileno=int(sys.argv[1]))).run()
    except Exception:
        # Not by the usual way out, which would wait for a loader that may never end.
        logger.exception("the engine's books are wrong or its loop is; it starts anew")
        os._exit(1)


if __name__ == "__main__":
    main()
