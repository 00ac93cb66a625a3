"""What requests of one worker were granted of their keys' limits, where the limits are kept."""

from __future__ import annotations

from dataclasses import dataclass

from router.accounts import Account, Grant
from router.api_keys import KeyRing, unknown_key
from router.errors import RequestError
from router.refusals import AnsweredError
from router.workers.messages import Enter, GrantEnded, MessageError


@dataclass(slots=True)
class _Entered:
    account: Account | None  # None: of a key that is not known here
    grant: Grant | None = None
    refusal: RequestError | None = None
    charged: bool = False


class WorkerGrants:
    """Of requests under way, by the worker's numbers."""

    def __init__(self, keys: KeyRing | None) -> None:
        self._keys = keys
        self._entered: dict[int, _Entered] = {}

    def __len__(self) -> int:
        return len(self._entered)

    def enter(self, message: Enter, now_s: float) -> None:
        """Count a request in, or remember why it may not be. Raises MessageError for one that is in already.

        A router may have begun with keys that are no longer here since this process was started again.
        """
        if message.grant in self._entered:
            raise MessageError(f"grant {message.grant} of the key {message.key!r} was entered before")
        account = None if self._keys is None else self._keys.accounts.get(message.key)
        entered = self._entered[message.grant] = _Entered(account)
        try:
            if account is not None:
                entered.grant = account.enter(now_s)
            elif self._keys is not None:
                raise unknown_key()
        except RequestError as error:
            entered.refusal = error

    def check(self, grant: int, prompt_tokens: int | None, now_s: float) -> None:
        """Raises AnsweredError for a request that is beyond a limit; ``prompt_tokens`` are taken once."""
        entered = self._find(grant)
        if entered is None:
            return
        if entered.grant is not None and prompt_tokens is not None and not entered.charged:
            entered.charged = True
            try:
                entered.grant.take_tokens(prompt_tokens, now_s)
            except RequestError as error:
                entered.refusal = error
        if entered.refusal is not None:
            raise AnsweredError(entered.refusal)

    def fields(self, grant: int, now_s: float) -> str:
        """The header lines of its response about the limits of its key."""
        entered = self._entered.get(grant)
        return "" if entered is None or entered.account is None else entered.account.fields(now_s)

    def end(self, message: GrantEnded, now_s: float) -> None:
        """Raises MessageError for an unknown grant."""
        entered = self._find(message.grant)
        if entered is None:
            raise MessageError("grant 0 ended")
        del self._entered[message.grant]
        if entered.grant is not None:
            entered.grant.end(
                now_s,
                failed=message.failed,
                prompt_tokens=message.prompt_tokens,
                output_tokens=message.output_tokens,
            )

    def end_all(self, now_s: float) -> None:
        """The worker is gone."""
        for grant in list(self._entered):
            self.end(GrantEnded(grant, True, None, None), now_s)

    def _find(self, grant: int) -> _Entered | None:
        """None for 0. Raises MessageError."""
        if grant and grant not in self._entered:
            raise MessageError(f"grant {grant} was never entered, or has ended")
        return self._entered.get(grant)
