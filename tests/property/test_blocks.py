"""Whatever happens to the block pool, its books are right and no KV meets a stranger."""

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lorry.engines.embedded.blocks import BlockPool, BlockTable

BLOCKS, SIZE = 12, 4


class Pool(RuleBasedStateMachine):
    """Sequences come, compute, grow and go; versions are dropped. `content` remembers what each
    block's KV was computed from, as the real cache does by holding it."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(BLOCKS, SIZE)
        self.running: list[tuple[BlockTable, list[int], int]] = []
        self.content: dict[int, tuple[Any, ...]] = {}

    @rule(
        version=st.sampled_from([None, "a", "b", "None"]),
        salt=st.sampled_from(["", "a", "s"]),
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=20),
    )
    def place(self, version: str | None, salt: str, tokens: list[int]) -> None:
        table = BlockTable(version, salt)
        before = self.pool.available
        cached = self.pool.match(table, tokens)
        assert cached % SIZE == 0
        assert cached < len(tokens), "at least one prompt token is computed anew"
        for index, block in enumerate(table.blocks):
            assert self.content[block] == (version, salt, tuple(tokens[: (index + 1) * SIZE]))
        if not self.pool.grow(table, len(tokens)):
            self.pool.release(table)
            assert self.pool.available == before
            return
        for block in table.blocks[cached // SIZE :]:
            assert self.pool.count_of(block) == 1, "a block that will be written is shared"
            self.content.pop(block, None)
        self.compute(table, tokens, cached)
        self.running.append((table, tokens, len(tokens)))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), token=st.integers(0, 1))
    def decode(self, data: st.DataObject, token: int) -> None:
        index = data.draw(st.integers(0, len(self.running) - 1))
        table, tokens, computed = self.running[index]
        if not self.pool.grow(table, len(tokens) + 1):
            return
        tokens = [*tokens, token]
        for block in table.blocks[computed // SIZE :]:
            assert self.pool.count_of(block) == 1, "a block that will be written is shared"
        self.compute(table, tokens, computed)
        self.running[index] = (table, tokens, len(tokens))

    def compute(self, table: BlockTable, tokens: list[int], start: int) -> None:
        for index in range(start // SIZE, len(tokens) // SIZE):
            whole = (table.version, table.salt, tuple(tokens[: (index + 1) * SIZE]))
            self.content[table.blocks[index]] = whole
        self.pool.settle(table, tokens, len(tokens))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.running) - 1))
        table, _, _ = self.running.pop(index)
        self.pool.release(table)
        assert not table.blocks

    @rule(version=st.sampled_from([None, "a", "b"]))
    def drop(self, version: str | None) -> None:
        self.pool.drop(version)
        probe = BlockTable(version, "")
        assert self.pool.match(probe, [0] * 20) == 0

    @invariant()
    def books_are_right(self) -> None:
        self.pool.check()
        counts = dict.fromkeys(range(BLOCKS), 0)
        for table, _, _ in self.running:
            assert len(set(table.blocks)) == len(table.blocks)
            for block in table.blocks:
                counts[block] += 1
        assert counts == {block: self.pool.count_of(block) for block in range(BLOCKS)}
        assert self.pool.used == sum(count > 0 for count in counts.values())
        assert sum(self.pool.statistics()[k] for k in ("free", "cached", "used")) == BLOCKS


Pool.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPool = Pool.TestCase
