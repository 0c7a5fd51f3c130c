"""Drives a decoder as the engine does, in small: sequences with own blocks, any mix of chunks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from lorry.engines.embedded.batch import StepBatch
from lorry.engines.embedded.kernels import isas
from lorry.engines.embedded.lora import AdapterReader
from lorry.engines.embedded.model import Decoder
from lorry.engines.embedded.slots import LoraSlots

BLOCK_SIZE = 4


@dataclass(frozen=True)
class Form:
    """One way to compute the same."""

    name: str
    kernels: str
    """As in `open_kernels`."""
    unit_cost: float = 0.0
    """As in `LoraSlots`; matters without kernels only."""


BY_SEGMENT = Form("torch-by-segment", "torch")
MERGED = Form("torch-merged", "torch", float("inf"))
NATIVE = tuple(Form(isa.name, isa.name) for isa in isas())
"""Every instruction set of this machine."""
MIXED = Form("torch-mixed", "torch", 500.0)
"""Merged where it pays."""
FORMS = (BY_SEGMENT, MERGED, *NATIVE)


@dataclass
class Running:
    """One sequence under way."""

    tokens: list[int]
    slot: int
    table: list[int]
    done: int = 0
    logits: dict[int, Tensor] = field(default_factory=dict)
    """By position."""


class Driver:
    """A decoder, its slots filled with adapters in order, and a block counter."""

    def __init__(
        self,
        model: Path,
        adapters: Mapping[str, Path],
        dtype: str = "float32",
        form: Form = MERGED,
        blocks: int = 512,
    ) -> None:
        """Two threads of kernels, if the form has them."""
        self.decoder = Decoder.load(model, dtype, "cpu", kernels=form.kernels, threads=2)
        self.decoder.allocate_kv(blocks, BLOCK_SIZE)
        shape, kind = self.decoder.shape, self.decoder.dtype
        self.slots = LoraSlots(
            *(len(adapters) or 1, 64, shape, kind, self.decoder.device, form.unit_cost),
            kernels=self.decoder.kernels,
        )
        self.slot_of: dict[str | None, int] = {None: -1}
        reader = AdapterReader(shape, kind, native=self.decoder.kernels is not None)
        for slot, (name, folder) in enumerate(adapters.items()):
            self.slots.put(slot, reader.read(folder))
            self.slot_of[name] = slot
        self.decoder.attach(self.slots)
        self._next_block = 0

    def reset(self) -> None:
        """Hand all blocks out again; what they hold stays, as it does in the engine."""
        self._next_block = 0

    def begin(
        self, tokens: Sequence[int], adapter: str | None, prefix: Running | None = None
    ) -> Running:
        """A sequence; with `prefix`, its full blocks that hold the same tokens are shared."""
        run = Running(list(tokens), self.slot_of[adapter], [])
        if prefix is not None:
            limit = min(len(run.tokens) - 1, prefix.done)
            same = 0
            while same < limit and run.tokens[same] == prefix.tokens[same]:
                same += 1
            shared = same // BLOCK_SIZE
            run.table = prefix.table[:shared]
            run.done = shared * BLOCK_SIZE
        return run

    def step(self, plan: Sequence[tuple[Running, int]]) -> None:
        """Compute `count` more tokens of each sequence, in one batch, and keep all their logits."""
        ids, positions, rows = [], [], []
        for run, count in plan:
            rows += [(run, at) for at in range(run.done, run.done + count)]
            ids += run.tokens[run.done : run.done + count]
            positions += range(run.done, run.done + count)
            run.done += count
            while len(run.table) * BLOCK_SIZE < run.done:
                run.table.append(self._next_block)
                self._next_block += 1
        logits = self.decoder.forward(
            StepBatch(
                token_ids=ids,
                positions=positions,
                query_lens=[count for _, count in plan],
                context_lens=[run.done for run, _ in plan],
                block_tables=[run.table for run, _ in plan],
                slots=[run.slot for run, _ in plan],
                logit_rows=range(len(ids)),
            )
        )
        assert logits.dtype == torch.float32
        for (run, at), row in zip(rows, logits, strict=True):
            run.logits[at] = row

    def greedy(self, runs: Sequence[Running], count: int) -> list[list[int]]:
        """Prefill what is left of each, then decode all together."""
        starts = [len(run.tokens) for run in runs]
        self.step([(run, len(run.tokens) - run.done) for run in runs])
        for _ in range(count - 1):
            self.choose(runs)
            self.step([(run, 1) for run in runs])
        self.choose(runs)
        return [run.tokens[start:] for run, start in zip(runs, starts, strict=True)]

    def choose(self, runs: Sequence[Running]) -> None:
        """Append the greedy token to each."""
        for run in runs:
            run.tokens.append(int(run.logits[run.done - 1].argmax()))


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest logit; 0 where both are 0 throughout."""
    difference = (found - expected).abs().max()
    return float(difference / expected.abs().max()) if difference else 0.0
