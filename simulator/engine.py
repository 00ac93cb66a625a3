"""Continuous batching over a paged KV cache, without I/O: requests in, timed steps out.

The driver alternates `Engine.schedule`, which forms a batch and says how long it takes, and
`Engine.finish_step`, which yields its tokens and KV events. In between, requests may be submitted or aborted
and pulls may end. As in vLLM: running sequences first, in order of arrival, then waiting ones, within a token
budget per step (long prompts go in chunks); when blocks run out the youngest running sequence is preempted and
recomputed later; new requests are not admitted in a step that preempted.

What a sequence will say is given at submission, so the engine only decides when.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import inf

from simulator.kv_cache import KvCache, KvEvent
from simulator.performance import PerformanceModel
from simulator.sequence import Sequence, State, Submission


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Batch and lease limits. ``lease_s`` is how long a prefilled KV cache waits for its decode instance."""

    step_tokens: int = 8192
    sequences: int = 256
    lease_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Lease:
    """Blocks held for a decode instance until it has read them or ``expires_s``."""

    tokens: int
    blocks: tuple[int, ...]
    expires_s: float


@dataclass(slots=True)
class EngineCounters:
    """Running totals, in tokens where not said otherwise."""

    prefix_queries: int = 0
    prefix_hits: int = 0
    pulled: int = 0
    prompt: int = 0
    generated: int = 0
    preemptions: int = 0  # times
    expired_leases: int = 0  # times


@dataclass(frozen=True, slots=True)
class StepOutput:
    """``produced``: sequences with one more token, in batch order. ``events`` in publishing order."""

    produced: list[Sequence]
    events: list[KvEvent]


@dataclass(slots=True)
class _Batch:
    """The step being formed."""

    budget: int
    chunks: list[tuple[Sequence, int]] = field(default_factory=list)
    decodes: int = 0
    context_tokens: int = 0
    prefill_s: float = 0.0


