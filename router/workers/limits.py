"""A key's limits in a worker: the conductor keeps count over all workers, and refuses with its placements."""

from __future__ import annotations

from typing import Protocol

from router.accounts import UNLIMITED, Account, Grant, TenantCounts
from router.workers.messages import GrantEnded


class GrantKeeper(Protocol):
    """Passes on which requests of keys with limits begin and end."""

    def entered(self, account: RemoteAccount) -> int:
        """The number of the request's grant."""

    def ended(self, ended: GrantEnded) -> None: ...


class RemoteAccount(Account):
    """``latest_fields`` are the header lines about the limits that came with the last answer.

    Everything is admitted here; a request beyond a limit gets no placement. Only the answers by status are
    counted here, everything else about the tenant where the limits are.
    """

    def __init__(self, name: str, tenant: TenantCounts, keeper: GrantKeeper) -> None:
        super().__init__(name, UNLIMITED, tenant)
        self.latest_fields = ""
        self._keeper = keeper

    def enter(self, now_s: float) -> Grant:
        return RemoteGrant(self, self._keeper)

    def fields(self, now_s: float) -> str:
        return self.latest_fields


class RemoteGrant(Grant):
    __slots__ = ("_keeper", "number")

    def __init__(self, account: RemoteAccount, keeper: GrantKeeper) -> None:
        super().__init__(account)
        self._keeper = keeper
        self.number = keeper.entered(account)

    def take_tokens(self, prompt_tokens: int, now_s: float) -> None:
        """They are taken with the placement."""

    def end(
        self, now_s: float, *, failed: bool, prompt_tokens: int | None, output_tokens: int | None
    ) -> None:
        if not self._ended:
            self._ended = True
            self._keeper.ended(GrantEnded(self.number, failed, prompt_tokens, output_tokens))
