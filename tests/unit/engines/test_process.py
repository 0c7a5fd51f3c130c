"""The engine's process: what is carried out while a step computes, and what waits for its end."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Event, Thread

import torch

from lorry.engine import BaseShape, EngineCapabilities
from lorry.engines.embedded import wire
from lorry.engines.embedded.batch import StepBatch
from lorry.engines.embedded.build import Engine
from lorry.engines.embedded.process import Worker
from lorry.ids import EngineId
from tests.unit.engines.test_loop import Bench

LIMIT_S = 20.0


@dataclass
class Slow:
    """A model whose step lasts until it is let go."""

    model: object
    begun: Event = field(default_factory=Event)
    let_go: Event = field(default_factory=Event)

    def forward(self, batch: StepBatch) -> torch.Tensor:
        self.begun.set()
        assert self.let_go.wait(LIMIT_S)
        return self.model.forward(batch)  # type: ignore[attr-defined, no-any-return]


class Process:
    """A worker whose main thread is in a step with a request on version 1; 2 and 3 are idle."""

    def __init__(self, sock: socket.socket, ours: socket.socket) -> None:
        self.bench = Bench(loras=3)
        self.worker = Worker(sock)
        self.core = self.bench.core
        base = BaseShape("LlamaForCausalLM", 1, 8, 100, {})
        can = EngineCapabilities(base, 60, 3, 8, 1000, 8, 4, "a stand-in")
        self.worker.adopt(Engine(self.core, can, lambda version: None))  # type: ignore[arg-type, return-value]
        self.slow = Slow(self.bench.model)
        self._ours = ours
        self._unpacker = wire.Unpacker()
        self._heard: list[object] = []
        versions = [self.bench.lora(number) for number in (1, 2, 3)]
        self.bench.ask((5,), versions[1], max_tokens=1)
        self.bench.run()  # so that 2 sits in a slot
        self.bench.ask((5,), versions[0], max_tokens=1)
        self.core._model = self.slow

    def next_reply(self) -> wire.Reply:
        """The next answer to a command."""
        while True:
            while self._heard:
                message = self._heard.pop(0)
                if isinstance(message, wire.Reply):
                    return message
            self._heard.extend(self._unpacker.feed(self._ours.recv(1 << 16)))

    def silent(self) -> bool:
        """Whether nothing more was said."""
        self._ours.setblocking(False)
        try:
            return not self._ours.recv(1)
        except BlockingIOError:
            return True
        finally:
            self._ours.settimeout(LIMIT_S)


@contextmanager
def in_a_step() -> Iterator[Process]:
    """Until the step is let go; it must end well."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(LIMIT_S)
        process = Process(theirs, ours)
        thread = Thread(target=process.core.step, daemon=True)
        thread.start()
        try:
            assert process.slow.begun.wait(LIMIT_S)
            yield process
        finally:
            process.slow.let_go.set()
            thread.join(LIMIT_S)
        assert not thread.is_alive()
        (output,) = process.core.take_outputs()
        assert output.finish_reason == "length", output
        process.core.check()


def test_promise_5_an_idle_version_is_removed_while_a_step_computes() -> None:
    with in_a_step() as process:
        process.worker.deliver(wire.RemoveLora(7, EngineId(2)))
        assert process.next_reply() == wire.Reply(7, True)
        assert process.core.host.ids() == {1, 3}
        assert 2 not in process.core.slots.holders()
        assert list(process.bench.device.slots) == [process.core.slots.number_of(EngineId(1))]
        process.worker.deliver(wire.ListLoras(8))
        assert process.next_reply() == wire.Reply(8, frozenset({1, 3}))


def test_a_version_that_a_step_computes_with_is_removed_after_it_and_nothing_overtakes() -> None:
    with in_a_step() as process:
        process.worker.deliver(wire.RemoveLora(7, EngineId(1)))
        process.worker.deliver(wire.RemoveLora(8, EngineId(3)))
        assert process.silent()
        assert process.core.host.ids() == {1, 2, 3}
