"""What every holder has of a prompt: by its engine's own hashes, and by those of LMCache servers.

An engine loads from the LMCache servers of its host, and from the stores that these share: what they have of
a prompt counts for the engine, in the tier where it lies. An engine with LMCache asks it for one contiguous
prefix from the first token on, so the longer of the two prefixes is what it can reuse.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray

from cache_index.hashing import Hashes, Namespace, Tokens
from cache_index.lmcache_directory import LMCacheDirectory
from cache_index.radix import CacheIndex
from cache_index.residency import Holder

Levels = NDArray[np.int32]
Rows = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class _Attachment:
    """Where an engine runs, and the LMCache servers it uses when they are not those of its host."""

    host: str
    servers: frozenset[str]


class PromptMatcher:
    """Matches prompts against the index and, where there is one, an LMCache directory.

    ``match`` may be called from any thread; attachments change on one thread at a time.
    """

    def __init__(self, index: CacheIndex, lmcache: LMCacheDirectory | None = None) -> None:
        self._index = index
        self._lmcache = lmcache
        self._attachments: dict[Holder, _Attachment] = {}
        self._stored_as: dict[str, str] = {}
        self._changes = 0
        self._routes: tuple[tuple[int, int], list[tuple[Rows, Rows]]] = ((-1, -1), [])

    def attach(
        self,
        holder: Holder,
        host: str,
        *,
        servers: frozenset[str] = frozenset(),
        stored_as: Mapping[str, str] | None = None,
    ) -> None:
        """An engine's rank runs on ``host``: it loads from LMCache servers that registered with that address.

        ``servers`` names LMCache instances instead, where addresses differ (containers). ``stored_as`` gives
        for served models the name that LMCache stores them under, the path or repository they were loaded
        from (``root`` of /v1/models). The holder is registered.
        """
        self._index.register(holder)
        self._attachments[holder] = _Attachment(_address(host), servers)
        self._stored_as.update(stored_as or {})
        self._changes += 1

    def detach(self, holder: Holder) -> None:
        """The engine is gone for good; call it before the holder is unregistered."""
        if self._attachments.pop(holder, None) is not None:
            self._changes += 1

    def stored_name(self, model: str) -> str:
        """Under which name LMCache has what is cached of a served model."""
        return self._stored_as.get(model, model)

    def servers_of(self, holder: Holder) -> list[str]:
        """The LMCache servers, by id, that an engine loads from."""
        attachment = self._attachments.get(holder)
        if attachment is None or self._lmcache is None:
            return []
        servers = [server for server, _ in self._lmcache.reach()]
        if attachment.servers:
            return [s.instance_id for s in servers if s.instance_id in attachment.servers]
        return [s.instance_id for s in servers if _address(s.ip) == attachment.host]

    def match(
        self,
        namespace: Namespace,
        tokens: Tokens,
        *,
        cache_salt: str | None = None,
        hashes: Hashes | None = None,
    ) -> Levels:
        """``[holder_id, tier]`` as CacheIndex.match, in blocks of ``namespace``.

        LMCache servers and their shared stores are holders with rows of their own, rounded down to blocks, and
        count for the engines attached to them. ``hashes`` are the prompt's sequence hashes, where the caller
        has them. Without anything of the model in LMCache this costs what CacheIndex.match does.
        """
        if hashes is None:
            return self.match_tokens(namespace, tokens, cache_salt=cache_salt)[1]
        levels = self._index.match(namespace, hashes)
        if self._lmcache is None or not self._lmcache.chunks:
            return levels
        return self._with_lmcache(self._lmcache, levels, namespace, tokens, cache_salt)

    def match_tokens(
        self,
        namespace: Namespace,
        tokens: Tokens,
        *,
        cache_salt: str | None = None,
        known: Hashes | None = None,
    ) -> tuple[Hashes, Levels]:
        """The prompt's sequence hashes, of which the first may be ``known``, and `match`."""
        hashes, levels = self._index.match_tokens(namespace, tokens, cache_salt=cache_salt, known=known)
        if self._lmcache is None or not self._lmcache.chunks:
            return hashes, levels
        return hashes, self._with_lmcache(self._lmcache, levels, namespace, tokens, cache_salt)

    def _with_lmcache(
        self,
        lmcache: LMCacheDirectory,
        levels: Levels,
        namespace: Namespace,
        tokens: Tokens,
        cache_salt: str | None,
    ) -> Levels:
        if namespace.lora is not None:  # LMCache's names leave adapters out
            return levels
        found = lmcache.match(self.stored_name(namespace.model), tokens, salt=cache_salt or "")
        if found is None or not found.any():
            return levels
        return self._merged(levels, found // np.int32(namespace.block_size))

    def _merged(self, levels: Levels, found: Levels) -> Levels:
        rows = min(len(levels), len(found))  # a holder may have been registered meanwhile
        np.maximum(levels[:rows], found[:rows], out=levels[:rows])
        for engines, sources in self._current_routes():
            known = (engines < rows) & (sources < rows)
            into = engines[known]
            levels[into] = np.maximum(levels[into], found[sources[known]])
        return levels

    def _current_routes(self) -> list[tuple[Rows, Rows]]:
        """Rows of engines and of what they load from, no engine twice in one pair of arrays."""
        assert self._lmcache is not None
        state = (self._changes, self._lmcache.version)
        known, routes = self._routes
        if known != state:
            routes = self._make_routes(self._lmcache)
            self._routes = (state, routes)
        return routes

    def _make_routes(self, lmcache: LMCacheDirectory) -> list[tuple[Rows, Rows]]:
        by_address: dict[str, list[Holder]] = {}
        by_name: dict[str, list[Holder]] = {}
        for server, holders in lmcache.reach():
            by_address.setdefault(_address(server.ip), []).extend(holders)
            by_name.setdefault(server.instance_id, []).extend(holders)
        by_engine: list[list[tuple[int, int]]] = []
        for engine, attachment in list(self._attachments.items()):
            named = [holder for name in attachment.servers for holder in by_name.get(name, ())]
            sources = named if attachment.servers else by_address.get(attachment.host, [])
            row, rows = (
                self._index.holder_id(engine),
                [self._index.holder_id(s) for s in dict.fromkeys(sources)],
            )
            if row is not None:
                by_engine.append([(row, source) for source in rows if source is not None])
        return [
            (np.array([row for row, _ in pairs], np.intp), np.array([source for _, source in pairs], np.intp))
            for pairs in ([pair for pair in each if pair is not None] for each in zip_longest(*by_engine))
        ]


def _address(host: str) -> str:
    return "127.0.0.1" if host == "localhost" else host
