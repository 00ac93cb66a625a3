"""Which slower tier a full one hands down to: raw or encoding, by what loads and copies take, coding included."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
from cluster_factory import BLOCK, make_scheduler
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_index import CacheIndex, Holder, Namespace, Tier
from conductor.actions import ActionKind, Place, Prefix
from conductor.catalogue import LLAMA_8B_H100
from conductor.costs import Codec, Speed
from conductor.tier_planner.compression import WayDown, ways_down
from conductor.tier_planner.contents import SiteContents
from conductor.tier_planner.link_demand import LEAST_PRICE, LinkDemand
from conductor.tier_planner.outlook import Outlook
from conductor.tier_planner.prefix_tree import PrefixTree, Segment
from conductor.tier_planner.retention import FullSite, make_room
from conductor.tier_planner.returns import Returns, Visit
from conductor.tier_planner.sites import Site, Sites
from conductor.tier_planner.track_record import TrackRecord

NAMESPACE = Namespace("llama", BLOCK)
HOST, DISK, POOL = (
    Place(Holder("m0"), Tier.HOST),
    Place(Holder("m0"), Tier.DISK),
    Place(Holder("pool"), Tier.REMOTE),
)
KV_BYTES = 100_000.0
S_PER_TOKEN = 1e-4  # raw KV is computed at 1 GB/s
BLOCKS, BEFORE = 100, 50
TOKENS = BLOCKS * BLOCK
PREFIX = Prefix(NAMESPACE, np.arange(1, BEFORE + BLOCKS + 1, dtype=np.uint64))
NOW_S = 1_000.0


class Full:
    """A host tier with a prompt of two segments, which comes back every ten seconds, and slower tiers behind it."""

    def __init__(
        self,
        disk: Speed | None = None,
        pool: Speed | None = None,
        *,
        members: frozenset[str] | None = None,
        takes: Iterable[Place] = (DISK, POOL),
    ) -> None:
        tiers = {Tier.HOST: Speed(50e9, 0.0)}
        tiers |= {} if disk is None else {Tier.DISK: disk}
        tiers |= {} if pool is None else {Tier.REMOTE: pool}
        kind = replace(
            LLAMA_8B_H100,
            name="simple",
            kv_bytes_per_token=KV_BYTES,
            prefill_s_per_token=S_PER_TOKEN,
            prefill_s_per_token_squared=0.0,
            tiers=tiers,
        )
        self.index = CacheIndex()
        cluster = make_scheduler("m", index=self.index, instance_class=kind).cluster
        self.index.register(POOL.holder)
        self.index.store(*HOST, NAMESPACE, PREFIX.hashes)
        self.host = Site(HOST, 10 * len(PREFIX.hashes) * BLOCK, frozenset({"m0"}))
        sites = [self.host]
        if disk is not None:
            sites.append(Site(DISK, 1_000_000, frozenset({"m0"})))
        if pool is not None:
            sites.append(Site(POOL, 1_000_000, members))
        returns, tree = Returns(), PrefixTree()
        for second in range(0, int(NOW_S), 10):
            tree.use(Prefix(NAMESPACE, PREFIX.hashes[:BEFORE]), float(second))
            returns.observe([Visit(PREFIX, float(second))])
            self.path = tree.use(PREFIX, float(second))
        targets = frozenset(takes)
        self.outlook = Outlook(
            *(cluster, self.index, lambda prefix, stop: self.index.match(NAMESPACE, prefix.hashes[:stop])),
            *(Sites(cluster, sites), tree, returns, LinkDemand(), TrackRecord()),
            lambda kind, source, target: kind is ActionKind.DEMOTE and target in targets,
        )

    @property
    def last(self) -> Segment:
        return self.path[-1]

    def ways(self) -> list[WayDown]:
        return ways_down(self.outlook, self.host, self.last, BLOCKS, NOW_S)


def test_an_encoding_pool_wins_where_the_link_holds_loads_up() -> None:
    raw, encoding = Speed(2e9, 0.0), Speed(1e9, 0.0, Codec(8.0, 5e9, 16e9))
    best, next_best = Full(disk=raw, pool=encoding).ways()
    assert (best.site.place, best.ratio) == (POOL, 8.0)
    assert (next_best.site.place, next_best.ratio) == (DISK, 1.0)
    tokens = (BEFORE + BLOCKS) * BLOCK  # with what the pool lacks of the beginning
    assert best.start == 0
    assert best.compute_s == pytest.approx(tokens * S_PER_TOKEN)
    assert best.load_s == pytest.approx(tokens * KV_BYTES / 8e9)
    assert best.copy_s == pytest.approx(tokens * KV_BYTES / 5e9), "the encoder is slower than the link"
    assert best.chance == pytest.approx(1.0, abs=0.01)
    assert best.benefit_s == pytest.approx(best.chance * (best.compute_s - best.load_s))
    assert best.cost_s == pytest.approx(LEAST_PRICE * best.copy_s)
    assert next_best.start == BEFORE, "the beginning is as near for what is behind the host itself"
    assert next_best.load_s == pytest.approx(TOKENS * KV_BYTES / 2e9)


@pytest.mark.parametrize(
    ("codec", "best"),
    [
        (Codec(8.0, 8e9, 8e9), POOL),
        (Codec(8.0, 8e9, 1.5e9), DISK),  # decoding takes longer than the disk
        (Codec(8.0, 2e9, 8e9), POOL),  # encoding is slow, but nobody waits for it
        (Codec(8.0, 1e8, 8e9), DISK),  # and it has its price
    ],
)
def test_slow_coding_counts(codec: Codec, best: Place) -> None:
    full = Full(disk=Speed(4e9, 0.0), pool=Speed(1e9, 0.0, codec))
    full.index.store(*POOL, NAMESPACE, PREFIX.hashes[:BEFORE])  # so that both lack as much
    assert full.ways()[0].site.place == best


def test_a_pool_does_not_win_by_the_beginning_that_it_lacks() -> None:
    """It would be given more, of which each block gains less."""
    best, next_best = Full(disk=Speed(3e9, 0.0), pool=Speed(2e9, 0.0)).ways()
    assert (best.site.place, next_best.site.place) == (DISK, POOL)
    assert next_best.benefit_s - next_best.cost_s > best.benefit_s - best.cost_s


def test_what_computes_faster_than_it_loads_is_not_handed_down() -> None:
    assert Full(disk=Speed(0.5e9, 0.0)).ways() == []
    assert Full(disk=Speed(0.5e9, 0.0, Codec(4.0, 1e9, 0.9e9))).ways() == []
    assert len(Full(disk=Speed(0.5e9, 0.0, Codec(4.0, 1e9, 4e9))).ways()) == 1


def test_what_a_slower_tier_has_already_is_not_handed_to_another() -> None:
    full = Full(disk=Speed(5e9, 0.0), pool=Speed(5e9, 0.0))
    assert len(full.ways()) == 2
    full.index.store(*POOL, NAMESPACE, PREFIX.hashes)
    assert full.ways() == []


def test_a_tier_that_takes_nothing_is_no_choice() -> None:
    (only,) = Full(disk=Speed(5e9, 0.0), pool=Speed(50e9, 0.0), takes=(DISK,)).ways()
    assert only.site.place == DISK


def test_the_order_says_what_was_chosen_and_why() -> None:
    full = Full(disk=Speed(2e9, 0.0), pool=Speed(1e9, 0.0, Codec(8.0, 5e9, 16e9)))
    held = SiteContents(0)
    held.put(full.path, 0.0)
    site = replace(full.host, capacity_tokens=len(PREFIX.hashes) * BLOCK)
    (order,) = make_room(full.outlook, [FullSite(site, held, len(PREFIX.hashes))], BLOCK, NOW_S)
    assert (order.kind, order.source, order.target) == (ActionKind.DEMOTE, HOST, POOL)
    assert (order.start, order.stop) == (0, BEFORE + BLOCKS)
    assert order.kv_bytes == (BEFORE + BLOCKS) * BLOCK * KV_BYTES
    assert "pool/remote lacks it and keeps it encoded to 1/8, loads and decodes in 30.0 ms" in order.reason
    assert "240.0 ms to compute" in order.reason
    assert "ms a block more than m0/disk" in order.reason


@settings(max_examples=60, deadline=None)
@given(
    rate=st.floats(1e8, 1e11),
    ratio=st.floats(1.0, 10.0),
    encode=st.floats(1e8, 1e12),
    decode=st.floats(1e8, 1e12),
)
def test_a_codec_pays_only_by_the_link(rate: float, ratio: float, encode: float, decode: float) -> None:
    """With the same link, what is encoded never loads faster than by its ratio, nor than its decoder."""
    (raw,) = Full(pool=Speed(rate, 0.0)).ways() or [None]
    (encoded,) = Full(pool=Speed(rate, 0.0, Codec(ratio, encode, decode))).ways() or [None]
    if encoded is not None:
        tokens = (BEFORE + BLOCKS) * BLOCK
        assert encoded.load_s * min(rate * ratio, decode) == pytest.approx(tokens * KV_BYTES)
        assert encoded.copy_s * min(rate * ratio, encode) == pytest.approx(tokens * KV_BYTES)
        assert encoded.gain_s > 0.0
    if raw is not None and decode >= rate * ratio and encode >= rate * ratio:
        assert encoded is not None and encoded.gain_s >= raw.gain_s - 1e-12
