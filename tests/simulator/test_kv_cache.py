"""The paged KV cache, by example and against a plain oracle."""

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from simulator import AllBlocksCleared, BlockRemoved, BlockStored, KvCache, KvEvent
from simulator.block_hash import HashChain

SIZE = 2


def chain_of(*blocks: int, salt: str | None = None) -> HashChain:
    """One block of `SIZE` equal tokens per argument, and a token that is always computed."""
    return HashChain([token for block in blocks for token in [block] * SIZE] + [0], SIZE, salt)


def fill(cache: KvCache, chain: HashChain, session_id: str | None = None) -> list[int]:
    """Hold a chain as a request would: hits first, then new blocks."""
    hit = cache.lookup(chain)
    cache.acquire(hit)
    blocks = hit + cache.allocate(chain.usable_blocks() - len(hit))
    for index in range(len(hit), len(blocks)):
        cache.commit(blocks[index], chain, index, session_id)
    return blocks


def apply(residency: Counter[bytes], events: Sequence[KvEvent]) -> None:
    """What a consumer that counts copies believes after these events."""
    for event in events:
        match event:
            case BlockStored(digests):
                residency.update(digests)
            case BlockRemoved(digests):
                residency.subtract(digests)
            case AllBlocksCleared():
                residency.clear()


def test_a_released_chain_is_found_again() -> None:
    cache, chain = KvCache(8, SIZE), chain_of(1, 2, 3)
    blocks = fill(cache, chain)
    cache.release(blocks)
    assert cache.lookup(chain) == blocks
    assert cache.lookup(chain_of(1, 2, 9)) == blocks[:2]
    assert cache.used_blocks == 0


def test_stores_of_a_chain_are_one_event() -> None:
    cache = KvCache(8, SIZE)
    chain = chain_of(1, 2, salt="tenant")
    fill(cache, chain, session_id="s")
    digests = tuple(chain.digests(2))
    assert cache.drain_events() == [BlockStored(digests, None, (1, 1, 2, 2), SIZE, "tenant", "s")]
    assert cache.drain_events() == []


def test_a_continued_chain_names_its_parent_and_no_salt() -> None:
    cache = KvCache(8, SIZE)
    fill(cache, chain_of(1, salt="tenant"))
    cache.drain_events()
    chain = chain_of(1, 2, salt="tenant")
    fill(cache, chain)
    first, second = chain.digests(2)
    assert cache.drain_events() == [BlockStored((second,), first, (2, 2), SIZE)]


def test_eviction_takes_the_tail_of_the_oldest_chain() -> None:
    cache = KvCache(4, SIZE)
    old, new = chain_of(1, 2), chain_of(3, 4)
    cache.release(fill(cache, old))
    cache.release(fill(cache, new))
    cache.drain_events()
    cache.release(cache.allocate(1))
    assert cache.drain_events() == [BlockRemoved((old.digests(2)[1],))]
    assert len(cache.lookup(old)) == 1


def test_copies_of_one_digest_are_stored_and_removed_one_by_one() -> None:
    cache = KvCache(2, SIZE)
    aligned = HashChain([1, 1], SIZE)  # its only block is never usable, so it is computed anew
    for _ in range(2):
        block = cache.allocate(1)
        cache.commit(block[0], aligned, 0)
    digest = aligned.digests(1)[0]
    assert cache.residency() == {digest: 2}
    stored = cache.drain_events()
    assert [event.digests for event in stored if isinstance(event, BlockStored)] == [(digest,), (digest,)]
    cache.release([1])
    cache.allocate(1)
    assert cache.drain_events() == [BlockRemoved((digest,))]
    assert len(cache.lookup(chain_of(1))) == 1


@pytest.mark.parametrize("batch_removals", [False, True])
def test_removals_come_before_stores(batch_removals: bool) -> None:
    cache = KvCache(2, SIZE, batch_removals=batch_removals)
    cache.release(fill(cache, chain_of(1, 2)))
    cache.drain_events()
    fill(cache, chain_of(3, 4))
    kinds = [type(event) for event in cache.drain_events()]
    removed = [BlockRemoved] if batch_removals else [BlockRemoved, BlockRemoved]
    assert kinds == [*removed, BlockStored]


