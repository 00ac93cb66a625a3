"""One simulated engine: continuous batching whose decodes advance in closed form between events.

Each step decodes a token of every running request and fills what the budget leaves with prompt chunks, first come,
first served. A step takes ``max(base, prompts) + c1 * decodes + c2 * context``, where ``prompts`` are the prefill
terms of the instance class for the chunks in it: reading the weights hides behind the chunks' compute. So a prompt
alone takes `InstanceClass.prefill_s` unless a chunk of it is tiny, and a step without chunks
`InstanceClass.decode_step_s`. Such steps grow evenly, by ``c2 * decodes`` each, hence ``k`` of them take
``k * first + growth * k * (k - 1) / 2``.

The driver calls `begin` whenever something changed, and `finish` at the time that it returned.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from math import inf

from conductor.costs import InstanceClass
from simulator.cluster.kv_memory import Hashes, KvMemory
from simulator.cluster.step_log import StepLog, longest_tenth_s


class Leg(Enum):
    """What an engine does of a request."""

    WHOLE = "whole"
    PREFILL = "prefill"  # the KV cache is then held until `SimulatedEngine.handed_off`
    DECODE = "decode"  # the KV cache comes from elsewhere


@dataclass(eq=False, slots=True)
class Work:
    """One leg of a request on one engine. ``keys`` are ``hashes`` as integers: the prompt's full blocks.

    An engine that takes the KV cache from elsewhere computes the prompt's last token, and says the first of the
    answer.
    """

    number: int  # of the request
    leg: Leg
    prompt_tokens: int
    output_tokens: int
    hashes: Hashes
    keys: list[int]
    # What the engine keeps:
    began_s: float = inf
    computed: int = 0
    cached_tokens: int = 0
    committed: int = 0  # blocks
    loose_tokens: int = 0
    first_token_s: float = inf
    log_start: int = 0
    itl_s: float = 0.0  # mean gap between tokens
    tbt_s: float = 0.0  # mean of the longest tenth of them

    @property
    def tokens(self) -> int:
        """Room that it takes: the prompt and, where the answer is decoded, that."""
        return self.prompt_tokens + (self.output_tokens if self.leg is not Leg.PREFILL else 0)


@dataclass(slots=True)
class Progress:
    """What the steps that ended brought about."""

    prefilled: list[Work] = field(default_factory=list)  # prefill legs
    first_tokens: list[Work] = field(default_factory=list)
    finished: list[Work] = field(default_factory=list)


@dataclass(slots=True)
class _Run:
    """Equal batches in a row; more than one step only without prompt chunks."""

    start_s: float
    steps: int
    first_s: float
    growth_s: float
    chunks: list[tuple[Work, int]]

    def end_s(self, steps: int) -> float:
        return self.start_s + steps * self.first_s + self.growth_s * (steps * (steps - 1) / 2)

    def steps_until(self, now_s: float) -> int:
        """The least number of steps that end at ``now_s`` or later."""
        elapsed_s, half = now_s - self.start_s, self.growth_s / 2
        linear = self.first_s - half
        root = math.sqrt(linear * linear + 4 * half * max(elapsed_s, 0.0))
        steps = max(min(math.ceil(2 * elapsed_s / (linear + root)), self.steps), 1)
        # The root is exact but for rounding.
        while steps > 1 and self.end_s(steps - 1) >= now_s:
            steps -= 1
        while steps < self.steps and self.end_s(steps) < now_s:
            steps += 1
        return steps


class SimulatedEngine:
    """``step_by_step`` never takes two steps at once: slow, and the oracle of the closed form."""

    def __init__(
        self,
        instance_class: InstanceClass,
        memory: KvMemory,
        *,
        sequences: int = 256,
        step_by_step: bool = False,
    ) -> None:
        self.instance_class = instance_class
        self.memory = memory
        self.sequences = sequences
        self.step_by_step = step_by_step
        self.busy_s = 0.0
        self.computed_tokens = 0  # of prompts
        self.runs = 0
        self._waiting: deque[Work] = deque()
        self._wants_kv: deque[Work] = deque()
        self._fetches: list[Work] = []
        self._receiving: set[Work] = set()
        self._arrived: deque[Work] = deque()
        self._prefilling: deque[Work] = deque()  # begun; only the last may lack a chunk of the next step
        self._decoding: list[tuple[int, int, Work]] = []  # heap: step after which it ends, request number
        self._silent: list[Work] = []  # decoding, no token yet
        self._steps = 0
        self._context_tokens = 0  # of all decodes, in the next step
        self._run: _Run | None = None
        self._end_s = inf
        self._log = StepLog()

    @property
    def running(self) -> int:
        """Requests in the batch or on their way into it."""
        return len(self._prefilling) + len(self._decoding) + len(self._receiving) + len(self._arrived)

    @property
    def waiting(self) -> int:
        return len(self._waiting) + len(self._wants_kv)

    @property
    def end_s(self) -> float:
        """When what it computes now ends; infinity if it computes nothing."""
        return self._end_s

    def fits(self, tokens: int) -> bool:
        """Whether that many tokens could ever be held."""
        return tokens <= self.memory.capacity_tokens

    def submit(self, work: Work) -> None:
        """Queue a leg. Raises ValueError for one that can never fit."""
        if not self.fits(work.tokens):
            raise ValueError(f"{work.tokens} tokens never fit {self.memory.capacity_tokens}")
        (self._wants_kv if work.leg is Leg.DECODE else self._waiting).append(work)

    def begin(self, now_s: float) -> float:
        """Something was submitted, or has arrived, or has ended: when to call `finish` next, infinity for never.

        Steps under way are finished first; a longer run of them is cut short. Then ask `take_fetches`.
        """
        if self._run is None:
            self._admit_fetches()
            self._run = self._next_run(now_s)
        elif self._run.steps > 1:
            self._run.steps = self._run.steps_until(now_s)
        else:
            return self._end_s
        self._end_s = self._run.end_s(self._run.steps) if self._run is not None else inf
        return self._end_s

    def take_fetches(self) -> list[Work]:
        """Decode legs that have room now: fetch what is not in ``cached_tokens``, then call `received`."""
        fetches, self._fetches = self._fetches, []
        return fetches

    def received(self, work: Work) -> None:
        """The KV cache of a decode leg is here."""
        self._receiving.remove(work)
        self._commit(work, work.prompt_tokens)
        self._arrived.append(work)

    def handed_off(self, work: Work) -> None:
        """The KV cache of a prefill leg was read: its room is free."""
        self._release(work)

    def finish(self) -> Progress:
        """The steps under way have ended."""
        run = self._run
        assert run is not None, "nothing is under way"
        now_s = self._end_s
        self._run, self._end_s = None, inf
        progress = Progress()
        self.busy_s += now_s - run.start_s
        self.runs += 1
        self._steps += run.steps
        if self._decoding:
            self._decoded(run, now_s, progress)
        for work, count in run.chunks:
            self._computed(work, count, now_s, progress)
        return progress

    def _admit_fetches(self) -> None:
        while self._wants_kv and self.running < self.sequences and self._take_room(self._wants_kv[0]):
            work = self._wants_kv.popleft()
            self._receiving.add(work)
            self._fetches.append(work)

    def _next_run(self, now_s: float) -> _Run | None:
        """The next batch; None when there is nothing to compute."""
        while self._arrived:
            self._decode(self._arrived[0], self._arrived[0].output_tokens, self._arrived[0].prompt_tokens)
            self._silent.append(self._arrived.popleft())
        speeds, decodes = self.instance_class, len(self._decoding)
        decode_s = (
            speeds.decode_s_per_sequence * decodes + speeds.decode_s_per_context_token * self._context_tokens
        )
        chunks, prompts_s = self._next_chunks(now_s, speeds.chunk_tokens - decodes)
        if chunks:
            return _Run(now_s, 1, max(speeds.decode_base_s, prompts_s) + decode_s, 0.0, chunks)
        if not decodes:
            return None
        steps = 1 if self._silent or self.step_by_step else self._decoding[0][0] - self._steps
        growth_s = speeds.decode_s_per_context_token * decodes
        return _Run(now_s, steps, speeds.decode_base_s + decode_s, growth_s, chunks)

    def _next_chunks(self, now_s: float, budget: int) -> tuple[list[tuple[Work, int]], float]:
        """Prompt chunks within a budget of tokens, and the seconds that they take alone."""
        chunks: list[tuple[Work, int]] = []
        speeds, seconds = self.instance_class, 0.0
        begun = iter(list(self._prefilling))
        while budget > 0:
            work = next(begun, None)
            if work is None:
                if (
                    not self._waiting
                    or self.running >= self.sequences
                    or not self._take_room(self._waiting[0])
                ):
                    break
                work = self._waiting.popleft()
                work.began_s, work.computed = now_s, work.cached_tokens
                self._prefilling.append(work)
                seconds += speeds.prefill_base_s + speeds.prefill_s_per_cached_token * work.cached_tokens
            count = min(work.prompt_tokens - work.computed, budget)
            seconds += speeds.prefill_s_per_token * count
            seconds += speeds.prefill_s_per_token_squared * count * (2 * work.computed + count)
            chunks.append((work, count))
            budget -= count
        return chunks, seconds

    def _decoded(self, run: _Run, now_s: float, progress: Progress) -> None:
        if self._log.full:
            self._log.forget(
                min((w.log_start for _, _, w in self._decoding if w.first_token_s < inf), default=0)
            )
        self._log.add(run.steps, run.first_s, run.growth_s)
        self._context_tokens += run.steps * len(self._decoding)
        for work in self._silent:
            self._speak(work, now_s, progress)
        self._silent.clear()
        while self._decoding and self._decoding[0][0] <= self._steps:
            work = heapq.heappop(self._decoding)[2]
            self._context_tokens -= work.prompt_tokens + work.output_tokens
            self._end(work, now_s, progress)

    def _computed(self, work: Work, count: int, now_s: float, progress: Progress) -> None:
        work.computed += count
        self.computed_tokens += count
        self._commit(work, work.computed)
        if work.computed < work.prompt_tokens:
            return
        self._prefilling.remove(work)
        if work.leg is Leg.PREFILL:
            progress.prefilled.append(work)
            return
        self._speak(work, now_s, progress)
        if work.output_tokens == 1:
            self._end(work, now_s, progress)
        else:
            self._decode(work, work.output_tokens - 1, work.prompt_tokens + 1)

    def _decode(self, work: Work, steps: int, context_tokens: int) -> None:
        heapq.heappush(self._decoding, (self._steps + steps, work.number, work))
        self._context_tokens += context_tokens

    def _speak(self, work: Work, now_s: float, progress: Progress) -> None:
        work.first_token_s, work.log_start = now_s, self._log.end
        progress.first_tokens.append(work)

    def _end(self, work: Work, now_s: float, progress: Progress) -> None:
        if work.output_tokens > 1:
            work.itl_s = (now_s - work.first_token_s) / (work.output_tokens - 1)
            work.tbt_s = longest_tenth_s(self._log.gaps_s(work.log_start))
        self._release(work)
        progress.finished.append(work)

    def _take_room(self, work: Work) -> bool:
        # The last prompt token is always computed, with its block.
        usable = (work.prompt_tokens - 1) // self.memory.block_tokens
        matched = self.memory.matched_blocks(work.keys, usable)
        if not self.memory.take(work.keys, matched, work.tokens):
            return False
        work.committed = matched
        work.cached_tokens = matched * self.memory.block_tokens
        work.loose_tokens = work.tokens - work.cached_tokens
        return True

    def _commit(self, work: Work, tokens: int) -> None:
        stop = min(tokens // self.memory.block_tokens, len(work.keys))
        if stop > work.committed:
            self.memory.commit(work.keys, work.hashes, work.committed, stop)
            work.loose_tokens -= (stop - work.committed) * self.memory.block_tokens
            work.committed = stop

    def _release(self, work: Work) -> None:
        self.memory.release(work.keys, work.committed, work.loose_tokens)
