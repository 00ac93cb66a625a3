"""Loads from slower tiers and pools, fetches and hand-offs, with numbers that can be worked out by hand.

A token takes 1 ms to prefill and is 1,000 bytes; a block is 10 tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from engine_drive import Drive, Ended, Sent

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
    layers=10,
    chunk_tokens=1_000,
    nic=Speed(4e6, 0.01),
    tiers={Tier.HOST: Speed(2e6, 0.05), Tier.DISK: Speed(5e5, 0.1), Tier.POD: Speed(1e12, 0.0)},
)
LINKS = {distance: Speed(1e9, 0.03) for distance in Distance} | {Distance.ZONE: Speed(1e6, 0.5)}
TIERS = {Tier.HOST: 2_000, Tier.DISK: 4_000}


def instance(
    name: str,
    role: Role = Role.MIXED,
    *,
    kv_tokens: int = 400,
    tiers: Mapping[Tier, int] = {},
    streams: bool = False,
    location: str = "",
    pipeline: int = 1,
    chunk: int = 1_000,
) -> InstanceSpec:
    return InstanceSpec(
        name,
        role,
        replace(SPEEDS, chunk_tokens=chunk),
        kv_tokens,
        tier_tokens=tiers,
        pipeline=pipeline,
        location=location,
        streams_layers=streams,
    )


def cluster(*instances: InstanceSpec, pools: Sequence[PoolSpec] = ()) -> ClusterSpec:
    return ClusterSpec(instances, tuple(pools), links=LINKS)


def request(number: int, arrival_s: float, prompt: int, chain: int, output: int = 1) -> Request:
    first = 1_000 * (chain + 1)
    return Request(
        number, arrival_s, prompt, output, np.arange(first, first + prompt // BLOCK, dtype=np.uint64)
    )


def run(spec: ClusterSpec, *sent: Sent) -> dict[int, Ended]:
    drive = Drive(spec, sent, block_tokens=BLOCK)
    drive.run()
    drive.engines.check_invariants()
    return drive.ended


def flushed(*chains: int) -> list[Sent]:
    """Chains of 10 blocks were computed on engine 0, and then driven out of its device."""
    sent = [Sent(request(100 + chain, 0.0, 101, chain)) for chain in chains]
    return [*sent, Sent(request(99, 5.0, 395, 99))]


@pytest.mark.parametrize(
    ("plan", "expected_s"), [(10, 0.05 + 0.05 + 0.051), (4, 0.05 + 0.02 + 0.111), (0, 0.151)]
)
def test_a_prefill_follows_its_load_and_the_plan_says_how_much(plan: int, expected_s: float) -> None:
    spec = cluster(instance("m0", tiers=TIERS))
    seen = run(spec, *flushed(0), Sent(request(0, 9.0, 151, 0), plan_blocks=plan))[0]
    assert (seen.cached_tokens, seen.loaded[Tier.HOST]) == (10 * plan, 10 * plan)
    assert seen.began_s == 9.0
    assert seen.first_s - 9.0 == pytest.approx(expected_s)


@pytest.mark.parametrize(("plan", "expected_s"), [(10, 0.05 + 0.05), (2, 0.131)])
def test_what_streams_is_loaded_beside_the_compute(plan: int, expected_s: float) -> None:
    spec = cluster(instance("m0", tiers=TIERS, streams=True))
    seen = run(spec, *flushed(0), Sent(request(0, 9.0, 151, 0), plan_blocks=plan))[0]
    assert seen.loaded[Tier.HOST] == 10 * plan
    assert seen.first_s - 9.0 == pytest.approx(expected_s)


def test_what_is_on_the_device_is_not_loaded() -> None:
    spec = cluster(instance("m0", tiers=TIERS))
    first, second = Sent(request(0, 0.0, 101, 0)), Sent(request(1, 1.0, 151, 0), plan_blocks=15)
    seen = run(spec, first, second)[1]
    assert (seen.cached_tokens, seen.loaded[Tier.HOST]) == (100, 0)
    assert seen.first_s - 1.0 == pytest.approx(0.051)


def test_two_loads_share_their_link() -> None:
    sent = [Sent(request(chain, 9.0, 151, chain), plan_blocks=10) for chain in range(2)]
    seen = run(cluster(instance("m0", tiers=TIERS)), *flushed(0, 1), *sent)
    for number in range(2):  # both loaded, they are one step
        assert seen[number].first_s - 9.0 == pytest.approx(0.05 + 2 * 0.05 + 2 * 0.051)


def test_a_load_that_begins_later_slows_the_other_one_from_then_on() -> None:
    sent = [
        Sent(request(0, 9.0, 101, 0), plan_blocks=10),
        Sent(request(1, 9.075, 101, 1), plan_blocks=10),
    ]
    seen = run(cluster(instance("m0", tiers=TIERS)), *flushed(0, 1), *sent)
    # Half of the first is there after 75 ms; the second has the link for itself when the first is through.
    assert seen[0].first_s - 9.0 == pytest.approx(0.075 + 0.05 + 0.001)
    assert seen[1].first_s - 9.0 == pytest.approx(0.125 + 0.05, abs=2e-3)


def test_slower_tiers_are_loaded_from_side_by_side() -> None:
    # The host keeps 20 blocks: it drops the end of the first chain for the second, and the disk has it.
    spec = cluster(instance("m0", tiers={Tier.HOST: 200, Tier.DISK: 4_000}))
    filled = [
        Sent(request(100, 0.0, 101, 0)),
        Sent(request(101, 1.0, 155, 1)),
        Sent(request(99, 5.0, 395, 99)),
    ]
    host_only = replace(
        filled[2], request=msgspec.structs.replace(filled[2].request, hashes=np.empty(0, np.uint64))
    )
    seen = run(spec, *filled[:2], host_only, Sent(request(0, 9.0, 151, 0), plan_blocks=15))[0]
    assert (seen.loaded[Tier.HOST], seen.loaded[Tier.DISK], seen.cached_tokens) == (50, 50, 100)
    assert seen.first_s - 9.0 == pytest.approx(0.1 + 50 * 1_000 / 5e5 + 0.051)


def test_a_prefix_that_the_device_has_stays_in_slower_tiers_too() -> None:
    # The second chain begins like the first, which the device has; the host drops the end of the longer one.
    spec = cluster(instance("m0", tiers={Tier.HOST: 200}))
    filled = [
        Sent(request(100, 0.0, 101, 0)),
        Sent(request(101, 1.0, 151, 0)),
        Sent(request(102, 2.0, 105, 2)),
        Sent(Request(99, 5.0, 395, 1, np.empty(0, np.uint64))),
    ]
    seen = run(spec, *filled, Sent(request(0, 9.0, 151, 0), plan_blocks=15))[0]
    assert seen.loaded[Tier.HOST] == 100


def pool(members: frozenset[str] | None = None) -> PoolSpec:
    return PoolSpec("pool", Tier.POD, 2_000, Speed(2e6, 0.02), members)


def test_a_pool_shares_its_speed_among_all_that_load() -> None:
    spec = cluster(*(instance(f"m{number}") for number in range(3)), pools=[pool()])
    filled = Sent(request(100, 0.0, 101, 0))
    alone = run(spec, filled, Sent(request(0, 9.0, 151, 0), engine=1, plan_blocks=10))[0]
    assert (alone.loaded[Tier.POD], alone.loaded["peer"]) == (100, 0)
    assert alone.first_s - 9.0 == pytest.approx(0.02 + 0.05 + 0.051)
    sent = [Sent(request(number, 9.0, 151, 0), engine=number + 1, plan_blocks=10) for number in range(2)]
    for number, seen in run(spec, filled, *sent).items():
        if number < 2:
            assert seen.first_s - 9.0 == pytest.approx(0.02 + 0.1 + 0.051)


def test_a_pool_is_for_its_members() -> None:
    spec = cluster(*(instance(f"m{number}") for number in range(2)), pools=[pool(frozenset({"m0"}))])
    seen = run(
        spec, Sent(request(100, 0.0, 101, 0)), Sent(request(0, 9.0, 151, 0), engine=1, plan_blocks=10)
    )[0]
    assert (seen.cached_tokens, seen.first_s - 9.0) == (0, pytest.approx(0.151))


def test_an_own_tier_is_nearer_than_a_pool() -> None:
    spec = cluster(instance("m0", tiers={Tier.HOST: 2_000}), pools=[pool()])
    seen = run(spec, *flushed(0), Sent(request(0, 9.0, 101, 0), plan_blocks=10))[0]
    assert (seen.loaded[Tier.HOST], seen.loaded[Tier.POD]) == (100, 0)


def test_a_fetch_takes_the_cards_of_both_and_the_link_between_them() -> None:
    near = [instance(f"m{number}", location=f"s/z/r0/n{number}") for number in range(3)]
    far = instance("m3", location="s/z/r1/n3")
    spec, filled = cluster(*near, far), Sent(request(100, 0.0, 101, 0))

    def fetched(*takers: int) -> list[float]:
        sent = [
            Sent(request(number, 9.0, 101, 0), engine=taker, plan_blocks=10, peer=0)
            for number, taker in enumerate(takers)
        ]
        seen = run(spec, filled, *sent)
        assert all(seen[number].loaded["peer"] == 100 for number in range(len(takers)))
        return [seen[number].first_s - 9.0 - 0.001 for number in range(len(takers))]

    assert fetched(1) == pytest.approx([0.04 + 0.025])  # the cards' 4 MB/s
    assert fetched(1, 2) == pytest.approx([0.04 + 0.05] * 2)  # the giver's card is shared
    assert fetched(3) == pytest.approx([0.51 + 0.1])  # the link's 1 MB/s


def pair(
    *, streams: bool, chunk: int = 1_000, pipeline: int = 1, tiers: Mapping[Tier, int] = {}
) -> ClusterSpec:
    location = "s/z/r0/"
    first = instance(
        "p0",
        Role.PREFILL,
        streams=streams,
        location=f"{location}0",
        chunk=chunk,
        pipeline=pipeline,
        tiers=tiers,
    )
    return cluster(first, instance("d0", Role.DECODE, location=f"{location}1", streams=streams))


def handed_off(spec: ClusterSpec, prompt: int, *, streams: bool) -> Ended:
    return run(spec, Sent(request(0, 0.0, prompt, 0, output=3), decode_engine=1, streams=streams))[0]


@pytest.mark.parametrize("prompt", [100, 200])
def test_a_hand_off_by_layers_leaves_the_last_layer_of_the_last_chunk(prompt: int) -> None:
    whole = handed_off(pair(streams=False, chunk=100), prompt, streams=False)
    assert whole.received_s == pytest.approx(prompt * 1e-3 + 0.04 + prompt * 1_000 / 4e6)
    seen = handed_off(pair(streams=True, chunk=100), prompt, streams=True)
    assert seen.prefilled_s == pytest.approx(prompt * 1e-3)
    assert seen.received_s == pytest.approx(prompt * 1e-3 + 0.1 * 100 * 1_000 / 4e6)
    assert seen.first_s == pytest.approx(seen.received_s + 1e-3)
    assert seen.end_s == pytest.approx(seen.received_s + 3e-3)


def test_a_hand_off_by_layers_over_a_slow_link_is_as_long_as_that_takes() -> None:
    spec = pair(streams=True, chunk=100)
    slow = replace(spec, links={distance: Speed(1e6, 0.03) for distance in Distance})
    seen = handed_off(slow, 200, streams=True)
    assert seen.received_s == pytest.approx(0.04 + 0.2)


def test_a_hand_off_sends_only_what_the_decode_engine_lacks() -> None:
    sent = [Sent(request(number, 9.0 * number, 150, 0), decode_engine=1) for number in range(2)]
    seen = run(pair(streams=False), *sent)[1]
    assert seen.received_s - seen.prefilled_s == pytest.approx(0.04 + 10 * 1_000 / 4e6)


@pytest.mark.parametrize(("stages", "chunks"), [(2, 1), (2, 3), (4, 3)])
def test_chunks_follow_each_other_through_a_pipeline(stages: int, chunks: int) -> None:
    spec = pair(streams=False, chunk=100, pipeline=stages)
    seen = handed_off(spec, 100 * chunks, streams=False)
    assert seen.prefilled_s == pytest.approx(0.1 / stages * (chunks - 1) + 0.1)


def test_a_pipeline_takes_the_next_prompt_before_it_is_through_with_the_last() -> None:
    spec = pair(streams=False, chunk=100, pipeline=2)
    sent = [Sent(request(number, 0.0, 100, number), decode_engine=1) for number in range(2)]
    seen = run(spec, *sent)
    assert [seen[number].began_s for number in range(2)] == pytest.approx([0.0, 0.05])
    assert [seen[number].prefilled_s for number in range(2)] == pytest.approx([0.1, 0.15])


@pytest.mark.parametrize(("prompt", "expected_s"), [(120, 0.1), (60, 0.06)])
def test_a_load_beside_a_pipeline_does_not_hurry_it(prompt: int, expected_s: float) -> None:
    spec = pair(streams=True, pipeline=2, tiers=TIERS)
    filled = [replace(each, decode_engine=1) for each in flushed(0)]
    seen = run(spec, *filled, Sent(request(0, 19.0, prompt, 0), decode_engine=1, plan_blocks=2))[0]
    assert seen.loaded[Tier.HOST] == 20  # takes 60 ms
    assert seen.prefilled_s - 19.0 == pytest.approx(expected_s)


def test_what_streams_in_within_a_step_decodes_from_the_next_one_on() -> None:
    spec = cluster(instance("m0", tiers=TIERS, streams=True))
    slow = replace(spec.instances[0].instance_class, decode_base_s=0.04)
    spec = replace(spec, instances=(replace(spec.instances[0], instance_class=slow),))
    # Decodes of the first take 40 ms each, after its 100 ms; the second is there 100 ms after it was asked for.
    sent = [
        Sent(request(1, 9.0, 100, 1, output=20)),
        Sent(request(0, 9.1, 111, 0, output=11), plan_blocks=10),
    ]
    seen = run(spec, *flushed(0), *sent)
    assert seen[0].first_s == pytest.approx(9.1 + 0.1)
    # Steps end at 9.14 (with its 11 tokens), 9.18, 9.22, 9.26: its next token comes 60 ms after the first one.
    assert seen[0].end_s == pytest.approx(9.26 + 9 * 0.04)
    assert seen[0].tbt_s == pytest.approx(0.06)
    assert seen[1].end_s == pytest.approx(9.1 + 19 * 0.04)
    assert seen[1].tbt_s == pytest.approx(0.04)


def test_what_was_loaded_begins_though_the_last_decode_of_its_engine_was_preempted() -> None:
    # The load is there 100 ms after 9 s, within the step that ends at 9.1005: then the device is full, with 299
    # tokens for what loads and 101 of the decode, which spoke first at 9.0605.
    sent = [
        Sent(request(0, 9.0, 298, 0), plan_blocks=10),
        Sent(request(1, 9.0005, 60, 1, output=60)),
    ]
    seen = run(cluster(instance("m0", tiers=TIERS)), *flushed(0), *sent)
    assert seen[0].loaded[Tier.HOST] == 100
    assert seen[0].first_s == pytest.approx(9.1005 + 0.198)
    # It said 41 tokens, five blocks of its prompt are still there; 18 of its answer follow the next one.
    assert seen[1].preemptions == 1
    assert seen[1].end_s == pytest.approx(9.2985 + 0.051 + 18 * 0.001)


def encoding(codec: Codec, tier: Tier = Tier.HOST, name: str = "m0") -> InstanceSpec:
    plain = instance(name, tiers=TIERS)
    tiers = {**SPEEDS.tiers, tier: replace(SPEEDS.tiers[tier], codec=codec)}
    return replace(plain, instance_class=replace(SPEEDS, name="encoding", tiers=tiers))


@pytest.mark.parametrize(
    ("codec", "load_s"),
    [
        (Codec(4.0, 1e9, 1e9), 0.0125),  # 25 of 100 KB, at 2 MB/s
        (Codec(4.0, 1e9, 5e5), 0.2),  # decoded at 500 KB/s, beside the transfer
        (Codec(1.0, 1.0, 1e9), 0.05),  # encoding is over
    ],
)
def test_a_load_takes_as_long_as_the_slower_of_transfer_and_decoding(codec: Codec, load_s: float) -> None:
    seen = run(cluster(encoding(codec)), *flushed(0), Sent(request(0, 9.0, 151, 0), plan_blocks=10))[0]
    assert seen.loaded[Tier.HOST] == 100
    assert seen.first_s - 9.0 == pytest.approx(0.05 + load_s + 0.051)


def test_loads_of_an_instance_share_its_decoder_and_those_of_others_do_not() -> None:
    codec = Codec(4.0, 1e9, 5e5)
    sent = [Sent(request(chain, 9.0, 151, chain), plan_blocks=10) for chain in range(2)]
    seen = run(cluster(encoding(codec)), *flushed(0, 1), *sent)
    for number in range(2):
        assert seen[number].first_s - 9.0 == pytest.approx(0.05 + 0.4 + 0.102)

    pooled = [encoding(codec, Tier.POD, name) for name in ("m0", "m1")]
    spec = cluster(*(replace(each, tier_tokens={}) for each in pooled), pools=[pool()])
    sent = [Sent(request(n, 9.0, 151, 0), engine=n, plan_blocks=10) for n in range(2)]
    seen = run(spec, *flushed(0), *sent)
    for number in range(2):  # the pool's 2 MB/s are enough for both
        assert seen[number].first_s - 9.0 == pytest.approx(0.02 + 0.2 + 0.051)


def test_a_tier_that_is_written_back_gets_nothing_by_itself() -> None:
    spec = cluster(
        replace(instance("m0", tiers=TIERS), write_back=frozenset({Tier.DISK, Tier.POD})), pools=[pool()]
    )
    drive = Drive(spec, [Sent(request(0, 0.0, 101, 0))], block_tokens=BLOCK)
    drive.run()
    device, host, disk, pod = drive.engines.cached_tokens.tolist()
    assert (device, host, disk, pod) == (100, 100, 0, 0)
    assert drive.engines.tier_traffic()["host"].written_bytes == 100_000
    assert drive.engines.tier_traffic()["disk"].written_bytes == 0
