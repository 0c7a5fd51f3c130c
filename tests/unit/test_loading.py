"""Progress lines while a model is read."""

from pathlib import Path

import pytest

from lorry.loading import MIB, ModelProgress


def test_a_long_read_is_told_now_and_then_and_at_its_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="lorry.model")
    times = iter([0.0, 1.0, 2.5, 3.0, 4.0])
    progress = ModelProgress(Path("/models/smol"), clock=lambda: next(times))
    for done in (1, 50, 60, 100):
        progress(done * MIB, 100 * MIB)
    assert [record.getMessage() for record in caplog.records] == [
        "Reading the model /models/smol",
        "Read 50 of 100 MiB (50 %)",
        "Read 100 MiB of weights in 4.0 s",
    ]
