"""Engines without a scheduler: each request goes where the test says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cache_index import Tier
from simulator.cluster import ClusterSpec, Request
from simulator.cluster.engines import Engines, Load, flat_hashes
from simulator.cluster.kernels import layout as k

SOURCES = (Tier.HOST, Tier.DISK, Tier.POD, Tier.REMOTE, "peer")


@dataclass(frozen=True)
class Sent:
    """A request, and what a placement would say of it; engines by number."""

    request: Request
    engine: int = 0
    decode_engine: int = k.NONE
    plan_blocks: int = 0
    peer: int = k.NONE
    streams: bool = False


@dataclass(frozen=True)
class Ended:
    """What was told of a request; times are those of the clock."""

    began_s: float
    prefilled_s: float
    received_s: float
    first_s: float
    end_s: float
    itl_s: float
    tbt_s: float
    cached_tokens: int
    preemptions: int
    loaded: Mapping[Tier | str, int] = field(default_factory=dict)  # tokens by source


class Drive:
    """Time goes on from one call to the next; ``ended`` has what has ended so far."""

    def __init__(
        self,
        cluster: ClusterSpec,
        sent: Sequence[Sent],
        *,
        block_tokens: int = 16,
        step_by_step: bool = False,
    ) -> None:
        requests = [each.request for each in sent]
        hashes, starts = flat_hashes([request.hashes for request in requests])
        self._first_hash = {r.number: start for r, start in zip(requests, starts, strict=True)}
        self._to_come = sorted(sent, key=lambda each: each.request.arrival_s)
        self.engines = Engines(
            cluster,
            hashes,
            block_tokens=block_tokens,
            longest_output_tokens=max((r.output_tokens for r in requests), default=0),
            step_by_step=step_by_step,
        )
        self.now_s = 0.0
        self.work: dict[int, int] = {}  # rows of requests under way
        self.spoke: set[int] = set()
        self.ended: dict[int, Ended] = {}
        self.copied: dict[int, tuple[float, int]] = {}  # by number: when it ended, and blocks there then

    def load(self, request: Request) -> Load:
        return Load(
            request.number,
            request.prompt_tokens,
            request.output_tokens,
            self._first_hash[request.number],
            len(request.hashes),
        )

    def copy(self, number: int, request: Request, source: int, target: int, stop: int, start: int = 0) -> int:
        """Blocks of a request's prompt, from store to store."""
        return self.engines.copy(number, source, target, self.load(request), start, stop, self.now_s)

    def wait(self, until_s: float) -> None:
        """Let time go on with nothing but copies under way."""
        while self.now_s < until_s:
            self.now_s, notices = self.engines.advance(self.now_s, until_s)
            for notice in notices:
                self._told(notice)

    def run(self, until_s: float = float("inf")) -> dict[int, Ended]:
        """Until all have ended, or ``until_s``."""
        while self.work or self._to_come:
            arrival_s = self._to_come[0].request.arrival_s if self._to_come else float("inf")
            self.now_s, notices = self.engines.advance(self.now_s, max(min(arrival_s, until_s), self.now_s))
            assert self.now_s < float("inf"), "nothing will ever happen again"
            for notice in notices:
                self._told(notice)
            while self._to_come and self._to_come[0].request.arrival_s <= self.now_s:
                self._submit(self._to_come.pop(0))
            if self.now_s >= until_s:
                break
        return self.ended

    def drop(self, number: int) -> None:
        self.engines.drop(self.work.pop(number), self.now_s)

    def kill(self, engine: int) -> list[int]:
        """An engine dies; the requests that had something there."""
        lost = [number for number, work in self.work.items() if self.engines.needs(work, engine)]
        for number in lost:
            self.drop(number)
        self.engines.kill(engine, self.now_s)
        return lost

    def _submit(self, sent: Sent) -> None:
        request = sent.request
        self.work[request.number] = self.engines.submit(
            self.load(request),
            sent.engine,
            sent.decode_engine,
            plan_blocks=sent.plan_blocks,
            peer=sent.peer,
            streams=sent.streams,
        )

    def _told(self, notice: list[float]) -> None:
        number = int(notice[k.N_NUMBER])
        if notice[k.N_KIND] == k.COPIED:
            self.copied[number] = self.now_s, int(notice[k.N_CACHED])
            return
        assert number in self.work, "told of a request that is not under way"
        if notice[k.N_KIND] == k.PREFILLED:
            self.engines.hand_on(self.work[number])
        elif notice[k.N_KIND] == k.FIRST_TOKEN:
            self.spoke.add(number)
        else:
            del self.work[number]
            self.ended[number] = Ended(
                notice[k.N_BEGAN_S],
                notice[k.N_PREFILLED_S],
                notice[k.N_RECEIVED_S],
                notice[k.N_FIRST_S],
                self.now_s,
                notice[k.N_ITL_S],
                notice[k.N_TBT_S],
                int(notice[k.N_CACHED]),
                int(notice[k.N_PREEMPTIONS]),
                dict(zip(SOURCES, map(int, notice[k.N_FROM : k.N_FROM + 5]), strict=True)),
            )
