"""An API server as far as pods go: lists in pages, watches as JSON lines, versions, bookmarks, 410 and refusals.

It keeps pods and a history of events, as etcd does; what it answers over HTTP has the form of Kubernetes 1.33.
"""

from __future__ import annotations

import asyncio
import copy
import json
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web

TOKEN = "service-account-token"


def pod(
    name: str,
    *,
    ip: str | None = "10.1.0.1",
    labels: dict[str, str] | None = None,
    annotations: dict[str, str] | None = None,
    uid: str | None = None,
    namespace: str = "llm",
    ready: bool = True,
    phase: str = "Running",
    ports: tuple[tuple[str, int], ...] = (("http", 8000),),
) -> dict[str, Any]:
    """One that runs a container with these ports."""
    made = {
        "metadata": {
            "name": name,
            "namespace": namespace,
            "uid": uid or f"uid-of-{name}",
            "labels": {"app": "vllm", **(labels or {})},
            "annotations": annotations or {},
            "creationTimestamp": "2026-11-01T10:00:00Z",
        },
        "spec": {
            "containers": [
                {
                    "name": "engine",
                    "image": "vllm/vllm-openai:v0.32.0",
                    "ports": [
                        {"name": port, "containerPort": number, "protocol": "TCP"} for port, number in ports
                    ],
                }
            ]
        },
        "status": {
            "phase": phase,
            "conditions": [
                {"type": "PodScheduled", "status": "True"},
                {"type": "Ready", "status": "True"}
                if ready
                else {
                    "type": "Ready",
                    "status": "False",
                    "reason": "ContainersNotReady",
                    "message": "containers with unready status: [engine]",
                },
            ],
        },
    }
    if ip is not None:
        made["status"]["podIP"] = ip
    return made


class KubernetesApi:
    """``page`` is the most pods in one answer of a list."""

    def __init__(self, *, page: int = 100) -> None:
        self.page = page
        self.url = ""
        self.pods: dict[tuple[str, str], dict[str, Any]] = {}
        self.lists: list[dict[str, str]] = []  # queries, the same for watches
        self.watches: list[dict[str, str]] = []
        self.refuse: tuple[int, str] | None = None  # what every request gets
        self.compacted = 0  # versions up to it are forgotten
        self._version = 100
        self._events: list[tuple[int, str, dict[str, Any]]] = []
        self._changed = asyncio.Event()
        self._broken = asyncio.Event()

    # ---- what happens in the cluster ----

    def put(self, pod: dict[str, Any]) -> None:
        key = _key(pod)
        self._happened("MODIFIED" if key in self.pods else "ADDED", pod)
        self.pods[key] = pod

    def change(self, name: str, namespace: str = "llm", **status: Any) -> None:
        """Merge fields into a pod's status; ``metadata`` into that."""
        changed = copy.deepcopy(self.pods[namespace, name])
        changed["metadata"] |= status.pop("metadata", {})
        changed["status"] |= status
        self.put(changed)

    def begin_deletion(self, name: str, namespace: str = "llm") -> None:
        self.change(name, namespace, metadata={"deletionTimestamp": "2026-11-01T11:00:30Z"})

    def delete(self, name: str, namespace: str = "llm") -> None:
        self._happened("DELETED", self.pods.pop((namespace, name)))

    def bookmark(self) -> None:
        """Tell every watch the present version."""
        self._version += 1
        self._events.append((self._version, "BOOKMARK", {"kind": "Pod", "apiVersion": "v1"}))
        self._wake()

    def compact(self) -> None:
        """Forget the history: who asks for changes since an older version gets a 410."""
        self._version += 1
        self.compacted = self._version
        self._events.clear()

    def expire_watches(self) -> None:
        """End every watch with a 410 inside of it."""
        self.compact()
        self._events.append((self._version, "ERROR", {}))
        self._wake()

    def break_watches(self) -> None:
        """Close their connections in the middle of a line."""
        broken, self._broken = self._broken, asyncio.Event()
        broken.set()
        self._wake()

    # ---- how it is asked ----

    def kubeconfig(self, folder: Path, *, namespace: str = "llm") -> Path:
        path = folder / "kubeconfig"
        path.write_text(
            yaml.safe_dump(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "clusters": [{"name": "here", "cluster": {"server": self.url}}],
                    "users": [{"name": "us", "user": {"token": TOKEN}}],
                    "contexts": [
                        {"name": "us", "context": {"cluster": "here", "user": "us", "namespace": namespace}}
                    ],
                    "current-context": "us",
                }
            )
        )
        return path

    async def answer(self, request: web.Request) -> web.StreamResponse:
        query = dict(request.query)
        if request.headers.get("authorization") != f"Bearer {TOKEN}":
            return _status(401, "Unauthorized", "Unauthorized")
        namespace = request.match_info.get("namespace")
        if query.get("watch"):
            self.watches.append(query)
            return await self._watch(request, namespace, query)
        self.lists.append(query)
        return self._list(namespace, query)

    def _list(self, namespace: str | None, query: dict[str, str]) -> web.Response:
        if self.refuse is not None:
            return _status(self.refuse[0], self.refuse[1], self.refuse[1])
        found = [
            each for each in self.pods.values() if _selected(each, namespace, query.get("labelSelector", ""))
        ]
        begin = int(query.get("continue", "0"))
        end = begin + min(self.page, int(query.get("limit", self.page)))
        metadata = {"resourceVersion": str(self._version)}
        if end < len(found):
            metadata["continue"] = str(end)
        return web.json_response(
            {"kind": "PodList", "apiVersion": "v1", "metadata": metadata, "items": found[begin:end]}
        )

    async def _watch(
        self, request: web.Request, namespace: str | None, query: dict[str, str]
    ) -> web.StreamResponse:
        if self.refuse is not None:
            return _status(self.refuse[0], self.refuse[1], self.refuse[1])
        since = int(query["resourceVersion"])
        if since < self.compacted:
            return _status(410, "Expired", f"too old resource version: {since} ({self.compacted})")
        selector = query.get("labelSelector", "")
        response = web.StreamResponse(headers={"content-type": "application/json"})
        await response.prepare(request)
        broken = self._broken
        deadline_s = asyncio.get_running_loop().time() + float(query["timeoutSeconds"])
        while not broken.is_set():
            for version, kind, about in list(self._events):
                if version > since:
                    since = version
                    if line := _line(kind, about, version, namespace, selector):
                        await response.write(line)
                    if kind == "ERROR":
                        return response
            self._changed.clear()
            try:
                async with asyncio.timeout_at(deadline_s):
                    await self._changed.wait()
            except TimeoutError:
                return response
        await response.write(b'{"type": "MODIF')
        assert request.transport is not None
        request.transport.abort()
        return response

    def _happened(self, kind: str, pod: dict[str, Any]) -> None:
        self._version += 1
        pod["metadata"]["resourceVersion"] = str(self._version)
        self._events.append((self._version, kind, copy.deepcopy(pod)))
        self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def _line(kind: str, about: dict[str, Any], version: int, namespace: str | None, selector: str) -> bytes:
    """Empty for what the watch does not ask for."""
    if kind == "ERROR":
        about = json.loads(_status(410, "Expired", "too old resource version").text or "")
    elif kind == "BOOKMARK":
        about = {**about, "metadata": {"resourceVersion": str(version)}}
    elif not _selected(about, namespace, selector):
        return b""
    else:
        about = {**about, "kind": "Pod", "apiVersion": "v1"}
    return json.dumps({"type": kind, "object": about}).encode() + b"\n"


