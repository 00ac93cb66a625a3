"""The books of one rank in plain Python, a dictionary for what is pending and a list of what is active."""

import math
from dataclasses import dataclass

from conductor.costs import InstanceClass
from conductor.costs import tables as t
from conductor.rank import PlacedElsewhere


@dataclass
class Pending:
    predicted_s: float
    tokens: int
    observed: bool


@dataclass
class Active:
    ticket: int
    context_tokens: int
    output_tokens: int
    objective_s: float
    placed_s: float
    long_s: float
    began_s: float = math.inf


class RankOracle:
    """A rank of ``instance_class``; ``row`` is what the load table is to have of it after each change."""

    def __init__(self, instance_class: InstanceClass, tbt_share: float) -> None:
        self.instance_class, self.tbt_share = instance_class, tbt_share
        self.pending: dict[int, Pending] = {}
        self.active: list[Active] = []
        self.pending_s = self.head_since_s = self.placed_s = self.long_s = 0.0
        self.transfers_in = self.transfers_out = self.placements = 0
        self.others: PlacedElsewhere | None = None
        self.row = [0.0] * t.LOAD_COLUMNS
        self.row[t.REPORTED_RUNNING : t.REPORTED_USAGE + 1] = [-1.0] * 3

    # ---- what happens ----

    def place(
        self,
        ticket: int,
        now_s: float,
        *,
        prefill_s: float | None,
        decodes: bool,
        prompt_tokens: int,
        output_tokens: int,
        held_tokens: int,
        plan_tokens: int,
        observed: bool,
        tbt_objective_s: float,
        long_steps: bool,
    ) -> None:
        if prefill_s is not None:
            self._forget_ended(now_s)
            if not self.pending:
                self.head_since_s = now_s
            self.pending[ticket] = Pending(prefill_s, prompt_tokens - plan_tokens, observed)
            self.pending_s += prefill_s
        if decodes:
            if prefill_s is not None:
                self.placed_s += prefill_s
                self.long_s += prefill_s if long_steps else 0.0
            context_tokens = prompt_tokens + output_tokens // 2
            self.active.append(
                Active(ticket, context_tokens, output_tokens, tbt_objective_s, self.placed_s, self.long_s)
            )
        self.placements += 1
        self._write()
        if decodes:
            self._expose(now_s)
        faded = math.exp((self.row[t.STORED_AT_S] - now_s) / t.STORED_MEMORY_S)
        stored_tokens = prompt_tokens - held_tokens + (output_tokens if decodes else 0)
        self.row[t.STORED_TOKENS] = self.row[t.STORED_TOKENS] * faded + stored_tokens
        self.row[t.STORED_AT_S] = now_s

    def end_prefill(self, ticket: int, now_s: float) -> float:
        service_s = math.nan
        self._forget_ended(now_s)
        if ticket in self.pending:
            if next(iter(self.pending)) == ticket:
                service_s, self.head_since_s = now_s - self.head_since_s, now_s
            self._drop(ticket)
        self._write()
        return service_s

    def begin_decode(self, ticket: int, now_s: float, *, prefilled: bool) -> float:
        service_s = self.end_prefill(ticket, now_s) if prefilled else math.nan
        for each in self.active:
            if each.ticket == ticket:
                each.placed_s, each.began_s = self.placed_s - self.queue_s(now_s), now_s
        self._expose(now_s)
        return service_s

    def end_decode(self, ticket: int, now_s: float, *, prefilled: bool = False) -> float:
        ran_s = self.placed_s - self.queue_s(now_s)
        if prefilled:
            self.end_prefill(ticket, now_s)
        borne_s = 0.0
        for i, each in enumerate(self.active):
            if each.ticket == ticket:
                borne_s = max(ran_s - each.placed_s, 0.0)
                self.active[i] = self.active[-1]  # the order matters to sums of floats
                self.active.pop()
                break
        self._write()
        self._expose(now_s)
        return borne_s

    def move(self, taken: int, given: int) -> None:
        self.transfers_in += taken
        self.transfers_out += given
        self._write()

    def place_elsewhere(self, others: PlacedElsewhere | None) -> None:
        self.others = others
        self._write()

    # ---- what is read ----

    def queue_s(self, now_s: float) -> float:
        if not self.pending:
            return 0.0
        head = next(iter(self.pending.values()))
        head_s = self.head_since_s + head.predicted_s - now_s
        rest_s = self.pending_s - head.predicted_s
        if head_s < 0.0 and not head.observed:
            return max(rest_s + head_s, 0.0)
        return max(head_s, 0.0) + max(rest_s, 0.0)

    def under_way(self) -> set[int]:
        return set(self.pending) | {each.ticket for each in self.active}

    # ---- inside ----

    def _forget_ended(self, now_s: float) -> None:
        while self.pending:
            ticket, head = next(iter(self.pending.items()))
            if head.observed or self.head_since_s + head.predicted_s > now_s:
                return
            self.head_since_s += head.predicted_s
            self._drop(ticket)

    def _drop(self, ticket: int) -> None:
        dropped = self.pending.pop(ticket)
        self.pending_s = self.pending_s - dropped.predicted_s if self.pending else 0.0

    def _write(self) -> None:
        head = next(iter(self.pending.values()), None)
        since_s, head_s, observed, rest_s = self.head_since_s, 0.0, False, 0.0
        if head is not None:
            head_s, observed = head.predicted_s, head.observed
            rest_s = self.pending_s - head_s
        counts = [
            len(self.pending),
            sum(each.tokens for each in self.pending.values()),
            len(self.active),
            sum(each.context_tokens for each in self.active),
            self.transfers_in,
            self.transfers_out,
        ]
        others = self.others
        if others is not None:
            if head is not None:
                rest_s += others.queue_s
            else:
                since_s, head_s = others.at_s, others.queue_s
            told = (
                *(others.prefills, others.prefill_tokens, others.decodes, others.context_tokens),
                *(others.transfers_in, others.transfers_out),
            )
            counts = [own + more for own, more in zip(counts, told, strict=True)]
        self.row[: t.HARM] = [since_s, head_s, observed, rest_s, *counts, self.placements]

    def _expose(self, now_s: float) -> None:
        c = self.instance_class
        step_s = (
            c.decode_base_s
            + c.decode_s_per_sequence * self.row[t.ACTIVE_DECODES]
            + c.decode_s_per_context_token * self.row[t.CONTEXT_TOKENS]
        )
        self.row[t.HARM : t.REPORTED_RUNNING] = [self._harm(step_s, at_s, now_s) for at_s in t.HARM_AT_S]

    def _harm(self, step_s: float, prefill_s: float, now_s: float) -> float:
        """Each with the probability that its answer, so far, does not become as long as it would have to."""
        queue_s, harm = self._queue_of_all_s(now_s), 0.0
        for each in self.active:
            spare_s = self.tbt_share * (each.objective_s - step_s)
            if spare_s <= 0.0:
                continue
            age = 0.0
            if each.began_s < now_s:
                ran_s = max(self.placed_s - each.placed_s - queue_s, 0.0)
                age = max(now_s - each.began_s - ran_s, 0.0) / step_s
            needed = (self.long_s - each.long_s) / spare_s
            survives_now = math.exp(-max(needed - age, 0.0) / each.output_tokens)
            survives = math.exp(-max(needed + prefill_s / spare_s - age, 0.0) / each.output_tokens)
            harm += survives_now - survives
        return harm

    def _queue_of_all_s(self, now_s: float) -> float:
        """With what others have placed."""
        since_s, head_s, observed, rest_s, pending = self.row[: t.PENDING_PREFILLS + 1]
        left_s = since_s + head_s - now_s
        if not pending:
            return 0.0
        if left_s < 0.0 and not observed:
            return max(rest_s + left_s, 0.0)
        return max(left_s, 0.0) + max(rest_s, 0.0)
