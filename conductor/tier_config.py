"""Configuration of tier actions: who carries them out, and what they may take of links and memory."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from cache_index.lmcache_keys import CHUNK_TOKENS
from conductor.action_ledger import LedgerLimits
from conductor.link_budgets import Direction, Link, LinkBudget, LinkBudgets

Positive = Annotated[float, Field(gt=0)]
Url = Annotated[str, Field(pattern=r"^https?://[^*\s/]+$")]

_LIMITS = LedgerLimits()


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class LMCacheServersConfig(_Section):
    """LMCache's servers. Those that register with us need no ``urls``; ``coordinator_url`` is LMCache's own."""

    urls: dict[str, Url] = {}
    coordinator_url: Url | None = None
    world_size: Annotated[int, Field(ge=1, le=255)] = 1


class LMCacheControllerConfig(_Section):
    """LMCache's classic controller; ``instances`` are its instance ids by ours."""

    url: Url
    instances: Annotated[dict[str, str], Field(min_length=1)]
    chunk_tokens: Annotated[int, Field(gt=0)] = CHUNK_TOKENS
    compression: str = "cachegen"


class MooncakePoolConfig(_Section):
    """A Mooncake store of ``shared_pools``. With ``master`` (host:port of its RPC) keys are copied, too."""

    admin_url: Url | None = None
    key_format: str = "0x{:016x}"
    master: Annotated[str | None, Field(pattern=r"^[^*\s/]+:\d+$")] = None
    host: str = "127.0.0.1"
    protocol: str = "tcp"
    device: str = ""

    @model_validator(mode="after")
    def _format_takes_a_number(self) -> MooncakePoolConfig:
        try:
            differ = self.key_format.format(1) != self.key_format.format(2)
        except (IndexError, KeyError, ValueError):
            differ = False
        if not differ:
            raise ValueError(
                f"key_format {self.key_format!r} must have one place for a number, as '0x{{:016x}}' has"
            )
        return self


class ExecutorsConfig(_Section):
    """What carries tier actions out; of several that can, the first in this order.

    ``emulated`` names configured instances that are emulated engines with a host tier.
    """

    emulated: list[str] = []
    lmcache_servers: LMCacheServersConfig | None = None
    lmcache_controller: LMCacheControllerConfig | None = None
    mooncake: dict[str, MooncakePoolConfig] = {}
    dry_run: bool = False


class BudgetConfig(_Section):
    """Of one direction of a holder's link: a rate, what may come at once, and what may be under way."""

    bytes_per_s: Positive | None = None
    burst_bytes: Annotated[float, Field(ge=0)] = 0.0
    concurrent_bytes: Positive | None = None

    def budget(self) -> LinkBudget:
        return LinkBudget(self.bytes_per_s, self.burst_bytes, self.concurrent_bytes)


class LinkBudgetConfig(BudgetConfig):
    """The budget of one link instead of the common one."""

    instance: Annotated[str, Field(min_length=1)]
    direction: Direction


class CapacityConfig(_Section):
    """How much KV a tier of an instance has room for, where nothing evicts to make room."""

    instance: Annotated[str, Field(min_length=1)]
    tier: Literal["device", "host", "disk", "pod", "remote"]
    bytes: Positive


class TiersConfig(_Section):
    """Bounds of tier actions. ``timeout_s`` is that of one attempt."""

    budget: BudgetConfig = BudgetConfig()
    budgets: list[LinkBudgetConfig] = []
    capacities: list[CapacityConfig] = []
    timeout_s: Positive = _LIMITS.timeout_s
    max_running: Annotated[int, Field(ge=1)] = _LIMITS.max_running
    max_waiting: Annotated[int, Field(ge=1)] = _LIMITS.max_waiting
    history: Annotated[int, Field(ge=0)] = _LIMITS.history

    @model_validator(mode="after")
    def _one_budget_a_link(self) -> TiersConfig:
        links = [(each.instance, each.direction) for each in self.budgets]
        twice = next((link for link in links if links.count(link) > 1), None)
        if twice is not None:
            raise ValueError(f"budgets: {twice[0]} ({twice[1]}) is listed more than once")
        return self

    def link_budgets(self) -> LinkBudgets:
        own = {Link(each.instance, each.direction): each.budget() for each in self.budgets}
        return LinkBudgets(self.budget.budget(), own)

    def limits(self) -> LedgerLimits:
        return LedgerLimits(
            timeout_s=self.timeout_s,
            max_running=self.max_running,
            max_waiting=self.max_waiting,
            history=self.history,
        )
