"""What replicas tell each other of their load: per rank, the sums of what they placed and what has not ended."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from cache_index import Holder
from conductor.cluster import Cluster
from conductor.rank import PlacedElsewhere


class RankLoad(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Of one rank; ``queue_s`` of predicted prefill time is left when it is told."""

    instance: str
    rank: int
    queue_s: float
    prefills: int
    prefill_tokens: int
    decodes: int
    context_tokens: int
    transfers_in: int
    transfers_out: int


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[RankLoad]).decode


def told_load(cluster: Cluster, now_s: float) -> bytes:
    """What this replica has placed; ranks with nothing are left out."""
    return _encode(
        [
            RankLoad(
                instance.instance_id,
                rank.holder.rank,
                rank.queue_s(now_s),
                rank.pending_prefills,
                rank.pending_tokens,
                rank.active_decodes,
                rank.context_tokens,
                rank.transfers_in,
                rank.transfers_out,
            )
            for instance in cluster
            for rank in instance.ranks
            if rank.pending_prefills or rank.active_decodes or rank.transfers_in or rank.transfers_out
        ]
    )


def summed_load(told: Iterable[bytes], now_s: float) -> Mapping[Holder, PlacedElsewhere]:
    """Of all other replicas. Raises msgspec.DecodeError for what no replica of this version tells."""
    sums: dict[Holder, PlacedElsewhere] = {}
    for payload in told:
        for load in _decode(payload):
            holder = Holder(load.instance, load.rank)
            known = sums.get(holder)
            sums[holder] = PlacedElsewhere(
                now_s,
                load.queue_s + (known.queue_s if known else 0.0),
                load.prefills + (known.prefills if known else 0),
                load.prefill_tokens + (known.prefill_tokens if known else 0),
                load.decodes + (known.decodes if known else 0),
                load.context_tokens + (known.context_tokens if known else 0),
                load.transfers_in + (known.transfers_in if known else 0),
                load.transfers_out + (known.transfers_out if known else 0),
            )
    return sums
