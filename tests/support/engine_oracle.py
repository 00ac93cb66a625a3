"""One engine, or a prefill and a decode engine with a link between them, in plain Python and a step at a time.

Written from what the compiled model says of itself, not from how it does it: the oracle of `Engines` for clusters
without slower tiers.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from conductor.costs import InstanceClass, Speed
from simulator.cluster import Request


@dataclass(frozen=True)
class Seen:
    """What became of a request; times are those of the clock."""

    began_s: float
    first_s: float
    end_s: float
    itl_s: float
    tbt_s: float
    cached_tokens: int
    preemptions: int


@dataclass(eq=False)
class Leg:
    request: Request
    only_prefills: bool = False
    receives: bool = False  # its KV cache comes from another engine
    chain: list[int] = field(default_factory=list)
    target: int = 0  # tokens to have before it decodes
    done: int = 0  # of these
    said: int = 0
    committed: int = 0  # blocks that it refers to
    loose: int = 0  # tokens taken beside them
    order: int = 0  # of admission
    cached: int = 0  # tokens found when it first began
    preemptions: int = 0
    began_s: float = inf
    token_s: list[float] = field(default_factory=list)
    partner: Leg | None = None

    def __post_init__(self) -> None:
        self.chain = self.request.hashes.tolist()
        self.target = self.request.prompt_tokens


class Memory:
    """Blocks that somebody refers to, blocks that are merely cached, and tokens in neither."""

    def __init__(self, capacity_tokens: int, block: int) -> None:
        self.capacity = capacity_tokens // block * block
        self.block = block
        self.references: dict[int, int] = {}
        self.idle: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self.loose = 0

    def free(self) -> int:
        """Tokens that nobody has taken; what is merely cached may have to go."""
        return self.capacity - len(self.references) * self.block - self.loose

    def evict_for(self, tokens: int) -> bool:
        while len(self.idle) * self.block > self.free() - tokens and self.idle:
            self.idle.popitem(last=False)
        return self.free() >= tokens

    def refer(self, block_hash: int) -> None:
        self.idle.pop(block_hash, None)
        self.references[block_hash] = self.references.get(block_hash, 0) + 1

    def take(self, leg: Leg, growth: int) -> bool:
        """Room for all a leg computes or receives, and the token that this says; ``growth`` others need soon."""
        usable = min((leg.request.prompt_tokens - 1) // self.block, len(leg.chain))
        found = []
        for block_hash in leg.chain[:usable]:
            if block_hash not in self.references and block_hash not in self.idle:
                break
            found.append(block_hash)
        computes = leg.preemptions or not leg.receives
        loose = leg.target + (1 if computes and not leg.only_prefills else 0) - len(found) * self.block
        idle = sum(block_hash in self.idle for block_hash in found)
        if idle * self.block + loose + growth > self.free():
            return False
        for block_hash in found:
            self.refer(block_hash)
        self.loose += loose
        leg.loose, leg.committed, leg.done = loose, len(found), len(found) * self.block
        self.evict_for(growth)
        if not leg.preemptions:
            leg.cached = leg.done
        return True

    def commit(self, leg: Leg) -> None:
        for block_hash in leg.chain[leg.committed : leg.done // self.block]:
            self.refer(block_hash)
            leg.committed += 1
            leg.loose -= self.block
            self.loose -= self.block

    def release(self, leg: Leg) -> None:
        for block_hash in reversed(leg.chain[: leg.committed]):
            self.references[block_hash] -= 1
            if not self.references[block_hash]:
                del self.references[block_hash]
                self.idle[block_hash] = None
        self.loose -= leg.loose
        leg.loose = leg.committed = 0


class Engine:
    def __init__(self, speeds: InstanceClass, capacity_tokens: int, block: int, sequences: int) -> None:
        self.speeds = speeds
        self.memory = Memory(capacity_tokens, block)
        self.sequences = sequences
        self.waiting: deque[Leg] = deque()
        self.wants_kv: deque[Leg] = deque()
        self.receiving: list[Leg] = []
        self.arrived: list[Leg] = []
        self.prefilling: list[Leg] = []
        self.decoding: list[Leg] = []
        self.chunks: list[tuple[Leg, int]] = []
        self.end_s = inf
        self.admitted = 0

    def running(self) -> int:
        return len(self.receiving) + len(self.arrived) + len(self.prefilling) + len(self.decoding)

    def admit(self, queue: deque[Leg]) -> Leg | None:
        """The first of a queue, if there is room for it."""
        if not queue or self.running() >= self.sequences:
            return None
        if not self.memory.take(queue[0], len(self.decoding)):
            return None
        queue[0].order = self.admitted
        self.admitted += 1
        return queue.popleft()

    def receive(self) -> list[Leg]:
        """Legs whose KV cache may come; those that were preempted go first."""
        legs = []
        while not (self.waiting and self.waiting[0].preemptions) and (leg := self.admit(self.wants_kv)):
            self.receiving.append(leg)
            legs.append(leg)
        return legs

    def preempt(self) -> None:
        legs = [leg for leg in self.decoding + self.prefilling if not leg.only_prefills]
        youngest = max(legs, key=lambda leg: leg.order)
        (self.decoding if youngest in self.decoding else self.prefilling).remove(youngest)
        self.memory.release(youngest)
        youngest.done = 0
        youngest.target = youngest.request.prompt_tokens + youngest.said
        youngest.preemptions += 1
        self.waiting.appendleft(youngest)

    def begin(self, now_s: float) -> None:
        """Form a step."""
        self.decoding += self.arrived
        self.arrived = []
        preempted = False
        while not self.memory.evict_for(len(self.decoding)):
            self.preempt()
            preempted = True
        s = self.speeds
        prompts_s = 0.0
        budget = s.chunk_tokens - len(self.decoding)
        begun = iter(list(self.prefilling))
        while budget > 0:
            leg = next(begun, None)
            if leg is None:
                leg = None if preempted else self.admit(self.waiting)
                if leg is None:
                    break
                self.prefilling.append(leg)
                leg.began_s = min(leg.began_s, now_s)
                prompts_s += s.prefill_base_s + s.prefill_s_per_cached_token * leg.done
            count = min(leg.target - leg.done, budget)
            prompts_s += s.prefill_s_per_token * count
            prompts_s += s.prefill_s_per_token_squared * ((leg.done + count) ** 2 - leg.done**2)
            self.chunks.append((leg, count))
            budget -= count
        if not self.chunks and not self.decoding:
            return
        context = sum(leg.request.prompt_tokens + leg.said for leg in self.decoding)
        decode_s = s.decode_s_per_sequence * len(self.decoding) + s.decode_s_per_context_token * context
        self.end_s = now_s + max(s.decode_base_s, prompts_s) + decode_s

    def finish(self) -> list[Leg]:
        """The step has ended; the prefill legs that ended with it."""
        now_s, self.end_s = self.end_s, inf
        for leg in sorted(self.decoding, key=lambda leg: leg.request.number):
            leg.loose += 1
            self.memory.loose += 1
            self.say(leg, now_s)
        prefilled = []
        for leg, count in self.chunks:
            leg.done += count
            self.memory.commit(leg)
            if leg.done == leg.target:
                self.prefilling.remove(leg)
                if leg.only_prefills:
                    prefilled.append(leg)
                else:
                    self.decoding.append(leg)
                    self.say(leg, now_s)
        self.chunks = []
        return prefilled

    def say(self, leg: Leg, now_s: float) -> None:
        leg.said += 1
        leg.token_s.append(now_s)
        if leg.said == leg.request.output_tokens:
            self.decoding.remove(leg)
            self.memory.release(leg)


@dataclass(eq=False)
class Flow:
    leg: Leg
    left_bytes: float
    since_s: float  # from when on it moves


class Link:
    """All flows share it equally, and none is faster than ``path`` (a distance's)."""

    def __init__(self, nic: Speed, path: Speed) -> None:
        self.nic, self.path = nic, path
        self.flows: list[Flow] = []

    def bytes_per_s(self) -> float:
        return min(self.path.bytes_per_s, self.nic.bytes_per_s / max(len(self.flows), 1))

    def next_s(self) -> float:
        return min((f.since_s + f.left_bytes / self.bytes_per_s() for f in self.flows), default=inf)

    def move(self, now_s: float) -> None:
        """Bring what is left up to date, before the number of flows changes."""
        for flow in self.flows:
            if now_s > flow.since_s:
                flow.left_bytes -= (now_s - flow.since_s) * self.bytes_per_s()
                flow.since_s = now_s

    def start(self, leg: Leg, size_bytes: float, now_s: float) -> None:
        self.move(now_s)
        self.flows.append(Flow(leg, size_bytes, now_s + self.nic.latency_s + self.path.latency_s))

    def end(self, now_s: float) -> list[Leg]:
        ended = [f for f in self.flows if f.since_s + f.left_bytes / self.bytes_per_s() <= now_s + 1e-9]
        self.move(now_s)
        self.flows = [flow for flow in self.flows if flow not in ended]
        return [flow.leg for flow in ended]


def simulate(requests: Sequence[Request], engines: Sequence[Engine], path: Speed) -> dict[int, Seen]:
    """Requests by number, through one engine or from the first to the second of two."""
    first, last = engines[0], engines[-1]
    pair = first is not last
    link = Link(last.speeds.nic, path)
    arrivals = deque(requests)
    legs: list[Leg] = []
    while True:
        arrival_s = arrivals[0].arrival_s if arrivals else inf
        now_s = min(arrival_s, link.next_s(), *(engine.end_s for engine in engines))
        if now_s == inf:
            break
        for engine in engines:
            for prefill in engine.finish() if engine.end_s <= now_s else []:
                decode = Leg(prefill.request, receives=True, partner=prefill)
                last.wants_kv.append(decode)
                legs.append(decode)
        for decode in link.end(now_s):
            assert decode.partner is not None
            first.memory.release(decode.partner)
            decode.done = decode.target
            last.memory.commit(decode)
            last.receiving.remove(decode)
            last.arrived.append(decode)
        while arrivals and arrivals[0].arrival_s <= now_s:
            leg = Leg(arrivals.popleft(), only_prefills=pair)
            first.waiting.append(leg)
            legs += [] if pair else [leg]
        for engine in engines:
            if engine.end_s == inf:
                for decode in engine.receive():
                    size = (decode.target - decode.cached) * engine.speeds.kv_bytes_per_token
                    link.start(decode, size, now_s)
                engine.begin(now_s)
    assert not any(engine.memory.references or engine.memory.loose for engine in engines)
    return {leg.request.number: _seen(leg) for leg in legs}


def _seen(leg: Leg) -> Seen:
    first = leg.partner or leg
    gaps = [after - before for before, after in zip(leg.token_s, leg.token_s[1:], strict=False)]
    longest = sorted(gaps)[-math.ceil(len(gaps) / 10) :] if gaps else [0.0]
    return Seen(
        began_s=first.began_s,
        first_s=leg.token_s[0],
        end_s=leg.token_s[-1],
        itl_s=sum(gaps) / len(gaps) if gaps else 0.0,
        tbt_s=sum(longest) / len(longest),
        cached_tokens=first.cached,
        preemptions=leg.preemptions,
    )
