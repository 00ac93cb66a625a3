"""Copies between stores, drops and pins, with numbers that can be worked out by hand.

A token takes 1 ms to prefill and is 1,000 bytes; a block is 10 tokens. A request's chain of 10 blocks is computed
at once, and written through to the slower tiers of its engine and to its pools.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from engine_drive import Drive, Sent
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from cache_index import Tier
from conductor.catalogue import LLAMA_8B_H100
from conductor.costs import Codec, Distance, Speed
from conductor.placement import Role
from simulator.cluster import ClusterSpec, InstanceSpec, PoolSpec, Request

BLOCK = 10
SPEEDS = replace(
    LLAMA_8B_H100,
    name="simple",
    prefill_s_per_token=1e-3,
    prefill_s_per_token_squared=0.0,
    prefill_base_s=0.0,
    prefill_s_per_cached_token=0.0,
    decode_base_s=1e-3,
    decode_s_per_sequence=0.0,
    decode_s_per_context_token=0.0,
    kv_bytes_per_token=1_000.0,
    nic=Speed(1e6, 0.01),
    tiers={Tier.HOST: Speed(2e6, 0.05), Tier.DISK: Speed(5e5, 0.1), Tier.REMOTE: Speed(1e6, 0.02)},
)
# Stores by number: device and host of m0, then of m1, then the pool.
DEVICE_0, HOST_0, DEVICE_1, HOST_1, POOL = range(5)
LINKS = {distance: Speed(1e6, 0.03) for distance in Distance}


def request(number: int, arrival_s: float = 0.0, prompt: int = 101) -> Request:
    first = 1_000 * (number + 1)
    return Request(number, arrival_s, prompt, 1, np.arange(first, first + prompt // BLOCK, dtype=np.uint64))


def cluster(host_tokens: int = 2_000, pool_tokens: int = 10_000) -> ClusterSpec:
    def mixed(name: str) -> InstanceSpec:
        return InstanceSpec(name, Role.MIXED, SPEEDS, 400, tier_tokens={Tier.HOST: host_tokens})

    pool = PoolSpec("pool", Tier.REMOTE, pool_tokens, Speed(5e5, 0.01), frozenset({"m0"}))
    return ClusterSpec((mixed("m0"), mixed("m1")), (pool,), links=LINKS)


def computed(*requests: Request, spec: ClusterSpec | None = None) -> Drive:
    """Each was served by m0, one second apart."""
    drive = Drive(spec or cluster(), [Sent(each) for each in requests], block_tokens=BLOCK)
    drive.run()
    return drive


def blocks_of(drive: Drive, store: int) -> int:
    return int(drive.engines.cached_tokens[store]) // BLOCK


@pytest.mark.parametrize(
    ("source", "target", "expected_s"),
    [
        (DEVICE_0, HOST_1, 0.03 + 0.01 + 0.1),  # the link's latency and the card's, 100 KB at 1 MB/s
        (POOL, HOST_1, 0.01 + 0.02 + 0.2),  # the pool's 500 KB/s
    ],
)
def test_a_copy_takes_what_its_links_say(source: int, target: int, expected_s: float) -> None:
    one = request(0)
    drive = computed(one)
    begun_s = drive.now_s
    assert drive.copy(7, one, source, target, 10) == 10
    drive.wait(begun_s + 9)
    ended_s, blocks = drive.copied[7]
    assert (ended_s - begun_s, blocks) == (pytest.approx(expected_s), 10)
    assert blocks_of(drive, HOST_1) == 10
    drive.engines.check_invariants()


@pytest.mark.parametrize(
    ("codec", "down_s", "up_s"),
    [
        (Codec(5.0, 1e9, 1e9), 0.04, 0.04),  # 20 of 100 KB at the pool's 500 KB/s
        (Codec(5.0, 2e5, 4e5), 0.5, 0.25),
    ],
)
def test_a_copy_is_encoded_on_its_way_down_and_decoded_on_its_way_up(
    codec: Codec, down_s: float, up_s: float
) -> None:
    kind = replace(
        SPEEDS, tiers={**SPEEDS.tiers, Tier.REMOTE: replace(SPEEDS.tiers[Tier.REMOTE], codec=codec)}
    )
    plain = cluster()
    m0, m1 = (replace(each, instance_class=kind) for each in plain.instances)
    spec = replace(plain, instances=(replace(m0, write_back=frozenset({Tier.REMOTE})), m1))
    one = request(0)
    drive = computed(one, spec=spec)
    assert blocks_of(drive, POOL) == 0
    for number, (source, target, expected_s) in enumerate(((HOST_0, POOL, down_s), (POOL, HOST_1, up_s))):
        begun_s = drive.now_s
        assert drive.copy(number, one, source, target, 10) == 10
        drive.engines.check_invariants()
        drive.wait(begun_s + 9)
        assert drive.copied[number][0] - begun_s == pytest.approx(0.01 + 0.02 + expected_s)
    traffic = drive.engines.tier_traffic()["remote"]
    assert (traffic.carried_bytes, traffic.written_bytes) == (pytest.approx(40_000), pytest.approx(20_000))


def test_copies_of_an_instance_share_its_encoder() -> None:
    codec = Codec(5.0, 2e5, 4e5)
    kind = replace(
        SPEEDS, tiers={**SPEEDS.tiers, Tier.REMOTE: replace(SPEEDS.tiers[Tier.REMOTE], codec=codec)}
    )
    plain = cluster()
    instances = [
        replace(each, instance_class=kind, write_back=frozenset({Tier.REMOTE})) for each in plain.instances
    ]
    pool = replace(plain.pools[0], members=None)
    drive = computed(
        request(0), request(1, 1.0), spec=replace(plain, instances=tuple(instances), pools=(pool,))
    )
    begun_s = drive.now_s
    drive.copy(1, request(0), HOST_0, POOL, 10)
    drive.copy(2, request(1), HOST_0, POOL, 10)
    drive.engines.check_invariants()
    drive.wait(begun_s + 9)
    assert [drive.copied[n][0] - begun_s for n in (1, 2)] == pytest.approx([1.03, 1.03])


def test_a_copy_that_is_given_up_carried_what_it_had_moved() -> None:
    one = request(0)
    drive = computed(one)
    drive.copy(1, one, POOL, HOST_1, 10)
    drive.wait(drive.now_s + 0.03 + 0.1)  # half of it
    drive.kill(1)
    assert drive.engines.tier_traffic()["remote"].carried_bytes == pytest.approx(50_000)


def test_what_was_copied_is_told_and_loaded_by_the_next_request() -> None:
    one = request(0)
    again = structs.replace(one, number=1, arrival_s=50.0, prompt_tokens=101)
    drive = Drive(cluster(), [Sent(one), Sent(again, engine=1, plan_blocks=10)], block_tokens=BLOCK)
    drive.run(until_s=10.0)
    drive.engines.changes()
    drive.copy(7, one, HOST_0, HOST_1, 10)
    drive.wait(20.0)
    changes = drive.engines.changes()
    assert changes is not None
    ((store, stored, start, stop, first),) = changes.rows.tolist()
    assert (store, stored, first) == (HOST_1, 1, start)
    assert changes.chains[start:stop].tolist() == one.hashes.tolist()
    assert drive.run()[1].loaded[Tier.HOST] == 100


def test_two_copies_share_a_link_and_only_what_lacks_is_moved() -> None:
    one, other = request(0), request(1, 1.0)
    drive = computed(one, other)
    begun_s = drive.now_s
    drive.copy(1, one, HOST_0, HOST_1, 10)
    drive.copy(2, other, HOST_0, HOST_1, 10)
    drive.wait(begun_s + 9)
    assert [round(drive.copied[n][0] - begun_s, 6) for n in (1, 2)] == [0.24, 0.24]
    assert drive.copy(3, one, HOST_0, HOST_1, 10) == 0
    drive.wait(begun_s + 10)
    assert drive.copied[3][1] == 10


def test_a_copy_of_what_the_source_lost_meanwhile_says_so() -> None:
    one = request(0)
    drive = computed(one)
    drive.copy(1, one, HOST_0, HOST_1, 10)
    assert drive.engines.discard(HOST_0, drive.load(one), 4, 10) == 6
    drive.wait(drive.now_s + 9)
    assert drive.copied[1][1] == 4
    assert blocks_of(drive, HOST_1) == 4
    assert drive.copy(2, one, HOST_0, HOST_1, 10, start=5) == -1


def test_a_dead_instance_takes_its_copies_along() -> None:
    one, other = request(0), request(1, 1.0)
    drive = computed(one, other)
    drive.copy(1, one, HOST_0, HOST_1, 10)
    drive.copy(2, other, POOL, HOST_1, 10)
    drive.kill(0)
    drive.wait(drive.now_s + 9)
    assert set(drive.copied) == {2}
    assert blocks_of(drive, HOST_1) == 10
    drive.engines.check_invariants()
    drive.copy(3, one, POOL, HOST_0, 10)  # its row and its flow are free again
    drive.wait(drive.now_s + 9)
    assert drive.copied[3][1] == 10


def test_blocks_in_use_are_not_dropped() -> None:
    one = request(0, prompt=301)
    drive = Drive(cluster(), [Sent(structs.replace(one, output_tokens=50))], block_tokens=BLOCK)
    drive.run(until_s=0.31)
    assert drive.engines.discard(DEVICE_0, drive.load(one), 0, 30) == 0
    drive.run()
    assert drive.engines.discard(DEVICE_0, drive.load(one), 0, 30) == 30


def test_pinned_blocks_stay_and_may_fill_a_tier() -> None:
    one = request(0)
    drive = computed(one, spec=cluster(host_tokens=100))  # ten blocks
    load = drive.load(one)
    assert drive.engines.pin(HOST_0, load, 0, 10) == 10
    drive.engines.check_invariants()
    other = request(1, drive.now_s)
    drive = computed(one, request(1, 1.0), spec=cluster(host_tokens=100))
    assert drive.engines.pin(HOST_0, drive.load(one), 0, 10) == 0  # the other's are there
    assert drive.engines.pin(HOST_0, drive.load(other), 0, 10) == 10
    drive.copy(1, one, POOL, HOST_0, 10)
    drive.wait(drive.now_s + 9)
    assert drive.copied[1][1] == 0  # there is no room
    assert drive.engines.unpin(HOST_0, drive.load(other), 0, 10) == 10
    drive.copy(2, one, POOL, HOST_0, 10)
    drive.wait(drive.now_s + 9)
    assert drive.copied[2][1] == 10
    drive.engines.check_invariants()


def test_a_dead_instance_has_nothing_pinned() -> None:
    one = request(0)
    drive = computed(one)
    drive.engines.pin(HOST_0, drive.load(one), 0, 10)
    drive.kill(0)
    assert blocks_of(drive, HOST_0) == 0
    drive.engines.check_invariants()


@pytest.mark.parametrize("target", [DEVICE_1, POOL])
def test_copies_that_have_no_link_are_refused(target: int) -> None:
    one = request(0)
    with pytest.raises(ValueError, match="copy"):
        computed(one).copy(1, one, POOL, target, 10)


MANY = [request(number, 0.1 * number) for number in range(8)]
STORES = st.sampled_from([DEVICE_0, HOST_0, HOST_1, POOL])


@settings(max_examples=60, deadline=None)
@given(
    orders=st.lists(
        st.tuples(
            st.sampled_from(["copy", "drop", "pin", "unpin", "kill"]),
            st.integers(0, 7),
            STORES,
            st.sampled_from([HOST_0, HOST_1, POOL]),
            st.integers(0, 9),
            st.floats(0.0, 0.2),
        ),
        max_size=40,
    )
)
def test_no_store_or_link_is_ever_over_its_capacity(
    orders: list[tuple[str, int, int, int, int, float]],
) -> None:
    drive = Drive(
        cluster(host_tokens=150, pool_tokens=300), [Sent(each) for each in MANY], block_tokens=BLOCK
    )
    for number, (what, which, source, target, start, pause_s) in enumerate(orders):
        one = MANY[which]
        match what:
            case "copy" if source != target and not (source == target == POOL):
                drive.copy(number, one, source, target, 10, start)
            case "drop":
                drive.engines.discard(source, drive.load(one), start, 10)
            case "pin":
                drive.engines.pin(target, drive.load(one), start, 10)
            case "unpin":
                drive.engines.unpin(target, drive.load(one), start, 10)
            case "kill":
                drive.kill(which % 2)
        until_s = drive.now_s + pause_s
        drive.run(until_s)
        drive.wait(until_s)
        drive.engines.check_invariants()
    drive.run()
    drive.wait(drive.now_s + 60)
    assert drive.engines.idle
    drive.engines.check_invariants()
    assert all(0 <= blocks <= 10 for _, blocks in drive.copied.values())
