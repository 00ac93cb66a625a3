"""Pods followed through the real client over real HTTP: lists, watches, 410, broken connections, no server."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from certificates import Authority
from cluster_factory import facts, make_scheduler
from kubernetes_api import TOKEN, KubernetesApi, kubernetes_api, pod, served
from kubernetes_asyncio.config import incluster_config

from conductor.cluster import Health
from conductor.configuration_faults import ConfigError
from conductor.discovery.kubernetes.api import ApiError, PodApi
from conductor.discovery.kubernetes.conventions import OWN
from conductor.discovery.kubernetes.watching import SOURCE, KubernetesPods
from conductor.discovery.roll import Roll
from conductor.discovery_config import KubernetesConfig
from conductor.membership import Membership
from conductor.scheduler import Scheduler


class Followed:
    """An empty cluster that follows pods."""

    def __init__(self) -> None:
        self.scheduler: Scheduler = make_scheduler("")
        self.membership = Membership(self.scheduler, time.monotonic)
        self.roll = Roll(self.membership, time.time, drain_s=30.0)

    @property
    def state(self) -> Any:
        return self.roll.sources[SOURCE]

    def ids(self) -> set[str]:
        self.membership.check_drained()
        return {instance.instance_id for instance in self.scheduler.cluster}


@asynccontextmanager
async def following(
    server: KubernetesApi, folder: Path, *, watch_s: int = 60, pods: list[dict[str, Any]] | None = None
) -> AsyncIterator[Followed]:
    config = KubernetesConfig.model_validate(
        {"pods": pods or [{"selector": "app=vllm"}], "kubeconfig": server.kubeconfig(folder)}
    )
    followed = Followed()
    async with await PodApi.connect(config) as api:
        source = KubernetesPods(
            config,
            api,
            followed.roll,
            clock=time.monotonic,
            draw=random.Random(1),
            first_pause_s=0.01,
            longest_pause_s=0.05,
            watch_s=watch_s,
        )
        task = asyncio.create_task(source.follow())
        try:
            yield followed
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.005)


async def test_pods_come_change_and_go(tmp_path: Path) -> None:
    async with kubernetes_api() as server:
        server.put(pod("vllm-0", ip="10.1.0.1"))
        server.put(pod("other", labels={"app": "other"}))
        server.put(pod("vllm-0", namespace="elsewhere"))
        async with following(server, tmp_path) as followed:
            await until(lambda: followed.ids() == {"vllm-0"})
            cluster = followed.scheduler.cluster
            server.put(pod("vllm-1", ip=None, phase="Pending", ready=False))
            server.change("vllm-1", podIP="10.1.0.2", phase="Running")
            await until(lambda: "vllm-1" in followed.ids())
            assert cluster["vllm-1"].withheld is not None
            followed.scheduler.instance_up("vllm-1", facts())
            server.change("vllm-1", conditions=[{"type": "Ready", "status": "True"}])
            await until(lambda: cluster["vllm-1"].health is Health.UP)
            server.begin_deletion("vllm-1")
            await until(lambda: followed.ids() == {"vllm-0"})
            server.delete("vllm-1")
            # A pod of a StatefulSet comes back under its name, elsewhere.
            server.delete("vllm-0")
            server.put(pod("vllm-0", ip="10.1.0.9", uid="another"))
            await until(
                lambda: "vllm-0" in followed.ids() and cluster["vllm-0"].url == "http://10.1.0.9:8000"
            )
            assert len(server.lists) == 1, "everything else was told by the watch"


async def test_long_lists_come_in_pages(tmp_path: Path) -> None:
    async with kubernetes_api(page=3) as server:
        for number in range(10):
            server.put(pod(f"vllm-{number}", ip=f"10.1.0.{number}"))
        async with following(server, tmp_path) as followed:
            await until(lambda: len(followed.ids()) == 10)
            assert [query.get("continue") for query in server.lists] == [None, "3", "6", "9"]
            assert all(query["limit"] == "500" for query in server.lists)


async def test_a_watch_is_taken_up_where_it_ended(tmp_path: Path) -> None:
    async with kubernetes_api() as server:
        server.put(pod("vllm-0"))
        async with following(server, tmp_path, watch_s=2) as followed:
            await until(lambda: followed.ids() == {"vllm-0"})
            await until(lambda: len(server.watches) >= 2)
            server.put(pod("vllm-1", ip="10.1.0.2"))
            await until(lambda: followed.ids() == {"vllm-0", "vllm-1"})
            server.break_watches()
            server.put(pod("vllm-2", ip="10.1.0.3"))
            await until(lambda: len(followed.ids()) == 3)
            assert followed.state.error is None
            assert len(server.lists) == 1
            assert all(query["allowWatchBookmarks"] == "True" for query in server.watches)


@pytest.mark.parametrize("value", ["2026-13-01", "!!bool x", "[" * 5_000])
async def test_a_pod_whose_annotation_cannot_be_read_leaves_the_others_alone(
    tmp_path: Path, value: str
) -> None:
    async with kubernetes_api() as server:
        server.put(pod("vllm-0", ip="10.1.0.1"))
        server.put(pod("broken", ip="10.1.0.2", annotations={OWN + "ranks": value}))
        server.put(pod("vllm-2", ip="10.1.0.3"))
        async with following(server, tmp_path) as followed:
            await until(lambda: followed.ids() == {"vllm-0", "vllm-2"})
            assert "is not valid YAML" in followed.state.refused["broken"]
            server.put(pod("vllm-3", ip="10.1.0.4"))
            await until(lambda: "vllm-3" in followed.ids())
            assert followed.state.failures == 0 and len(server.lists) == 1


async def test_bookmarks_move_the_version_on(tmp_path: Path) -> None:
    async with kubernetes_api() as server, following(server, tmp_path) as followed:
        await until(lambda: len(server.watches) == 1)
        server.put(pod("other", labels={"app": "other"}))
        server.bookmark()
        synced_s = followed.state.synced_s
        await until(lambda: followed.state.synced_s != synced_s)
        server.break_watches()
        await until(lambda: len(server.watches) == 2)
        assert int(server.watches[1]["resourceVersion"]) == int(server.watches[0]["resourceVersion"]) + 2


@pytest.mark.parametrize("inside", [True, False], ids=["inside a watch", "instead of one"])
async def test_what_is_gone_is_listed_anew(tmp_path: Path, inside: bool) -> None:
    async with kubernetes_api() as server:
        server.put(pod("vllm-0", ip="10.1.0.1"))
        server.put(pod("vllm-1", ip="10.1.0.2"))
        async with following(server, tmp_path) as followed:
            await until(lambda: len(followed.ids()) == 2)
            kept = followed.scheduler.cluster["vllm-0"]
            del server.pods["llm", "vllm-1"]  # which no watch tells
            if inside:
                server.expire_watches()
            else:
                server.compact()
                server.break_watches()
            await until(lambda: followed.ids() == {"vllm-0"})
            assert followed.scheduler.cluster["vllm-0"] is kept
            assert len(server.lists) == 2
            assert followed.state.error is None


async def test_without_the_api_server_the_last_list_stays(tmp_path: Path) -> None:
    server = KubernetesApi()
    server.put(pod("vllm-0", ip="10.1.0.1"))
    async with served(server):
        port = urlsplit(server.url).port
        async with following(server, tmp_path) as followed:
            await until(lambda: followed.ids() == {"vllm-0"})
            kept = followed.scheduler.cluster["vllm-0"]
            server.refuse = (503, "etcdserver: leader changed")
            server.break_watches()
            await until(lambda: followed.state.failures >= 3)
            assert "etcdserver: leader changed" in followed.state.error
            server.refuse = None
            await until(lambda: followed.state.error is None)
            server.put(pod("vllm-1", ip="10.1.0.2"))
            await until(lambda: "vllm-1" in followed.ids())
            assert followed.scheduler.cluster["vllm-0"] is kept
    assert port is not None


async def test_a_server_that_was_away_is_followed_again(tmp_path: Path) -> None:
    server = KubernetesApi()
    server.put(pod("vllm-0", ip="10.1.0.1"))
    async with served(server):
        port = urlsplit(server.url).port or 0
        first = following(server, tmp_path)
        followed = await first.__aenter__()
        await until(lambda: followed.ids() == {"vllm-0"})
        server.break_watches()
    try:
        await until(lambda: followed.state.error is not None)
        assert "cannot be reached" in followed.state.error or "broke off" in followed.state.error
        assert followed.ids() == {"vllm-0"}
        server.put(pod("vllm-1", ip="10.1.0.2"))
        async with served(server, port):
            await until(lambda: followed.ids() == {"vllm-0", "vllm-1"})
            assert followed.state.error is None
    finally:
        await first.__aexit__(None, None, None)


async def test_a_refusal_names_what_is_missing(tmp_path: Path) -> None:
    async with kubernetes_api() as server:
        server.refuse = (403, 'pods is forbidden: User "system:serviceaccount:llm:conductor" cannot list')
        async with following(server, tmp_path) as followed:
            await until(lambda: followed.state.error is not None)
            assert "answered 403: pods is forbidden" in followed.state.error
            assert "needs get, list and watch of pods" in followed.state.error


async def test_several_selectors_are_one_source(tmp_path: Path) -> None:
    async with kubernetes_api() as server:
        server.put(pod("p-0", ip="10.1.0.1", labels={"app": "prefill"}))
        server.put(pod("d-0", ip="10.1.0.2", labels={"app": "decode"}, namespace="other"))
        pods = [
            {"selector": "app=prefill", "instance": {"role": "prefill"}},
            {"selector": "app=decode", "namespace": "*", "instance": {"role": "decode"}, "port": "http"},
        ]
        async with following(server, tmp_path, pods=pods) as followed:
            await until(lambda: followed.ids() == {"p-0", "d-0.other"})
            cluster = followed.scheduler.cluster
            assert [cluster["p-0"].role, cluster["d-0.other"].role] == ["prefill", "decode"]
            assert followed.state.detail == "pods app=prefill in llm; pods app=decode in *"
            server.put(
                pod("p-1", annotations={"conductor.role": "x"}, labels={"app": "prefill"}, ip="10.1.0.3")
            )
            await until(lambda: "p-1" in followed.state.refused)
            server.delete("p-1")
            await until(lambda: not followed.state.refused)


async def test_a_pod_asks_with_its_service_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Address, token, authority and namespace are where Kubernetes puts them."""
    authority = Authority(tmp_path)
    context = authority.server(authority.issue("api"))
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "namespace").write_text("gpu")
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(tmp_path / "token"))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(authority.file))
    monkeypatch.setattr("conductor.discovery.kubernetes.api._OWN_NAMESPACE", tmp_path / "namespace")
    server = KubernetesApi()
    server.put(pod("vllm-0", namespace="gpu"))
    server.put(pod("vllm-1", namespace="llm"))
    async with served(server, tls=context):
        address = urlsplit(server.url)
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", str(address.hostname))
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(address.port))
        config = KubernetesConfig.model_validate({"pods": [{"selector": "app=vllm"}]})
        async with await PodApi.connect(config) as api:
            pods, _ = await api.list_pods(None, "app=vllm")
            assert [each["metadata"]["name"] for each in pods] == ["vllm-0"]
            (tmp_path / "token").write_text("expired")
        async with await PodApi.connect(config) as api:
            with pytest.raises(ApiError, match="answered 401: Unauthorized; the service account needs"):
                await api.list_pods(None, "app=vllm")


async def test_without_a_way_to_the_server_the_key_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    config = KubernetesConfig.model_validate({"pods": [{"selector": "app=vllm"}]})
    with pytest.raises(ConfigError, match=r"discovery\.kubernetes: the service account cannot be used"):
        await PodApi.connect(config)
    config = KubernetesConfig.model_validate(
        {"pods": [{"selector": "app=vllm"}], "kubeconfig": tmp_path / "nothing"}
    )
    with pytest.raises(ConfigError, match=r"discovery\.kubernetes: kubeconfig cannot be used"):
        await PodApi.connect(config)
