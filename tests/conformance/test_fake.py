"""The shipped fake keeps the contract of the real engines, on both backends it is used with."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from lorry.engines.fake import FakeEngine
from lorry.engines.fake_script import FakeSettings
from tests.conformance.engine_suite import (
    MAX_CPU_LORAS,
    MAX_LORAS,
    MAX_MODEL_LEN,
    EngineSuite,
    Rig,
)


class FakeRig(Rig):
    """A fake that looks for its adapters on disk."""

    def __init__(self, folder: Path) -> None:
        """Adapters of any sort are the same empty folder: the fake tells them apart by version."""
        self._folder = folder
        settings = FakeSettings(
            max_loras=MAX_LORAS,
            max_cpu_loras=MAX_CPU_LORAS,
            max_model_len=MAX_MODEL_LEN,
            check_paths=True,
        )
        self.fake = FakeEngine(settings)
        self.engine = self.fake

    def folder(self, sort: int) -> Path:
        """One for all."""
        (self._folder / "adapter_config.json").write_text("{}")
        return self._folder

    async def crash(self) -> None:
        """Down and up again at once."""
        self.fake.crash()
        self.fake.restart()


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Both."""
    backend: str = request.param
    return backend


class TestFake(EngineSuite):
    """The suite."""

    @pytest.fixture
    async def rig(self, tmp_path: Path) -> AsyncIterator[Rig]:
        """A new one each time: it costs nothing."""
        rig = FakeRig(tmp_path)
        await rig.engine.start()
        yield rig
        await rig.engine.aclose()

    @pytest.fixture
    def fresh_rig(self, rig: Rig) -> Rig:
        """The same."""
        return rig