def _selected(pod: dict[str, Any], namespace: str | None, selector: str) -> bool:
    """Of selectors only equality."""
    metadata = pod["metadata"]
    wanted = dict(part.split("=") for part in selector.split(",") if part)
    return namespace in (None, metadata["namespace"]) and wanted.items() <= metadata["labels"].items()


def _status(code: int, reason: str, message: str) -> web.Response:
    return web.json_response(
        {"kind": "Status", "status": "Failure", "code": code, "reason": reason, "message": message},
        status=code,
    )


def _key(pod: dict[str, Any]) -> tuple[str, str]:
    return pod["metadata"]["namespace"], pod["metadata"]["name"]


@asynccontextmanager
async def kubernetes_api(port: int = 0, **options: Any) -> AsyncIterator[KubernetesApi]:
    """Running on the loop of the caller."""
    api = KubernetesApi(**options)
    async with served(api, port):
        yield api


@asynccontextmanager
async def served(api: KubernetesApi, port: int = 0, tls: ssl.SSLContext | None = None) -> AsyncIterator[None]:
    """From here until the end ``api`` can be reached; its state outlives that."""
    app = web.Application()
    app.router.add_get("/api/v1/pods", api.answer)
    app.router.add_get("/api/v1/namespaces/{namespace}/pods", api.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port, ssl_context=tls)
    await site.start()
    assert site._server is not None
    scheme = "http" if tls is None else "https"
    api.url = f"{scheme}://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[attr-defined]
    try:
        yield
    finally:
        await runner.cleanup()


class ThreadedApi:
    """One that runs on a thread of its own, for tests that block."""

    def __init__(self) -> None:
        self.api = KubernetesApi()
        self._loop = asyncio.new_event_loop()
        self._up = threading.Event()
        self._down = asyncio.Event()

    def do(self, change: Callable[[KubernetesApi], None]) -> None:
        """Carry a change out over there."""
        done = threading.Event()

        def carry_out() -> None:
            change(self.api)
            done.set()

        self._loop.call_soon_threadsafe(carry_out)
        assert done.wait(10)

    def run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._down.set)

    def wait_until_up(self) -> None:
        assert self._up.wait(10)

    async def _serve(self) -> None:
        async with served(self.api):
            self._up.set()
            await self._down.wait()


@contextmanager
def threaded_kubernetes_api() -> Iterator[ThreadedApi]:
    threaded = ThreadedApi()
    thread = threading.Thread(target=threaded.run)
    thread.start()
    threaded.wait_until_up()
    try:
        yield threaded
    finally:
        threaded.stop()
        thread.join()
