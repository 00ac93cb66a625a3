"""What the cache index is told of the cluster's engines, and where to look for what they hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from cache_index import CacheIndex, Holder, Namespace, PromptMatcher
from conductor.cache_lookup import Asked, LookupQuery
from conductor.cluster import Cluster, InstanceState
from conductor.instance_config import InstanceConfig
from conductor.roster import cache_namespace


@dataclass(frozen=True, slots=True)
class _Rank:
    instance_id: str
    rank: int
    row: int


class EngineCaches:
    """Attaches engines to the LMCache servers they use, makes room in the index for what they can hold, and finds
    their ranks for look-ups. Belongs to the event loop.

    ``configured`` gives the instances' configurations, ``aliases`` model names by other names for them.
    """

    def __init__(
        self,
        cluster: Cluster,
        index: CacheIndex,
        prompts: PromptMatcher,
        configured: Callable[[], Iterable[InstanceConfig]],
        aliases: dict[str, str] | None = None,
    ) -> None:
        self._cluster = cluster
        self._index = index
        self._prompts = prompts
        self._configured = configured
        self._aliases = aliases or {}
        self._blocks: dict[str, int] = {}  # that an instance has room for
        self._engines: tuple[int, frozenset[int]] = (-1, frozenset())

    def up(self, instance: InstanceState) -> None:
        """An instance has answered its probe. It may have come back as another one."""
        facts = instance.facts
        if facts is None:
            return
        servers = [c.lmcache_servers for c in self._configured() if c.id == instance.instance_id]
        for rank in instance.ranks:
            self._prompts.attach(
                rank.holder,
                rank.target.host,
                servers=frozenset(*servers),
                stored_as={model.name: model.root for model in facts.models if model.root},
            )
        self._blocks[instance.instance_id] = (facts.kv_capacity_blocks or 0) * len(instance.ranks)
        self._index.expect(sum(self._blocks.values()))

    def left(self, holder: Holder) -> None:
        """A rank leaves the cluster; it is still registered in the index."""
        self._prompts.detach(holder)
        self._blocks.pop(holder.instance_id, None)

    def asked(self, query: LookupQuery) -> Iterator[Asked]:
        """The caches of all instances that serve the model, or its adapter ``lora_name``."""
        model = self._aliases.get(query.model, query.model)
        groups: dict[Namespace, list[_Rank]] = {}
        for instance in self._cluster:
            size = instance.block_size
            if size is None or query.block_size not in (None, size) or not instance.serves(model):
                continue
            namespace = cache_namespace(instance, model, size)
            lora = query.lora_name or namespace.lora
            group = groups.setdefault(replace(namespace, lora=lora, tenant=query.tenant), [])
            for rank in instance.ranks:
                row = self._index.holder_id(rank.holder)
                if row is not None:
                    group.append(_Rank(instance.instance_id, rank.target.rank, row))
        for namespace, ranks in groups.items():
            yield Asked(namespace, ranks)

    def rows(self) -> frozenset[int]:
        """Of all ranks in match results."""
        version, rows = self._engines
        if version != self._cluster.version:
            holders = [rank.holder for instance in self._cluster for rank in instance.ranks]
            rows = frozenset(row for h in holders if (row := self._index.holder_id(h)) is not None)
            self._engines = (self._cluster.version, rows)
        return rows
