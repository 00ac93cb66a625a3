"""The `smg` policy: cache-aware routing as the Shepherd Model Gateway and SGLang's router do it."""

from __future__ import annotations

import numpy as np

from cache_index import sequence_hashes
from conductor.costs import Ints
from conductor.placement import Hashes
from conductor.policies.candidates import Candidates, Choice, Flags
from conductor.policies.pairing import choose_apart, least_of, requests_of
from conductor.policies.parameters import number, one_of, whole_number
from conductor.policies.routed_prefixes import RoutedPrefixes

_MODES = ("event", "approximate")


class Smg:
    """The rank that has cached most of the prompt; when load is out of balance, the one with fewest requests.

    Source: SMG 1.13, policy `cache_aware` (`model_gateway/src/policies/cache_aware.rs`), with the defaults of
    its command line. Load counts requests. It is out of balance when max - min exceeds ``balance_abs_threshold``
    (64) and max exceeds ``balance_rel_threshold`` (1.5) times min; or when the KV usage of the hottest rank
    exceeds ``overload_token_usage_threshold``, or that of the hottest exceeds the coldest's by more than
    ``balance_token_usage_threshold`` (both 1: off).

    Mode ``event``: the largest overlap, ties to lower load, then to the smaller cache; without any overlap the
    least load. Mode ``approximate``: the rank that a prompt with the longest shared prefix was routed to, if
    that prefix is more than ``cache_threshold`` (0.3) of the prompt; else the least load; a tree of what was
    routed, of ``max_tree_size`` tokens (2^26) a model, forgets least recent leaves first.

    Prefill and decode ranks are chosen by the same rule apart, with trees of their own (`select_pd_pair`).
    Approximated: the size of a rank's cache, which only breaks ties, is its KV usage in tokens; the tree is kept
    in blocks, and its size bounds all ranks together at once rather than each of them once a minute.
    """

    name = "smg"

    def __init__(
        self,
        *,
        mode: str = "event",
        cache_threshold: float = 0.3,
        balance_abs_threshold: int = 64,
        balance_rel_threshold: float = 1.5,
        overload_token_usage_threshold: float = 1.0,
        balance_token_usage_threshold: float = 1.0,
        max_tree_size: int = 67_108_864,
    ) -> None:
        self._approximate = one_of("mode", mode, _MODES) == "approximate"
        self._cache_threshold = number("cache_threshold", cache_threshold, least=0.0, most=1.0)
        self._balance_abs = whole_number("balance_abs_threshold", balance_abs_threshold)
        self._balance_rel = number("balance_rel_threshold", balance_rel_threshold, least=1.0)
        self._overload_usage = number(
            "overload_token_usage_threshold", overload_token_usage_threshold, least=0.0, most=1.0
        )
        self._balance_usage = number(
            "balance_token_usage_threshold", balance_token_usage_threshold, least=0.0, most=1.0
        )
        self._max_tree_size = whole_number("max_tree_size", max_tree_size, least=1)
        self.remembers_prompts = mode == "approximate"  # so that recordings have them
        self._trees: dict[tuple[str, str, int], RoutedPrefixes] = {}

    def choose(self, candidates: Candidates) -> Choice | None:
        c = candidates
        if not self._approximate:
            return choose_apart(c, lambda a: self._by_events(c, a), lambda a: self._by_events(c, a))
        hashes, block_size = _prompt_blocks(c)
        return choose_apart(
            c,
            lambda allowed: self._by_tree(c, allowed, hashes, block_size, "prefill"),
            lambda allowed: self._by_tree(c, allowed, hashes, block_size, "decode"),
        )

    def _by_events(self, c: Candidates, allowed: Flags) -> int:
        requests, overlap = requests_of(c), c.overlap_tokens
        if self._imbalanced(c, requests, allowed) or not overlap[allowed].any():
            return least_of(c, requests)(allowed)
        return least_of(c, -overlap, requests, c.kv_usage * c.kv_capacity_tokens)(allowed)

    def _by_tree(self, c: Candidates, allowed: Flags, hashes: Hashes, block_size: int, leg: str) -> int:
        tree = self._trees.setdefault((c.request.model, leg, block_size), RoutedPrefixes())
        requests, chosen = requests_of(c), None
        if not self._imbalanced(c, requests, allowed):
            blocks, row = tree.match(hashes)
            if blocks * block_size > self._cache_threshold * c.prompt_tokens:
                chosen = next(iter(np.flatnonzero(c.rows == row).tolist()), None)
        if chosen is None or not allowed[chosen]:
            chosen = least_of(c, requests)(allowed)
        tree.insert(hashes, int(c.rows[chosen]), self._max_tree_size // block_size)
        return chosen

    def _imbalanced(self, c: Candidates, requests: Ints, allowed: Flags) -> bool:
        load, usage = requests[allowed], c.kv_usage[allowed]
        most, fewest = int(load.max()), int(load.min())
        hottest, coldest = float(usage.max()), float(usage.min())
        return (
            (most - fewest > self._balance_abs and most > self._balance_rel * fewest)
            or hottest > self._overload_usage
            or hottest - coldest > self._balance_usage
        )


def _prompt_blocks(c: Candidates) -> tuple[Hashes, int]:
    """Sequence hashes of the prompt and their block size; none when only its length is known."""
    request = c.request
    if not len(request.tokens) and request.hashes is not None and request.hashes_block_size:
        return request.hashes, request.hashes_block_size
    if not len(request.tokens):
        return np.empty(0, np.uint64), c.block_size
    return sequence_hashes(request.tokens, c.block_size, cache_salt=request.cache_salt), c.block_size
