"""Who owns which KV block, and which finished blocks can be used again. Pure accounting: no torch.

Rules:

1. A block is in exactly one of three states: *free* (nothing worth keeping), *cached* (finished,
   known by its key, used by nobody) or *used* (by as many tables as its count says).
2. A key is the hash chain of everything the block's KV depends on: the version (None: the base),
   the caller's salt, and all tokens up to the block's end. Equal keys mean equal KV; a version or
   salt that differs makes every key differ (promise 2).
3. Only full blocks get a key, and at least one prompt token is always computed anew, because its
   logits are wanted.

    free --take--> used --give back, without key--> free
                   used --give back, with key----> cached --found by key--> used
                                                   cached --room needed, or version dropped--> free
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

Key = bytes

KEY_BYTES = 16
"""A collision would mix two requests' KV; at 2**-128 it is not worth a comparison of tokens."""


def root_key(version: str | None, salt: str) -> Key:
    """Where a chain begins. The lengths keep ("a", "bc") apart from ("ab", "c")."""
    text = "base" if version is None else f"version {version}"
    return hashlib.blake2b(f"{len(text)} {text} {salt}".encode(), digest_size=KEY_BYTES).digest()


def child_key(parent: Key, tokens: Sequence[int]) -> Key:
    """The key of the block that holds `tokens` after the block (or root) of key `parent`."""
    return hashlib.blake2b(parent + array("i", tokens).tobytes(), digest_size=KEY_BYTES).digest()


@dataclass(slots=True)
class BlockTable:
    """The blocks of one sequence, in order, and the chain of keys of those that are full."""

    version: str | None
    salt: str = ""
    blocks: list[int] = field(default_factory=list)
    keys: list[Key] = field(default_factory=list)
    """Of the first `len(keys)` blocks; grows as blocks fill up."""


class BlockPool:
    """All blocks of one engine. Cached blocks count as available: they go, oldest use first."""

    def __init__(self, blocks: int, block_size: int, *, reuse: bool = True) -> None:
        """`blocks` blocks of `block_size` tokens; without `reuse` nothing is ever cached."""
        self.blocks = blocks
        self.block_size = block_size
        self.reuse = reuse
        self._free = list(range(blocks - 1, -1, -1))
        self._counts = [0] * blocks
        self._keys: dict[int, Key] = {}
        self._by_key: dict[Key, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._owners: dict[int, str | None] = {}

    @property
    def available(self) -> int:
        """Blocks that can be taken now."""
        return len(self._free) + len(self._cached)

    @property
    def used(self) -> int:
        """Blocks that some table holds."""
        return self.blocks - self.available

    def blocks_for(self, tokens: int) -> int:
        """How many blocks hold so many tokens."""
        return -(-tokens // self.block_size)

    def match(self, table: BlockTable, tokens: Sequence[int]) -> int:
        """Fill an empty table with the known prefix of `tokens`; returns its length in tokens."""
        if not self.reuse:
            return 0
        size = self.block_size
        key = root_key(table.version, table.salt)
        for start in range(0, (len(tokens) - 1) // size * size, size):
            key = child_key(key, tokens[start : start + size])
            block = self._by_key.get(key)
            if block is None:
                break
            self._cached.pop(block, None)
            self._counts[block] += 1
            table.blocks.append(block)
            table.keys.append(key)
        return len(table.blocks) * size

    def grow(self, table: BlockTable, tokens: int) -> bool:
        """Make room for `tokens` tokens in all; False, and nothing taken, when it is not there."""
        need = self.blocks_for(tokens) - len(table.blocks)
        if need > self.available:
            return False
        for _ in range(need):
            table.blocks.append(self._take())
        return True

    def settle(self, table: BlockTable, tokens: Sequence[int], computed: int) -> None:
        """Name the blocks that are full now that the KV of the first `computed` tokens is there.

        A key that another block already has stays with that block; this one is freed in its time.
        """
        if not self.reuse:
            return
        size = self.block_size
        for index in range(len(table.keys), computed // size):
            parent = table.keys[-1] if table.keys else root_key(table.version, table.salt)
            key = child_key(parent, tokens[index * size : (index + 1) * size])
            table.keys.append(key)
            block = table.blocks[index]
            if key not in self._by_key:
                self._by_key[key] = block
                self._keys[block] = key
                self._owners[block] = table.version

    def release(self, table: BlockTable) -> None:
        """Give all blocks back; the table is empty then. The last block becomes the oldest."""
        for block in reversed(table.blocks):
            self._counts[block] -= 1
            if self._counts[block]:
                continue
            if block in self._keys:
                self._cached[block] = None
            else:
                self._free.append(block)
        table.blocks.clear()
        table.keys.clear()

    def drop(self, version: str | None) -> int:
        """Forget the version's cached blocks: KV whose adapter is gone is useless.

        Blocks in use lose their key and are freed when given back. Returns how many lost it.
        """
        lost = [block for block, owner in self._owners.items() if owner == version]
        for block in lost:
            self._forget(block)
            if block in self._cached:
                del self._cached[block]
                self._free.append(block)
        return len(lost)

    def check(self) -> None:
        """Raise `AssertionError` when a block is in two states or none, or a key is not its own."""
        free, cached = set(self._free), set(self._cached)
        used = {block for block, count in enumerate(self._counts) if count}
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & cached and not free & used and not cached & used, "two states"
        assert free | cached | used == set(range(self.blocks)), "a block is in no state"
        assert cached <= self._keys.keys(), "a cached block has no key"
        assert not free & self._keys.keys(), "a free block has a key"
        assert {key: block for block, key in self._keys.items()} == self._by_key, "keys disagree"
        assert self._owners.keys() == self._keys.keys(), "a key has no owner"

    def statistics(self) -> dict[str, int]:
        """Blocks by state."""
        cached = len(self._cached)
        return {"free": len(self._free), "cached": cached, "used": self.used, "all": self.blocks}

    def count_of(self, block: int) -> int:
        """How many tables hold the block."""
        return self._counts[block]

    def _take(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            self._forget(block)
        self._counts[block] = 1
        return block

    def _forget(self, block: int) -> None:
        del self._by_key[self._keys.pop(block)]
        del self._owners[block]
