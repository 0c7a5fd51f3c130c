"""Progress while a model is read: a line in the log now and then, for terminals and files."""

import logging
import time
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger("lorry.model")

PAUSE_S = 2.0
"""Between two lines: small models get one line only, large ones a sign of life."""

MIB = 1024**2


class ModelProgress:
    """Called with (done, total) in bytes; at most one line per `PAUSE_S`, and one at the end."""

    def __init__(self, model: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Says at once which model it is going to be."""
        self._clock = clock
        self._began = self._last = clock()
        log.info("Reading the model %s", model)

    def __call__(self, done: int, total: int) -> None:
        """Note how far the reading is."""
        now = self._clock()
        if done >= total:
            log.info("Read %.0f MiB of weights in %.1f s", total / MIB, now - self._began)
        elif now - self._last >= PAUSE_S:
            self._last = now
            log.info("Read %.0f of %.0f MiB (%d %%)", done / MIB, total / MIB, 100 * done // total)
