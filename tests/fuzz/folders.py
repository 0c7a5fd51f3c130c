"""Mangled adapter folders: each is refused, with a 4xx that names the adapter and the cause, or
accepted and then computes what transformers + PEFT compute from the same folder."""

import copy
import shutil
import signal
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from huggingface_hub import constants
from peft import PeftModel
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from lorry.artifacts import folder as folder_module
from lorry.artifacts.cache import DiskCache
from lorry.artifacts.snapshot import Snapshot
from lorry.errors import LorryError
from tests.fixtures.adapters import HEAD_WIDTH, HIDDEN, MLP, TINY_BASE
from tests.fuzz.recipes import write
from tests.golden.driver import Driver, relative_error

NAME = "fuzzed"
RANK_MOST = 16
LIMIT_S = 20
"""For one folder; a pipe in the place of a file must not hold anybody."""
TOLERANCE = 1e-3
"""Of the largest logit, in float32."""
TOKENS = tuple(range(3, 13))

WIDER: dict[str, str] = {
    "rename_all": "names as other programs write them",
    "shard": "weights in several files, which PEFT does not read",
    "rename_a_tensor": "a name as another program writes it",
}
"""Changes after which PEFT may refuse, or ignore, what we serve; its answer for our snapshot, which
is in PEFT's own form, must be ours then."""


@dataclass(slots=True)
class Figures:
    """What some folders came to."""

    folders: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    """By code."""
    equal: int = 0
    """Accepted, and compared with PEFT."""
    wider: int = 0
    """Accepted where PEFT does not read the folder, and compared by way of the snapshot."""
    infinite: int = 0
    """Accepted, and the numbers leave what float32 holds, with PEFT too."""
    worst: float = 0.0
    findings: list[str] = field(default_factory=list)

    def add(self, other: "Figures") -> None:
        """Take another's figures in."""
        self.folders += other.folders
        self.refused += other.refused
        self.equal += other.equal
        self.wider += other.wider
        self.infinite += other.infinite
        self.worst = max(self.worst, other.worst)
        self.findings += other.findings

    def __str__(self) -> str:
        accepted = self.equal + self.wider + self.infinite
        return (
            f"{self.folders} folders: {self.refused.total()} refused "
            f"({', '.join(f'{n} {code}' for code, n in self.refused.most_common())}), "
            f"{accepted} accepted ({self.equal} compared with PEFT, {self.wider} by way of the "
            f"snapshot, {self.infinite} beyond float32 in both), "
            f"worst difference {self.worst:.1e}, {len(self.findings)} findings"
        )


class TookTooLong(Exception):
    """A folder held the judge up."""


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raise `TookTooLong` where it is after so long."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise TookTooLong(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


class Judge:
    """The disk cache, the embedded engine's computation, and PEFT, on one tiny model."""

    def __init__(self, place: Path) -> None:
        """Everything is written below `place`."""
        torch.manual_seed(0)
        logging.disable_progress_bar()
        config = LlamaConfig(
            vocab_size=TINY_BASE.vocab_size,
            hidden_size=HIDDEN,
            intermediate_size=MLP,
            num_hidden_layers=TINY_BASE.layers,
            num_attention_heads=HIDDEN // HEAD_WIDTH,
            num_key_value_heads=1,
            head_dim=HEAD_WIDTH,
            tie_word_embeddings=False,
            initializer_range=0.3,
        )
        self._model = LlamaForCausalLM(config).eval()
        self._model.save_pretrained(place / "model")
        self._place = place
        self._cache = DiskCache(place / "cache", None)

    def judge(self, seed: int, figures: Figures) -> None:
        """One folder."""
        folder = self._place / "folder"
        changes = write(seed, folder)
        figures.folders += 1
        found: str | None
        try:
            with limited(LIMIT_S):
                found = self._judge(folder, changes, figures)
        except Exception:  # noqa: BLE001 - whatever else comes out is a finding
            found = traceback.format_exc(limit=-4)
        if found is not None:
            figures.findings.append(f"folder {seed} ({', '.join(changes)}): {found}")
        shutil.rmtree(folder)

    def _judge(self, folder: Path, changes: list[str], figures: Figures) -> str | None:
        try:
            snapshot = self._cache.snapshot(NAME, folder, TINY_BASE, RANK_MOST)
        except LorryError as error:
            figures.refused[error.code] += 1
            return objection(error)
        try:
            return self._compare(folder, snapshot, changes, figures)
        finally:
            self._cache.release(snapshot.manifest.version)
            self._cache.remove(snapshot.manifest.version)

    def _compare(
        self, folder: Path, snapshot: Snapshot, changes: list[str], figures: Figures
    ) -> str | None:
        ours = self._ours(snapshot.path)
        theirs, complaint = self._peft(folder)
        wider = complaint is not None and any(change in WIDER for change in changes)
        if wider:
            theirs, complaint = self._peft(snapshot.path)
        if theirs is None or complaint is not None:
            return f"accepted, but PEFT says: {complaint}"
        if not theirs.isfinite().all():
            figures.infinite += 1
            return None
        error = relative_error(ours, theirs)
        figures.worst = max(figures.worst, error)
        figures.wider += wider
        figures.equal += not wider
        return None if error <= TOLERANCE else f"accepted, but differs from PEFT by {error:.3g}"

    def _ours(self, snapshot: Path) -> torch.Tensor:
        """Logits of the embedded engine's computation, [tokens, vocab]."""
        driver = Driver(self._place / "model", {NAME: snapshot}, blocks=8)
        run = driver.begin(TOKENS, NAME)
        driver.step([(run, len(TOKENS))])
        return torch.stack([run.logits[at] for at in range(len(TOKENS))])

    def _peft(self, folder: Path) -> tuple[torch.Tensor | None, str | None]:
        """PEFT's logits, and what it complained of."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                model: Any = PeftModel.from_pretrained(copy.deepcopy(self._model), str(folder))
            except Exception as error:  # noqa: BLE001 - any refusal of PEFT's
                return None, f"{type(error).__name__}: {str(error)[:300]}"
        missing = [str(one.message) for one in caught if "adapter keys" in str(one.message)]
        with torch.no_grad():
            logits = model.eval()(torch.tensor([TOKENS])).logits[0]
        return logits, missing[0][:300] if missing else None


def objection(error: LorryError) -> str | None:
    """What is wrong with a refusal: it is the caller's fault, and names the adapter and a cause."""
    said = " ".join((error.message, *error.details))
    if not 400 <= error.status < 500:
        return f"{error.status} {error.code}: {said}"
    if NAME not in said or len(error.message) < len(NAME) + 20:
        return f"the refusal does not name the adapter and the cause: {said}"
    return None


def run(seeds: range) -> Figures:
    """Judge them one after the other."""
    figures = Figures()
    quick = Path("/dev/shm")  # many small files: memory will do
    place = Path(tempfile.mkdtemp(prefix="lorry-fuzz-", dir=quick if quick.is_dir() else None))
    settled, folder_module.SETTLE_S = folder_module.SETTLE_S, 0.0  # nobody writes meanwhile
    # PEFT would look for missing files on the hub.
    offline, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        judge = Judge(place)
        for seed in seeds:
            judge.judge(seed, figures)
    finally:
        folder_module.SETTLE_S, constants.HF_HUB_OFFLINE = settled, offline
        with suppress(OSError):
            shutil.rmtree(place)
    return figures
