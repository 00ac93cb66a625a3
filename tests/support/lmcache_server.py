"""An LMCache multi-process server as its coordinator sees it: it registers, sends heartbeats and cache events.

Paths, bodies and hashes are those of LMCache 0.5.6; nothing of the product is used here.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import blake3
import httpx

CHUNK_TOKENS = 256
ONE_WORKER = 1 << 24 | 1 << 8  # world size 1, rank 0, local world size 1, local rank 0


def chunk_hashes(tokens: Sequence[int]) -> list[bytes]:
    """Of the full chunks of a prompt."""
    previous = blake3.blake3(struct.pack(">q", 0) + struct.pack(">I", 0)).digest()
    hashes = []
    for start in range(0, len(tokens) // CHUNK_TOKENS * CHUNK_TOKENS, CHUNK_TOKENS):
        chunk = tokens[start : start + CHUNK_TOKENS]
        previous = blake3.blake3(previous + struct.pack(f">{CHUNK_TOKENS}I", *chunk)).digest()
        hashes.append(previous)
    return hashes


class LMCacheServer:
    """One server; ``coordinator`` is the URL it is configured with."""

    def __init__(self, coordinator: str, instance_id: str, *, ip: str = "127.0.0.1") -> None:
        self.instance_id = instance_id
        self._ip = ip
        self._http = httpx.Client(base_url=coordinator, timeout=30, trust_env=False)
        self._sequence = 0

    def __enter__(self) -> LMCacheServer:
        body = {"instance_id": self.instance_id, "ip": self._ip, "http_port": 8080, "mq_port": 5555}
        self._sent("POST", "/instances", {**body, "metadata": {}, "p2p_advertised_url": ""})
        self.heartbeat()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def heartbeat(self) -> None:
        self._sent("PUT", f"/instances/{self.instance_id}/heartbeat")

    def leave(self) -> None:
        self._sent("DELETE", f"/instances/{self.instance_id}")

    def stored(self, model: str, tokens: Sequence[int], **batch: Any) -> None:
        """A prompt's full chunks are in its memory, or where ``batch`` says (tier, backend, shared)."""
        self._tell("store", model, tokens, batch)

    def deleted(self, model: str, tokens: Sequence[int], **batch: Any) -> None:
        self._tell("delete", model, tokens, batch)

    def _tell(self, kind: str, model: str, tokens: Sequence[int], batch: dict[str, Any]) -> None:
        self._sequence += 1
        entries = [
            {
                "key": {
                    "chunk_hash_hex": each.hex(),
                    "model_name": model,
                    "kv_rank": ONE_WORKER,
                    "object_group_id": 0,
                    "cache_salt": "",
                },
                "size_bytes": CHUNK_TOKENS << 17,
                "token_ids": [],
                "token_offset": -1,
            }
            for each in chunk_hashes(tokens)
        ]
        told = {"tier": "l1", "backend": "cpu", "shared": False, "ts": 1.0, **batch}
        told |= {"instance_id": self.instance_id, "incarnation": 1, "seq": self._sequence}
        answer = self._sent(
            "POST", "/events", {"batches": [{**told, "event_type": kind, "entries": entries}]}
        )
        assert answer["applied"] == 1, answer

    def _sent(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        response = self._http.request(method, path, json=body)
        assert response.is_success, response.text
        found: dict[str, Any] = response.json() if response.content else {}
        return found
