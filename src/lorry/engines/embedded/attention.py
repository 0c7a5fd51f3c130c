"""Attention of a mixed batch over paged keys and values.

The plan of a step (which rows, which blocks, which masks) is made once and used by every layer.
Rows are laid out as

    decode, base | decode, by slot | prefill, by slot | prefill, base

so that decode rows, prefill chunks and each adapter's rows are all plain slices. One layer's cache
is [blocks + 1, block_size, 2 * kv_heads, head_dim], keys first, so one gather brings both. The
block beyond the last is always zero: tables are padded with it, and a block is zeroed before its
first use, so nothing that another sequence left behind, not even a NaN, is ever multiplied into a
row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from lorry.engines.embedded.batch import StepBatch
from lorry.engines.embedded.family import Family

PADDED_BLOCKS_FREE = 16
"""Padding that a decode bucket may carry whatever its size: a further bucket costs six calls a
layer, as much as copying about so many blocks."""
PADDED_SHARE_MAX = 0.25
"""Beyond those, padding may be this share of the bucket."""

CHUNK_ROWS = 4
"""Rows that share each read of a key; as in native/kernels.h."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows [start, stop) of a step that use one LoRA slot."""

    slot: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class DecodeBucket:
    """Decoding sequences of about one length, computed in one padded call."""

    rows: Tensor | None
    """Row indices; None: the first `count` rows in order."""
    count: int
    blocks: Tensor
    """[count * blocks_each]"""
    mask: Tensor
    """[count, 1, 1, blocks_each * block_size], 0 or -inf."""


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Rows [start, stop) of one sequence."""

    start: int
    stop: int
    blocks: Tensor | None
    """None: nothing was computed before this chunk, so its own keys and values are all there
    are."""
    mask: Tensor | None
    """[stop - start, context], 0 or -inf; None: plain causal."""
    context: int


@dataclass(frozen=True, slots=True)
class PagedPlan:
    """The same for a kernel that reads the blocks where they are."""

    tables: Tensor
    """int64, one sequence's blocks after another's."""
    chunks: Tensor
    """int64 [chunks, 4]: first row, rows, positions that the first row sees, place in `tables`.

    A chunk is a few neighbouring rows of one sequence, CHUNK_ROWS at most.
    """


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Everything of a step that does not differ between layers."""

    tokens: Tensor
    """[rows]"""
    positions: Tensor
    """[rows]"""
    last_position: int
    writes: Tensor
    """[rows] Place of each row's key and value, counted over blocks."""
    fresh: Tensor | None
    """Blocks begun and not filled in this step: zeroed first."""
    decode: tuple[DecodeBucket, ...]
    prefill: tuple[PrefillChunk, ...]
    paged: PagedPlan | None
    """In place of `fresh`, `decode` and `prefill`."""
    segments: tuple[Segment, ...]
    """Rows with an adapter, one segment after another, without gaps."""
    logit_rows: Tensor
    """[wanted] in the plan's row order."""


@dataclass(frozen=True, slots=True)
class _Sequence:
    """One sequence of a batch."""

    first: int
    """Its first row in the batch."""
    queries: int
    context: int
    table: Sequence[int]
    slot: int

    @property
    def order(self) -> tuple[int, int]:
        """Sort key that gives the layout drawn above."""
        base = self.slot < 0
        if self.queries == 1:
            return (0, 0) if base else (1, self.slot)
        return (3, 0) if base else (2, self.slot)


