"""KV blocks are reused by equal keys only, and given away oldest first."""

from lorry.engines.embedded.blocks import BlockPool, BlockTable, child_key, root_key


def run(pool: BlockPool, tokens: list[int], version: str | None = "v", salt: str = "") -> int:
    """A request from beginning to end; returns how many tokens came from the cache."""
    table = BlockTable(version, salt)
    cached = pool.match(table, tokens)
    assert pool.grow(table, len(tokens))
    pool.settle(table, tokens, len(tokens))
    pool.release(table)
    return cached


def test_a_prefix_is_found_again_but_never_the_whole_prompt() -> None:
    pool = BlockPool(10, 4)
    tokens = list(range(8))
    assert run(pool, tokens) == 0
    assert run(pool, tokens) == 4
    assert run(pool, [*tokens, 9]) == 8
    assert run(pool, [0, 1, 2, 99, 4, 5, 6, 7]) == 0


def test_promise_2_version_and_salt_are_part_of_the_key() -> None:
    pool = BlockPool(20, 4)
    tokens = list(range(9))
    assert run(pool, tokens, "v") == 0
    assert run(pool, tokens, "w") == 0
    assert run(pool, tokens, None) == 0
    assert run(pool, tokens, "v", salt="s") == 0
    assert run(pool, tokens, "v") == 8


def test_promise_2_no_salt_can_stand_for_a_version() -> None:
    keys = {root_key(None, "version v"), root_key("v", ""), root_key("", "v"), root_key(None, "v")}
    keys |= {root_key("v s", ""), root_key("v", "s"), root_key("version v", "")}
    assert len(keys) == 7


def test_a_key_depends_on_all_tokens_before_it() -> None:
    one = child_key(child_key(root_key("v", ""), [1]), [2])
    assert one != child_key(child_key(root_key("v", ""), [3]), [2])
    assert one == child_key(child_key(root_key("v", ""), [1]), [2])


def test_the_least_recently_used_cached_block_goes_first() -> None:
    pool = BlockPool(4, 4)
    run(pool, [1] * 8)
    run(pool, [2] * 8)
    run(pool, [3] * 4)
    assert run(pool, [2] * 9) == 8
    assert run(pool, [1] * 9) == 0


def test_a_block_in_use_is_shared_and_never_given_away() -> None:
    pool = BlockPool(3, 4)
    first, second = BlockTable("v"), BlockTable("v")
    tokens = [1] * 5
    assert pool.grow(first, 5)
    pool.settle(first, tokens, 5)
    assert pool.match(second, tokens) == 4
    assert pool.count_of(first.blocks[0]) == 2
    assert pool.grow(second, 5)
    assert not pool.grow(BlockTable("w"), 1)
    pool.release(first)
    assert pool.count_of(second.blocks[0]) == 1
    pool.check()


def test_promise_3_a_dropped_version_is_found_no_more_and_its_room_is_free() -> None:
    pool = BlockPool(4, 4)
    run(pool, [1] * 9, "v")
    run(pool, [1] * 4, "w")
    assert pool.statistics()["cached"] == 3
    assert pool.drop("v") == 2
    assert pool.statistics() == {"free": 3, "cached": 1, "used": 0, "all": 4}
    assert run(pool, [1] * 9, "v") == 0
    assert run(pool, [1] * 5, "w") == 4


def test_a_version_dropped_while_in_use_leaves_nothing_behind() -> None:
    pool = BlockPool(4, 4)
    table = BlockTable("v")
    assert pool.grow(table, 8)
    pool.settle(table, [1] * 8, 8)
    pool.drop("v")
    pool.release(table)
    assert pool.statistics()["cached"] == 0
    pool.check()


def test_equal_blocks_computed_twice_are_cached_once() -> None:
    pool = BlockPool(4, 4)
    tables = [BlockTable("v"), BlockTable("v")]
    for table in tables:
        assert pool.grow(table, 4)
    for table in tables:
        pool.settle(table, [1] * 4, 4)
    for table in tables:
        pool.release(table)
    assert pool.statistics()["cached"] == 1
    pool.check()


def test_without_reuse_nothing_is_cached() -> None:
    pool = BlockPool(4, 4, reuse=False)
    assert run(pool, [1] * 9) == 0
    assert run(pool, [1] * 9) == 0
    assert pool.statistics()["cached"] == 0
