"""What the head of an inference request says, worked out once."""

from __future__ import annotations

from router.api_keys import ApiKey
from router.heads import Headers, client_request_id, forwarded_fields
from router.inference import Endpoint
from router.terms import RequestTerms, parse_terms


class RequestHead:
    """Requests with the same head share it: it is to be read only.

    ``request_id`` is the client's, None where it gave none that can be used. ``forwarded`` are the lines that go to
    an engine, and those with credentials apart.
    """

    __slots__ = (
        "_key",
        "_terms",
        "client_takes_chunks",
        "endpoint",
        "expects_continue",
        "forwarded",
        "headers",
        "keep_alive",
        "request_id",
        "url",
    )

    def __init__(
        self,
        endpoint: Endpoint,
        url: bytes,
        headers: Headers,
        *,
        keep_alive: bool,
        client_takes_chunks: bool,
        expects_continue: bool,
    ) -> None:
        self.endpoint = endpoint
        self.url = url
        self.headers = headers
        self.keep_alive = keep_alive
        self.client_takes_chunks = client_takes_chunks
        self.expects_continue = expects_continue
        self.request_id = client_request_id(headers)
        self._key: ApiKey | None = None
        self._terms: RequestTerms | None = None
        self.forwarded = forwarded_fields(headers)

    def terms(self, key: ApiKey | None) -> RequestTerms:
        """``key`` is the one that the head shows: another object only when keys were read again.

        Raises RequestError (400).
        """
        terms = self._terms
        if terms is None or key is not self._key:
            terms = self._terms = parse_terms(self.headers, key)
            self._key = key
        return terms
