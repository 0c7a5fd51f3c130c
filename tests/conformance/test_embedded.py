"""The embedded engine keeps the contract: a real process, a tiny real model, real adapters."""

import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lorry.engines.embedded.engine import EmbeddedEngine
from lorry.engines.embedded.settings import EmbeddedSettings
from tests.conformance.engine_suite import (
    MAX_CPU_LORAS,
    MAX_LORAS,
    MAX_MODEL_LEN,
    EngineSuite,
    Rig,
)
from tests.fixtures.common_ground import CommonGround, common_ground

SORTS = ("A", "B", "C", "D", "E", "F")


def settings(ground: CommonGround) -> EmbeddedSettings:
    """Small limits, so that they are met; quick time slices, so that tests need not wait."""
    return EmbeddedSettings(
        model=ground.model,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=16,
        max_num_batched_tokens=64,
        max_loras=MAX_LORAS,
        max_cpu_loras=MAX_CPU_LORAS,
        host_cache_bytes=64 << 20,
        kv_cache_bytes=32 << 20,
        threads=1,
        slot_wait_ms=50,
    )


class EmbeddedRig(Rig):
    """One engine process."""

    def __init__(self, ground: CommonGround, **changes: Any) -> None:
        """`changes` to the settings below."""
        self._ground = ground
        self.embedded = EmbeddedEngine(replace(settings(ground), **changes))
        self.engine = self.embedded

    def folder(self, sort: int) -> Path:
        """An adapter of the common ground."""
        return self._ground.adapter(SORTS[sort - 1])

    async def crash(self) -> None:
        """As a bug in native code would."""
        os.kill(self.pid(), signal.SIGKILL)

    def pid(self) -> int:
        """Of the engine's process."""
        child = self.embedded._child
        assert child is not None and child.process is not None
        return child.process.pid


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """The embedded engine talks to its process through asyncio."""
    return "asyncio"


@pytest.mark.slow
class TestEmbedded(EngineSuite):
    """The suite."""

    @pytest.fixture(scope="module")
    async def rig(self) -> AsyncIterator[Rig]:
        """One process for all tests that leave it whole."""
        rig = EmbeddedRig(common_ground())
        await rig.engine.start()
        yield rig
        await rig.engine.aclose()

    @pytest.fixture
    async def fresh_rig(self) -> AsyncIterator[Rig]:
        """A process for one test."""
        rig = EmbeddedRig(common_ground())
        await rig.engine.start()
        yield rig
        await rig.engine.aclose()
