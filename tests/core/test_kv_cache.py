import pytest
from draftline.core.errors import CapacityError
from draftline.core.kv_cache import BlockPool
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule


class Pool(RuleBasedStateMachine):
    """Random allocations and frees, against a plain set."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(num_blocks=13, block_size=4)
        self.holders: list[list[int]] = []

    @rule(count=st.integers(0, 15))
    def allocate(self, count: int) -> None:
        free = self.pool.num_free
        if count > free:
            with pytest.raises(CapacityError):
                self.pool.allocate(count)
            assert self.pool.num_free == free
        else:
            self.holders.append(self.pool.allocate(count))

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        if self.holders:
            index = data.draw(st.integers(0, len(self.holders) - 1))
            self.pool.free(self.holders.pop(index))

    @rule(data=st.data(), key=st.integers(0, 6))
    def register(self, data: st.DataObject, key: int) -> None:
        held = [block for blocks in self.holders for block in blocks]
        if held:
            self.pool.register(data.draw(st.sampled_from(held)), bytes([key]))

    @rule(first=st.integers(0, 6))
    def share(self, first: int) -> None:
        keys = [bytes([key]) for key in range(first, 7)]
        count, idle = self.pool.num_shared(keys)
        free = self.pool.num_free
        blocks = self.pool.share(keys[:count])
        assert len(blocks) == count
        assert self.pool.num_free == free - idle
        self.holders.append(blocks)

    @invariant()
    def every_block_is_held_as_often_as_it_was_given(self) -> None:
        self.pool.check()
        held = [block for blocks in self.holders for block in blocks]
        assert len(set(held)) == self.pool.num_blocks - self.pool.num_free


TestPool = Pool.TestCase


def test_freeing_twice_is_an_error_of_ours() -> None:
    pool = BlockPool(4, 4)
    blocks = pool.allocate(2)
    pool.free(blocks)
    with pytest.raises(AssertionError):
        pool.free(blocks)


@pytest.mark.parametrize(("slots", "blocks"), [(0, 0), (1, 1), (4, 1), (5, 2)])
def test_blocks_for(slots: int, blocks: int) -> None:
    assert BlockPool(4, 4).blocks_for(slots) == blocks


def test_what_was_let_go_first_is_evicted_first() -> None:
    pool = BlockPool(3, 4)
    blocks = pool.allocate(3)
    for block, key in zip(blocks, (b"0", b"1", b"2"), strict=True):
        pool.register(block, key)
    pool.free(blocks[:1])
    pool.free(blocks[1:])
    assert pool.allocate(1) == blocks[:1]
    assert pool.num_shared([b"0"]) == (0, 0)
    # Of one prefix the end goes before the beginning.
    assert pool.allocate(1) == blocks[2:]
    assert pool.num_shared([b"1", b"2"]) == (1, 1)
    assert pool.share([b"1"]) == blocks[1:2]
    assert pool.num_free == 0
