"""Pods followed as the API server tells of them: listed once, then watched from that version on."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

import structlog

from conductor.discovery.kubernetes.api import ApiError, GoneError, PodApi, PodEvent
from conductor.discovery.kubernetes.conventions import AnnotationError
from conductor.discovery.kubernetes.pods import Pod, instances_of, pod_id
from conductor.discovery.roll import Listed, Roll
from conductor.discovery_config import KubernetesConfig, PodsConfig

SOURCE: Final = "kubernetes"
_GATHER_S: Final = (
    0.05  # changes that come within it are applied together: of 1,000 pods each time costs 3 ms
)
_log = structlog.get_logger(__name__)


class PodWatch:
    """The pods of one selector.

    A watch ends after some minutes and is taken up where it ended, as is one that breaks off, after a pause that
    grows with every failure (``first_pause_s`` to ``longest_pause_s``, less a random part). A version that the
    server has forgotten (410) means a new list. Whatever happens, what was known last stays.
    """

    def __init__(
        self,
        config: PodsConfig,
        api: PodApi,
        *,
        on_change: Callable[[], None],
        on_heard: Callable[[], None],
        on_failure: Callable[[str], None],
        clock: Callable[[], float],
        draw: random.Random,
        watch_s: int = 240,
        first_pause_s: float = 0.5,
        longest_pause_s: float = 30.0,
    ) -> None:
        self.config = config
        self._api = api
        self._on_change = on_change
        self._on_heard = on_heard
        self._on_failure = on_failure
        self._clock = clock
        self._draw = draw
        self._watch_s = watch_s
        self._first_pause_s = first_pause_s
        self._longest_pause_s = longest_pause_s
        self._version: str | None = None
        self._pods: dict[tuple[str, str], tuple[Listed, ...] | AnnotationError] = {}
        self._ids: dict[tuple[str, str], str] = {}
        self._failures = 0

    def listed(self) -> Iterator[Listed]:
        for found in self._pods.values():
            if not isinstance(found, AnnotationError):
                yield from found

    def unusable(self) -> dict[str, str]:
        """Pods that should be instances and cannot be, and why."""
        return {
            self._ids[key]: str(found)
            for key, found in self._pods.items()
            if isinstance(found, AnnotationError)
        }

    async def follow(self) -> None:
        """Until it is cancelled."""
        while True:
            began_s = self._clock()
            try:
                if self._version is None:
                    await self._list()
                await self._watch()
                if self._clock() - began_s >= 1.0:
                    self._failures = 0
                    continue  # it ended as it should
                self._failures += 1  # who ends every watch at once is asked less often
            except GoneError as error:
                _log.info("pods are listed anew", selector=self.config.selector, reason=str(error))
                self._version = None
                self._failures += 1
            except ApiError as error:
                self._failures += 1
                self._on_failure(f"the API server {error}")
            except Exception as error:
                _log.exception("following pods failed unexpectedly", selector=self.config.selector)
                self._version = None
                self._failures += 1
                self._on_failure(f"{type(error).__name__}: {error}")
            await asyncio.sleep(self._pause_s())

    def _pause_s(self) -> float:
        grown_s = self._first_pause_s * 2.0 ** min(self._failures - 1, 20)
        return min(grown_s, self._longest_pause_s) * self._draw.uniform(0.5, 1.0)

    async def _list(self) -> None:
        pods, version = await self._api.list_pods(self.config.namespace, self.config.selector)
        read = [(_key(pod), pod_id(pod, self.config), self._read(pod)) for pod in pods]
        self._pods = {key: found for key, _, found in read}
        self._ids = {key: name for key, name, _ in read}
        self._version = version
        self._on_change()

    async def _watch(self) -> None:
        assert self._version is not None
        within_s = self._draw.randint(self._watch_s // 2 + 1, self._watch_s)
        events = self._api.watch_pods(
            self.config.namespace, self.config.selector, self._version, within_s=within_s
        )
        answered = False
        async for event in events:
            self._version = event.version
            if answered:
                self._failures = 0
            answered = True
            self._handle(event)

    def _handle(self, event: PodEvent) -> None:
        if event.kind == "BOOKMARK":
            self._on_heard()
            return
        if event.kind == "DELETED":
            key = _key(event.pod)
            self._pods.pop(key, None)
            self._ids.pop(key, None)
        else:
            key = _key(event.pod)
            self._pods[key], self._ids[key] = self._read(event.pod), pod_id(event.pod, self.config)
        self._on_change()

    def _read(self, pod: Pod) -> tuple[Listed, ...] | AnnotationError:
        try:
            return instances_of(pod, self.config)
        except AnnotationError as error:
            return error


class KubernetesPods:
    """A source of the roll: the pods of every selector that is configured."""

    def __init__(
        self,
        config: KubernetesConfig,
        api: PodApi,
        roll: Roll,
        *,
        clock: Callable[[], float],
        draw: random.Random,
        first_pause_s: float = 0.5,
        longest_pause_s: float = 30.0,
        watch_s: int = 240,
    ) -> None:
        self._roll = roll
        self._errors: dict[int, str] = {}
        self._applying: asyncio.TimerHandle | None = None
        self._watches = [
            PodWatch(
                pods,
                api,
                on_change=partial(self._changed, number),
                on_heard=partial(self._heard, number),
                on_failure=partial(self._failed, number),
                clock=clock,
                draw=draw,
                watch_s=watch_s,
                first_pause_s=first_pause_s,
                longest_pause_s=longest_pause_s,
            )
            for number, pods in enumerate(config.pods)
        ]
        roll.add_source(
            SOURCE,
            "; ".join(f"pods {each.selector} in {api.namespace_of(each.namespace)}" for each in config.pods),
        )

    async def follow(self) -> None:
        """Until it is cancelled."""
        try:
            await asyncio.gather(*(each.follow() for each in self._watches))
        finally:
            if self._applying is not None:
                self._applying.cancel()

    def _changed(self, number: int) -> None:
        self._heard(number)
        if self._applying is None:
            self._applying = asyncio.get_running_loop().call_later(_GATHER_S, self._apply)

    def _apply(self) -> None:
        self._applying = None
        listing: dict[str, Listed] = {}
        unusable: dict[str, str] = {}
        for number, watch in enumerate(self._watches):
            for each in watch.listed():
                if listing.setdefault(each.config.id, each) is not each:
                    unusable[f"{each.config.id} (pods[{number}])"] = (
                        "an earlier selector has a pod of this name"
                    )
            unusable |= watch.unusable()
        self._roll.call(SOURCE, listing.values(), unusable)

    def _heard(self, number: int) -> None:
        self._errors.pop(number, None)
        if not self._errors:
            self._roll.heard(SOURCE)

    def _failed(self, number: int, reason: str) -> None:
        self._errors[number] = reason
        self._roll.failed(SOURCE, f"pods[{number}]: {reason}")


def _key(pod: Pod) -> tuple[str, str]:
    metadata = pod["metadata"]
    return metadata["namespace"], metadata["name"]