def test_a_store_that_nobody_saw_leaves_no_trace_when_evicted() -> None:
    cache = KvCache(2, SIZE)
    cache.release(fill(cache, chain_of(1, 2)))
    cache.allocate(1)
    events = cache.drain_events()
    assert [type(event) for event in events] == [BlockStored]
    assert events[0] == BlockStored((chain_of(1).digests(1)[0],), None, (1, 1), SIZE)


def test_reset_is_refused_while_blocks_are_in_use() -> None:
    cache, chain = KvCache(4, SIZE), chain_of(1)
    blocks = fill(cache, chain)
    assert not cache.reset()
    cache.release(blocks)
    assert cache.reset()
    assert cache.lookup(chain) == []
    fill(cache, chain)
    assert [type(event) for event in cache.drain_events()] == [AllBlocksCleared, BlockStored]


def test_a_re_reported_hit_is_one_more_store() -> None:
    cache, chain = KvCache(4, SIZE), chain_of(1)
    fill(cache, chain)
    stored = cache.drain_events()
    cache.report_hit(chain, 0)
    assert cache.drain_events() == stored


def test_misuse_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one block"):
        KvCache(0, 16)
    cache = KvCache(1, SIZE)
    block = fill(cache, chain_of(1))[0]
    with pytest.raises(RuntimeError, match="1 blocks wanted, 0 free"):
        cache.allocate(1)
    with pytest.raises(RuntimeError, match="already committed"):
        cache.commit(block, chain_of(2), 0)


class CacheMachine(RuleBasedStateMachine):
    """Random requests; the oracle is a list of (digest, holders) per physical block, kept by hand."""

    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.cache = KvCache(6, SIZE)
        self.believed: Counter[bytes] = Counter()
        self.content: dict[int, bytes] = {}
        self.users: Counter[int] = Counter()

    @rule(
        target=held,
        blocks=st.lists(st.integers(1, 3), max_size=4),
        aligned=st.booleans(),
        salt=st.sampled_from([None, "a"]),
    )
    def start(self, blocks: list[int], aligned: bool, salt: str | None) -> object:
        chain = chain_of(*blocks, salt=salt)
        if aligned and blocks:
            chain.tokens.pop()
        hit = self.cache.lookup(chain)
        self.check_lookup(chain, hit)
        total = len(chain.tokens) // SIZE
        if total - len(hit) + self.cache.evictable(hit) > self.cache.free_blocks:
            return multiple()
        self.cache.acquire(hit)
        new = self.cache.allocate(total - len(hit))
        for index, block in enumerate(new, start=len(hit)):
            assert self.users[block] == 0 and block not in hit
            self.cache.commit(block, chain, index)
            self.content[block] = chain.digests(index + 1)[index]
        self.users.update(hit + new)
        return hit + new

    def check_lookup(self, chain: HashChain, hit: list[int]) -> None:
        longest = 0
        for digest in chain.digests(chain.usable_blocks())[: chain.usable_blocks()]:
            if digest not in self.content.values():
                break
            longest += 1
        assert [self.content[block] for block in hit] == chain.digests(longest)[:longest]

    @rule(blocks=consumes(held))
    def finish(self, blocks: list[int]) -> None:
        self.cache.release(blocks)
        self.users.subtract(blocks)

    @rule()
    def reset(self) -> None:
        if self.cache.reset():
            assert not +self.users
            self.content.clear()

    @rule()
    def publish(self) -> None:
        apply(self.believed, self.cache.drain_events())
        assert dict(+self.believed) == self.cache.residency()
        assert not -self.believed

    @invariant()
    def blocks_agree(self) -> None:
        self.cache.check_invariants()
        assert self.cache.used_blocks == len(+self.users)
        assert dict(Counter(self.content.values())) == self.cache.residency()


CacheMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestCacheAgainstOracle = CacheMachine.TestCase
