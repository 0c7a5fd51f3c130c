"""The embedded engine keeps the contract: a real process, a tiny real model, real adapters."""

from collections.abc import AsyncIterator
from pathlib import Path

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


class EmbeddedRig(Rig):
    """One engine process."""

    def __init__(self, ground: CommonGround) -> None:
        """Small limits, so that they are met; quick time slices, so that tests need not wait."""
        self._ground = ground
        settings = EmbeddedSettings(
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
        self.embedded = EmbeddedEngine(settings)
        self.engine = self.embedded

    def folder(self, sort: int) -> Path:
        """An adapter of the common ground."""
        return self._ground.adapter(SORTS[sort - 1])

    async def crash(self) -> None:
        """As a bug in native code would."""
        child = self.embedded._child
        assert child is not None
        child.kill()


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
