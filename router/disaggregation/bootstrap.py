"""The bootstrap server beside a prefill instance: plain HTTP on the instance's host, without keys."""

from __future__ import annotations

from dataclasses import replace

from conductor.placement import Target
from router.heads import host_field


def bootstrap_target(prefill: Target) -> Target:
    beside = replace(prefill, port=prefill.bootstrap_port, tls=False, api_key=None)
    return replace(beside, url=f"http://{host_field(beside)}")


def bootstrap_head(path: str, target: Target) -> bytes:
    return f"GET {path} HTTP/1.1\r\nhost: {host_field(target)}\r\n\r\n".encode("latin-1")
