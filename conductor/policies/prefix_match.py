"""The `prefix_match` policy."""

from __future__ import annotations

from conductor.policies.candidates import Candidates, Choice
from conductor.policies.pairing import choose_apart, least_of, requests_of
from conductor.policies.round_robin import Turns


class PrefixMatch:
    """Longest prefix cached on the device, ties by load; decode ranks in turn.

    Source: Mooncake's open example proxy (`mooncake-conductor/example/cache_aware_disagg_proxy.py`, branch
    dev/kv-indexer), which takes the longest match and decodes round robin; that ties go to the least loaded is
    ours. It collapses when every request shares a first block: all of them follow the first one. No parameters.
    """

    name = "prefix_match"

    def __init__(self) -> None:
        self._decode_turns = Turns()

    def choose(self, candidates: Candidates) -> Choice | None:
        c = candidates
        by_match = least_of(c, -c.overlap_tokens, c.pending_tokens, requests_of(c))
        return choose_apart(c, by_match, self._decode_turns)