class StepPlanner:
    """Makes the plan of each step for one cache."""

    def __init__(
        self,
        block_size: int,
        null_block: int,
        dtype: torch.dtype,
        device: torch.device,
        paged: bool = False,
    ) -> None:
        """`null_block` is the one that is always zero; `paged`: a kernel does the attention."""
        self._paged = paged
        self._size = block_size
        self._null = null_block
        self._dtype = dtype
        self._device = device

    def plan(self, batch: StepBatch) -> StepPlan:
        """Order the rows and fix every index and mask."""
        sequences = sorted(_sequences(batch), key=lambda one: one.order)
        order = [row for one in sequences for row in range(one.first, one.first + one.queries)]
        place = {row: at for at, row in enumerate(order)}
        padded = [] if self._paged else sequences
        fresh = [block for one in padded if (block := self._begun(one)) is not None]
        return StepPlan(
            tokens=self._index([batch.token_ids[row] for row in order]),
            positions=self._index([batch.positions[row] for row in order]),
            last_position=max(batch.positions),
            writes=self._index([at for one in sequences for at in self._places(one)]),
            fresh=self._index(fresh) if fresh else None,
            decode=self._buckets([one for one in padded if one.queries == 1]),
            prefill=self._chunks(padded),
            paged=self._blocks_in_place(sequences) if self._paged else None,
            segments=_segments(sequences),
            logit_rows=self._index([place[row] for row in batch.logit_rows]),
        )

    def _index(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    def _places(self, one: _Sequence) -> list[int]:
        size, table = self._size, one.table
        return [
            table[at // size] * size + at % size
            for at in range(one.context - one.queries, one.context)
        ]

    def _begun(self, one: _Sequence) -> int | None:
        """The block that this step begins and leaves partly empty."""
        full = one.context // self._size
        starts = full * self._size
        if starts == one.context or starts < one.context - one.queries:
            return None
        return one.table[full]

    def _blocks(self, one: _Sequence) -> int:
        return -(-one.context // self._size)

    def _buckets(self, decoding: list[_Sequence]) -> tuple[DecodeBucket, ...]:
        """Longest first; a bucket ends where padding to its longest would cost more than another
        bucket."""
        ranked = sorted(range(len(decoding)), key=lambda row: -self._blocks(decoding[row]))
        buckets: list[list[int]] = []
        padding = 0
        for row in ranked:
            blocks = self._blocks(decoding[row])
            if buckets:
                longest = self._blocks(decoding[buckets[-1][0]])
                padding += longest - blocks
                share = PADDED_SHARE_MAX * longest * (len(buckets[-1]) + 1)
                if padding <= max(PADDED_BLOCKS_FREE, share):
                    buckets[-1].append(row)
                    continue
            buckets.append([row])
            padding = 0
        alone = len(buckets) == 1
        return tuple(self._bucket(decoding, sorted(rows), alone) for rows in buckets)

    def _bucket(self, decoding: list[_Sequence], rows: list[int], alone: bool) -> DecodeBucket:
        members = [decoding[row] for row in rows]
        each = max(self._blocks(one) for one in members)
        blocks: list[int] = []
        for one in members:
            used = one.table[: self._blocks(one)]
            blocks += [*used, *[self._null] * (each - len(used))]
        lengths = self._index([one.context for one in members])
        beyond = torch.arange(each * self._size, device=self._device) >= lengths[:, None]
        mask = torch.zeros(beyond.shape, dtype=self._dtype, device=self._device)
        mask.masked_fill_(beyond, float("-inf"))
        return DecodeBucket(
            rows=None if alone else self._index(rows),
            count=len(rows),
            blocks=self._index(blocks),
            mask=mask[:, None, None, :],
        )

    def _blocks_in_place(self, sequences: list[_Sequence]) -> PagedPlan:
        tables: list[int] = []
        chunks: list[tuple[int, int, int, int]] = []
        row = 0
        for one in sequences:
            for done in range(0, one.queries, CHUNK_ROWS):
                sees = one.context - one.queries + done + 1
                rows = min(CHUNK_ROWS, one.queries - done)
                chunks.append((row + done, rows, sees, len(tables)))
            tables += one.table[: self._blocks(one)]
            row += one.queries
        # The longest first: what is begun last should not take long.
        chunks.sort(key=lambda chunk: -chunk[1] * chunk[2])
        return PagedPlan(self._index(tables), torch.tensor(chunks, dtype=torch.int64))

    def _chunks(self, sequences: list[_Sequence]) -> tuple[PrefillChunk, ...]:
        chunks, start = [], 0
        for one in sequences:
            if one.queries > 1:
                chunks.append(self._chunk(one, start))
            start += one.queries
        return tuple(chunks)

    def _chunk(self, one: _Sequence, start: int) -> PrefillChunk:
        stop = start + one.queries
        if one.context == one.queries:
            return PrefillChunk(start, stop, None, None, one.context)
        mask = torch.full(
            (one.queries, one.context), float("-inf"), dtype=self._dtype, device=self._device
        ).triu_(one.context - one.queries + 1)
        blocks = self._index(list(one.table[: self._blocks(one)]))
        return PrefillChunk(start, stop, blocks, mask, one.context)


def _sequences(batch: StepBatch) -> list[_Sequence]:
    found, first = [], 0
    parts = zip(batch.query_lens, batch.context_lens, batch.block_tables, batch.slots, strict=True)
    for queries, context, table, slot in parts:
        found.append(_Sequence(first, queries, context, table, slot))
        first += queries
    return found


def _segments(sequences: list[_Sequence]) -> tuple[Segment, ...]:
    segments: list[Segment] = []
    start = 0
    for one in sequences:
        stop = start + one.queries
        if one.slot >= 0:
            last = segments[-1] if segments else None
            if last is not None and (last.slot, last.stop) == (one.slot, start):
                segments[-1] = Segment(one.slot, last.start, stop)
            else:
                segments.append(Segment(one.slot, start, stop))
        start = stop
    return tuple(segments)


class Attention:
    """Grouped-query attention of one model; holds no state but sizes."""

    def __init__(self, family: Family) -> None:
        """Sizes of the heads."""
        self._kv_heads = family.kv_heads
        self._group = family.heads // family.kv_heads
        self._dim = family.head_dim
        self._q_size = family.q_size

    def compute(self, plan: StepPlan, qkv: Tensor, cache: Tensor) -> Tensor:
        """[rows, q] from `qkv` [rows, q + k + v], rotated and already written to this layer's
        `cache`."""
        out = torch.empty((qkv.shape[0], self._q_size), dtype=qkv.dtype, device=qkv.device)
        for bucket in plan.decode:
            self._decode(bucket, qkv, cache, out)
        for chunk in plan.prefill:
            out[chunk.start : chunk.stop] = self._prefill(chunk, qkv, cache)
        return out

    def _decode(self, bucket: DecodeBucket, qkv: Tensor, cache: Tensor, out: Tensor) -> None:
        """The query heads that share a key head stand in for query positions, so no key is
        repeated."""
        q = qkv[:, : self._q_size]
        q = q[: bucket.count] if bucket.rows is None else q.index_select(0, bucket.rows)
        q = q.view(bucket.count, self._kv_heads, self._group, self._dim)
        kv = cache.index_select(0, bucket.blocks)
        kv = kv.view(bucket.count, -1, 2 * self._kv_heads, self._dim).transpose(1, 2)
        k, v = kv[:, : self._kv_heads], kv[:, self._kv_heads :]
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=bucket.mask)
        rows = mixed.reshape(bucket.count, self._q_size)
        if bucket.rows is None:
            out[: bucket.count] = rows
        else:
            out.index_copy_(0, bucket.rows, rows)

    def _prefill(self, chunk: PrefillChunk, qkv: Tensor, cache: Tensor) -> Tensor:
        rows = qkv[chunk.start : chunk.stop]
        q = rows[:, : self._q_size].view(1, chunk.stop - chunk.start, -1, self._dim).transpose(1, 2)
        if chunk.blocks is None:
            kv = rows[:, self._q_size :].view(1, -1, 2 * self._kv_heads, self._dim)
        else:
            kv = cache.index_select(0, chunk.blocks)
            kv = kv.view(1, -1, 2 * self._kv_heads, self._dim)[:, : chunk.context]
        kv = kv.transpose(1, 2)
        k, v = kv[:, : self._kv_heads], kv[:, self._kv_heads :]
        mixed = functional.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=chunk.mask,
            is_causal=chunk.mask is None,
            enable_gqa=self._group > 1,
        )
        return mixed.transpose(1, 2).reshape(-1, self._q_size)
