"""The host tier behind the device cache: what stays, what it tells, and what orders change."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from simulator import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Engine,
    KvCache,
    PerformanceModel,
    Submission,
)
from simulator.block_hash import HashChain
from simulator.host_tier import HostTier

SIZE = 2


def chain_of(*blocks: int) -> HashChain:
    """One block of two equal tokens per argument, and a token that is always computed."""
    return HashChain([token for block in blocks for token in [block] * SIZE] + [0], SIZE)


def hold(cache: KvCache, chain: HashChain) -> list[int]:
    """Hold a chain as a request would."""
    hit = cache.lookup(chain)
    cache.acquire(hit)
    blocks = hit + cache.allocate(chain.usable_blocks() - len(hit))
    for index in range(len(hit), len(blocks)):
        cache.commit(blocks[index], chain, index)
    return blocks


def test_what_is_computed_is_in_both_tiers_and_told_of_both() -> None:
    cache, chain = KvCache(4, SIZE, host=HostTier(8)), chain_of(1, 2)
    cache.release(hold(cache, chain))
    digests = tuple(chain.digests(2))
    assert cache.drain_events() == [
        BlockStored(digests, None, (1, 1, 2, 2), SIZE),
        BlockStored(digests, None, (1, 1, 2, 2), SIZE, medium="CPU"),
    ]
    cache.release(hold(cache, chain_of(3, 4, 5, 6)))  # the device has no room for more
    events = cache.drain_events()
    assert [e for e in events if isinstance(e, BlockRemoved)] == [
        BlockRemoved((digests[1],)),
        BlockRemoved((digests[0],)),
    ]
    assert cache.host is not None and cache.host.run(chain, 0, 2) == 2
    assert cache.lookup(chain) == []


def test_the_tail_of_the_oldest_chain_goes_first() -> None:
    host = HostTier(4)
    cache = KvCache(8, SIZE, host=host)
    old, new = chain_of(1, 2, 3), chain_of(7, 8)
    cache.release(hold(cache, old))
    cache.release(hold(cache, new))
    assert (host.run(old, 0, 3), host.run(new, 0, 2)) == (2, 2)
    assert len(host) == 4


def test_pinned_blocks_stay_in_either_tier() -> None:
    host = HostTier(4)
    cache = KvCache(4, SIZE, host=host)
    kept = chain_of(1, 2, 3)
    cache.release(hold(cache, kept))
    digests = kept.digests(3)
    assert host.pin(digests) == cache.pin(kept, 0, 3) == 2  # half of the room
    for i in range(3):
        cache.release(hold(cache, chain_of(10 + i, 20 + i)))
    assert cache.held(kept, 3) == host.run(kept, 0, 3) == 2
    assert cache.unpin(kept, 0, 3) == host.unpin(digests) == 2
    cache.check_invariants()
    for i in range(3):
        cache.release(hold(cache, chain_of(30 + i, 40 + i)))
    assert cache.held(kept, 3) == host.run(kept, 0, 3) == 0


def test_blocks_are_placed_and_dropped() -> None:
    cache, chain = KvCache(3, SIZE), chain_of(1, 2, 3, 4)
    assert cache.place(chain, 2) == 2
    assert cache.place(chain, 4) == 3  # there is no room for the last
    assert cache.drop(chain, 1, 4) == 2
    assert cache.held(chain, 4) == 1
    held = hold(cache, chain_of(1, 2))
    assert cache.drop(chain, 0, 2) == 0  # in use
    cache.release(held)
    assert cache.drop_all() == 2
    assert cache.residency() == {}


def test_a_request_loads_what_the_host_has() -> None:
    performance = PerformanceModel(
        "m", 0.01, 0.0, 0.1, 0.0, 0.0, 1.0, host_base_s=0.5, host_s_per_token=0.001
    )
    engine = Engine(performance, KvCache(6, SIZE, host=HostTier(20)))
    prompt = [1, 1, 2, 2, 3, 3, 0]

    def run(name: str, tokens: list[int]) -> tuple[float, int]:
        sequence = engine.submit(Submission(name, tokens, [5]))
        duration_s = engine.schedule(0.0)
        assert duration_s is not None
        engine.finish_step(0.0)
        engine.check_invariants()
        assert sequence.cached_tokens is not None
        return duration_s, sequence.cached_tokens

    assert run("first", prompt) == (pytest.approx(0.1 + 0.07), 0)
    run("others", [9, 9, 8, 8, 7, 7, 6, 6, 4, 4, 0])
    assert engine.cache.lookup(chain_of(1, 2, 3)) == []
    assert run("again", prompt) == (pytest.approx(0.1 + 0.506), 6)


def test_a_host_tier_needs_room() -> None:
    with pytest.raises(ValueError, match="at least one block"):
        HostTier(0)


class TiersMachine(RuleBasedStateMachine):
    """Random requests and orders; events, applied by tier, must always say what the tiers hold."""

    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.host = HostTier(5)
        self.cache = KvCache(6, SIZE, host=self.host)
        self.believed = {"GPU": Counter[bytes](), "CPU": Counter[bytes]()}

    @rule(target=held, blocks=st.lists(st.integers(1, 3), max_size=4))
    def start(self, blocks: list[int]) -> object:
        chain = chain_of(*blocks)
        hit = self.cache.lookup(chain)
        if chain.usable_blocks() - len(hit) + self.cache.evictable(hit) > self.cache.free_blocks:
            return multiple()
        return hold(self.cache, chain)

    @rule(blocks=consumes(held))
    def finish(self, blocks: list[int]) -> None:
        self.cache.release(blocks)

    @rule(blocks=st.lists(st.integers(1, 3), min_size=1, max_size=4), verb=st.integers(0, 7))
    def order(self, blocks: list[int], verb: int) -> None:
        chain, stop = chain_of(*blocks), len(blocks)
        digests = chain.digests(stop)[:stop]
        if verb == 0:
            assert self.cache.place(chain, stop) == self.cache.held(chain, stop)
        elif verb == 1:
            assert self.host.store(chain, 0, stop) <= stop
        elif verb == 2:
            self.cache.drop(chain, 0, stop)
        elif verb == 3:
            self.host.drop(digests)
            assert self.host.run(chain, 0, stop) == 0
        elif verb == 4:
            assert self.cache.pin(chain, 0, stop) <= self.cache.held(chain, stop)
        elif verb == 5:
            self.cache.unpin(chain, 0, stop)
        elif verb == 6:
            assert self.host.pin(digests) <= self.host.run(chain, 0, stop)
        else:
            self.host.unpin(digests)

    @rule()
    def reset(self) -> None:
        if self.cache.reset():
            assert len(self.host) == 0

    @rule()
    def publish(self) -> None:
        for event in self.cache.drain_events():
            match event:
                case BlockStored():
                    self.believed[event.medium].update(event.digests)
                case BlockRemoved(digests, medium):
                    self.believed[medium].subtract(digests)
                case AllBlocksCleared():
                    for tier in self.believed.values():
                        tier.clear()
        assert dict(+self.believed["GPU"]) == self.cache.residency()
        assert dict(+self.believed["CPU"]) == dict.fromkeys(self.host.digests(), 1)
        assert not any(-tier for tier in self.believed.values())

    @invariant()
    def tiers_are_sound(self) -> None:
        self.cache.check_invariants()
        assert len(self.host) <= 5


TiersMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestTiersTellWhatTheyHold = TiersMachine.TestCase
