"""Where should this request go? Asked by posting the request itself, as an engine would get it, behind ``/pick``.

For proxies that send requests on themselves and can ask over HTTP. The answer names the engine in header fields,
which a script reads without JSON, and in its body.
"""

from __future__ import annotations

import asyncio
from typing import Final

import orjson
from msgspec.structs import replace

from conductor.placement import Placement, PlacementRequest
from router.delivery import Delivery
from router.errors import RequestError
from router.exchange import Exchange
from router.picks import Pick, request_headers

PREFIX: Final = b"/pick"
_GATEWAY: Final = "http"  # in metrics


class PickDelivery(Delivery):
    """Delivers where to send the request, instead of a response to it."""

    _naming: asyncio.Task[None] | None = None
    _pick: Pick | None = None

    def _asked(self) -> PlacementRequest:
        return replace(super()._asked(), streamed=False)  # nobody tells when its prefill ends

    def placed(self, placement: Placement) -> None:
        if placement.disaggregated and not self._request.endpoint.generates:
            placement = replace(placement, decode=placement.prefill)  # nothing to hand over
        self.placement = placement
        self.attempts = 1
        self._pick = self.services.picks.begin(placement) if placement.placement_id else None
        try:
            self._begin(placement)
            self._count(placement)
            if placement.model != self._request.model:
                self._give_back()
                self._exchange.reply_error(_alias(self._request.model, placement.model))
                return
            addresses = self.services.picks.addresses
            if addresses.known(placement.decode) and addresses.known(placement.prefill):
                self._answer(placement)
            else:
                self._naming = asyncio.get_running_loop().create_task(self._look_up(placement))
        except Exception:
            self.fail_unexpectedly()

    async def _look_up(self, placement: Placement) -> None:
        addresses = self.services.picks.addresses
        try:
            for target in (placement.decode, placement.prefill):
                if await addresses.of(target) is None:
                    self._give_back()
                    self._exchange.reply_error(_no_address(target.host))
                    return
            self._answer(placement)
        except Exception:
            self.fail_unexpectedly()

    def _answer(self, placement: Placement) -> None:
        addresses = self.services.picks.addresses
        host, _, port = (addresses.known(placement.decode) or "").rpartition(":")
        prefill = addresses.known(placement.prefill) if placement.disaggregated else None
        headers = request_headers(placement, prefill)
        document = {
            "host": host.strip("[]"),
            "port": int(port),
            "request_headers": headers,
            "placement_id": placement.placement_id or None,
            "ends_in_s": None if self._pick is None else round(self._pick.predicted_s, 3),
        }
        lines = [f"x-conductor-host: {host.strip('[]')}\r\nx-conductor-port: {port}\r\n"]
        lines += [f"x-conductor-set-{name}: {value}\r\n" for name, value in headers.items()]
        if self._pick is not None:
            self._pick.ends_as_predicted()
        self._exchange.reply(200, orjson.dumps(document), fields="".join(lines))

    def _give_back(self) -> None:
        if self._pick is not None:
            self._pick.cancelled()

    def stop(self, reason: str) -> bool:
        super().stop(reason)
        if self._naming is not None:
            self._naming.cancel()
            self._give_back()
        return False


class PickExchange(Exchange):
    """Ends with the answer; what was placed ends later, when it is told of or as predicted."""

    __slots__ = ()

    delivery_kind = PickDelivery

    def _count_answer(self, model: str, duration_s: float) -> None:
        self.services.picks.made[_GATEWAY, self.head.endpoint, self.status] += 1


def _alias(alias: str, model: str) -> RequestError:
    message = (
        f"The engines know {alias!r} as {model!r}, and who asks for a pick sends the request on as it is. Ask for "
        f"{model!r}, or let the engines serve it under both names."
    )
    return RequestError(400, message, param="model", code="alias_not_served")


def _no_address(host: str) -> RequestError:
    return RequestError(
        503,
        f"No instance can take the request now: the host name {host!r} has no address",
        kind="service_unavailable",
        code="no_instance_available",
        retry_after_s=1,
    )
