"""Which web pages may use the front door: the header lines that tell their browsers (Fetch standard)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from router.heads import Headers

EXPOSED: Final = (
    "retry-after",
    "x-request-id",
    "x-conductor-placement-id",
    "x-conductor-prefill-instance",
    "x-conductor-decode-instance",
    "x-conductor-overlap-tokens",
    "x-conductor-predicted-ttft-ms",
    "x-conductor-attempts",
    "x-ratelimit-limit-requests",
    "x-ratelimit-remaining-requests",
    "x-ratelimit-reset-requests",
    "x-ratelimit-limit-tokens",
    "x-ratelimit-remaining-tokens",
    "x-ratelimit-reset-tokens",
)


@dataclass(frozen=True, slots=True)
class CorsPolicy:
    """``origins`` is None where every page may. ``credentials`` are cookies and certificates, not API keys."""

    origins: frozenset[str] | None
    methods: tuple[str, ...] = ("GET", "POST")
    headers: tuple[str, ...] = ("*",)
    credentials: bool = False
    max_age_s: int = 600

    def answer_fields(self, headers: Headers) -> dict[str, str]:
        """What an answer to a request with these header lines says."""
        if self.origins is None:
            return {"access-control-allow-origin": "*", "access-control-expose-headers": ", ".join(EXPOSED)}
        fields = {"vary": "Origin"}
        given = next((value for name, value in headers if name == b"origin"), b"").decode("latin-1")
        if given in self.origins:
            fields["access-control-allow-origin"] = given
            fields["access-control-expose-headers"] = ", ".join(EXPOSED)
            if self.credentials:
                fields["access-control-allow-credentials"] = "true"
        return fields

    def middleware_options(self) -> dict[str, Any]:
        """For Starlette's CORSMiddleware, which also answers what browsers ask beforehand (OPTIONS)."""
        return {
            "allow_origins": ("*",) if self.origins is None else tuple(sorted(self.origins)),
            "allow_methods": self.methods,
            "allow_headers": self.headers,
            "allow_credentials": self.credentials,
            "expose_headers": EXPOSED,
            "max_age": self.max_age_s,
        }