class Engine:
    """One engine (one data-parallel rank). All times are seconds of the caller's clock."""

    def __init__(
        self, performance: PerformanceModel, cache: KvCache, limits: EngineLimits | None = None
    ) -> None:
        self.performance = performance
        self.cache = cache
        self.limits = limits or EngineLimits()
        self.counters = EngineCounters()
        self._waiting: deque[Sequence] = deque()
        self._pulled: deque[Sequence] = deque()  # own their blocks already, so they go first
        self._pulling: dict[str, Sequence] = {}
        self._to_pull: list[Sequence] = []
        self._running: list[Sequence] = []
        self._alive: dict[str, Sequence] = {}
        self._leases: dict[str, Lease] = {}
        self._batch: list[tuple[Sequence, int]] | None = None

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting) + len(self._pulled) + len(self._pulling)

    @property
    def stepping(self) -> bool:
        """Whether a step is under way, whose end brings the KV events."""
        return self._batch is not None

    @property
    def load_tokens(self) -> int:
        """Tokens of all unfinished requests, for choosing the least loaded rank."""
        return sum(len(sequence.tokens) for sequence in self._alive.values())

    def submit(self, submission: Submission) -> Sequence:
        """Queue a sequence; ValueError if its id is in use, it says nothing, or it can never fit."""
        if not submission.prompt or not submission.output:
            raise ValueError("a sequence needs a prompt and an output")
        if submission.request_id in self._alive or submission.request_id in self._leases:
            raise ValueError(f"request id {submission.request_id!r} is in use")
        if self._blocks_for(len(submission.prompt) + len(submission.output)) > self.cache.blocks:
            raise ValueError("the sequence does not fit the KV cache")
        sequence = Sequence(submission, self.cache.block_size)
        self._alive[sequence.request_id] = sequence
        self._waiting.append(sequence)
        return sequence

    def abort(self, request_id: str) -> bool:
        """Drop a request and free its blocks at once; False if it is not there (any more)."""
        sequence = self._alive.pop(request_id, None)
        if sequence is None:
            return False
        if sequence.state is State.RUNNING:
            self._running.remove(sequence)
        elif sequence.state is State.PULLING:
            del self._pulling[request_id]
            self._to_pull = [other for other in self._to_pull if other is not sequence]
        elif sequence in self._pulled:
            self._pulled.remove(sequence)
        else:
            self._waiting.remove(sequence)
        sequence.state = State.ABORTED
        self._release(sequence)
        return True

    def take_pulls(self) -> list[Sequence]:
        """Sequences whose KV cache is to be fetched now; answer each with `pull_finished` or `abort`."""
        pulls, self._to_pull = self._to_pull, []
        return pulls

    def pull_finished(self, request_id: str) -> None:
        """The KV cache of a pulling sequence has arrived. No effect if the sequence is gone."""
        sequence = self._pulling.pop(request_id, None)
        if sequence is None:
            return
        self.counters.pulled += sequence.pull_tokens
        received = sequence.computed + sequence.pull_tokens
        self._commit(sequence, received)
        sequence.computed = min(received, len(sequence.tokens) - 1)
        sequence.pulled = True
        sequence.state = State.WAITING
        self._pulled.append(sequence)

    def lease(self, request_id: str) -> Lease | None:
        return self._leases.get(request_id)

    def release_lease(self, request_id: str) -> bool:
        """The decode instance has read the blocks; False if the lease is gone."""
        lease = self._leases.pop(request_id, None)
        if lease is None:
            return False
        self.cache.release(lease.blocks)
        return True

    @property
    def next_expiry_s(self) -> float:
        """When the next lease expires; infinity if there is none."""
        return min((lease.expires_s for lease in self._leases.values()), default=inf)

    def schedule(self, now_s: float) -> float | None:
        """Form the next batch; its duration in seconds, or None if there is nothing to compute.

        Pulls to start may have become available either way (`take_pulls`).
        """
        if self._batch is not None:
            raise RuntimeError("the last step is not finished")
        self._expire_leases(now_s)
        batch = _Batch(self.limits.step_tokens)
        if self._schedule_running(batch):
            self._admit_pulled(batch)
            self._admit_waiting(batch)
        if not batch.chunks:
            return None
        self._batch = batch.chunks
        return self.performance.step_s(batch.decodes, batch.context_tokens, batch.prefill_s)

    def finish_step(self, now_s: float) -> StepOutput:
        """The scheduled batch is computed: its tokens, and the KV events gathered since the last step."""
        if self._batch is None:
            raise RuntimeError("no step is scheduled")
        batch, self._batch = self._batch, None
        produced = []
        ended = False
        for sequence, count in batch:
            if sequence.state is not State.RUNNING:
                continue  # aborted meanwhile
            sequence.computed += count
            if sequence.computed < len(sequence.tokens):
                continue  # a chunk of a longer prompt
            sequence.tokens.append(sequence.submission.output[sequence.produced])
            sequence.produced += 1
            produced.append(sequence)
            if sequence.produced == len(sequence.submission.output):
                self._finish(sequence, now_s)
                ended = True
        if ended:
            self._running = [sequence for sequence in self._running if sequence.state is State.RUNNING]
        self.counters.generated += len(produced)
        return StepOutput(produced, self.cache.drain_events())

    def check_invariants(self) -> None:
        """Assert that every referenced block belongs to a live sequence or a lease."""
        self.cache.check_invariants()
        held = sum(len(sequence.blocks) for sequence in self._alive.values())
        held += sum(len(lease.blocks) for lease in self._leases.values()) + self.cache.pinned_blocks
        assert held == sum(self.cache.references()), "references without an owner"
        states = [*self._waiting, *self._pulled, *self._pulling.values(), *self._running]
        assert len(states) == len(self._alive) == len({id(sequence) for sequence in states})
        for sequence in self._running:
            assert sequence.computed <= len(sequence.blocks) * self.cache.block_size

    def _schedule_running(self, batch: _Batch) -> bool:
        """Give running sequences their tokens; False if one had to be preempted."""
        calm = True
        index = 0
        while index < len(self._running) and batch.budget:
            sequence = self._running[index]
            count = min(len(sequence.tokens) - sequence.computed, batch.budget)
            needed = self._blocks_for(sequence.computed + count) - len(sequence.blocks)
            while needed > self.cache.free_blocks and len(self._running) > index:
                self._preempt(self._running.pop())
                calm = False
            if len(self._running) == index:
                break
            self._add(batch, sequence, count, needed)
            index += 1
        return calm

    def _admit_pulled(self, batch: _Batch) -> None:
        while self._pulled and batch.budget and len(self._running) < self.limits.sequences:
            sequence = self._pulled[0]
            count = min(len(sequence.tokens) - sequence.computed, batch.budget)
            needed = self._blocks_for(sequence.computed + count) - len(sequence.blocks)
            if needed > self.cache.free_blocks:
                break
            self._pulled.popleft()
            self._run(batch, sequence, count, needed)

    def _admit_waiting(self, batch: _Batch) -> None:
        while self._waiting and batch.budget and len(self._running) < self.limits.sequences:
            sequence = self._waiting[0]
            hit = self.cache.lookup(sequence.chain)
            loaded = self._in_host(sequence, len(hit))
            hit_tokens = (len(hit) + loaded) * self.cache.block_size
            pull = sequence.submission.remote is not None and not sequence.pulled
            missing = len(sequence.tokens) - hit_tokens
            count = missing if pull else min(missing, batch.budget)
            needed = self._blocks_for(hit_tokens + count) - len(hit)
            if needed + self.cache.evictable(hit) > self.cache.free_blocks:
                break
            self._waiting.popleft()
            self.cache.acquire(hit)
            sequence.blocks = hit + self.cache.allocate(loaded)
            sequence.computed = hit_tokens
            sequence.committed = len(hit)
            self._count_hit(sequence, hit_tokens)
            self._commit(sequence, hit_tokens)
            batch.prefill_s += self.performance.host_load_s(loaded * self.cache.block_size)
            if pull:
                self._start_pull(sequence, needed - loaded)
            else:
                batch.prefill_s += self.performance.cached_prefix_s(hit_tokens)
                self._run(batch, sequence, count, needed - loaded)

    def _in_host(self, sequence: Sequence, first: int) -> int:
        """How many blocks behind the ``first`` on the device are in the host's memory."""
        host = self.cache.host
        return 0 if host is None else host.run(sequence.chain, first, sequence.chain.usable_blocks())

    def _count_hit(self, sequence: Sequence, hit_tokens: int) -> None:
        self.counters.prefix_queries += len(sequence.tokens)
        self.counters.prefix_hits += hit_tokens
        if sequence.submission.report_hits:
            for index in range(sequence.committed):
                self.cache.report_hit(sequence.chain, index, sequence.submission.session_id)
        if sequence.cached_tokens is not None:
            return  # recomputed after a preemption
        # vLLM's NIXL connector reports 0 cached tokens for what was pulled. Here the prefill instance's own
        # hit is passed on, so that a client sees the reuse of the whole path.
        remote = sequence.submission.remote
        sequence.cached_tokens = max(hit_tokens, remote.cached_tokens if remote else 0)
        self.counters.prompt += len(sequence.submission.prompt)

    def _start_pull(self, sequence: Sequence, needed: int) -> None:
        sequence.blocks = sequence.blocks + self.cache.allocate(needed)
        sequence.state = State.PULLING
        self._pulling[sequence.request_id] = sequence
        self._to_pull.append(sequence)

    def _run(self, batch: _Batch, sequence: Sequence, count: int, needed: int) -> None:
        sequence.state = State.RUNNING
        self._running.append(sequence)
        self._add(batch, sequence, count, needed)

    def _add(self, batch: _Batch, sequence: Sequence, count: int, needed: int) -> None:
        if needed > 0:
            sequence.blocks.extend(self.cache.allocate(needed))
        self._commit(sequence, sequence.computed + count)
        batch.budget -= count
        batch.chunks.append((sequence, count))
        if count == 1:
            batch.decodes += 1
            batch.context_tokens += sequence.computed + 1
        else:
            batch.prefill_s += self.performance.prefill_s(count, sequence.computed)

    def _commit(self, sequence: Sequence, tokens: int) -> None:
        """Make the full blocks among the first ``tokens`` tokens findable."""
        for index in range(sequence.committed, tokens // self.cache.block_size):
            self.cache.commit(sequence.blocks[index], sequence.chain, index, sequence.submission.session_id)
            sequence.committed = index + 1

    def _preempt(self, sequence: Sequence) -> None:
        self._release(sequence)
        sequence.computed = sequence.committed = 0
        sequence.state = State.WAITING
        self._waiting.appendleft(sequence)
        self.counters.preemptions += 1

    def _finish(self, sequence: Sequence, now_s: float) -> None:
        sequence.state = State.FINISHED
        del self._alive[sequence.request_id]
        if sequence.submission.lease_kv:
            prompt_tokens = len(sequence.submission.prompt)
            self._leases[sequence.request_id] = Lease(
                prompt_tokens, tuple(sequence.blocks), now_s + self.limits.lease_s
            )
        else:
            self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        self.cache.release(sequence.blocks)
        sequence.blocks = []

    def _expire_leases(self, now_s: float) -> None:
        for request_id in [key for key, lease in self._leases.items() if lease.expires_s <= now_s]:
            self.release_lease(request_id)
            self.counters.expired_leases += 1

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.cache.block_size)
