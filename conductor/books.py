"""What is under way, in the books of the ranks: work and transfers reserved, released, and learned from."""

from __future__ import annotations

from math import isnan

from conductor.cluster import Cluster, InstanceState
from conductor.costs import Calibration, InstanceClass
from conductor.costs.rank_books import rank_kernels
from conductor.costs.tables import ACTIVE_DECODES, CONTEXT_TOKENS
from conductor.explanation import PlacementRecord
from conductor.prefix_lookup import PrefixLookup
from conductor.rank import RankState

# Shorter answers say more about the first step than about the pace.
_MIN_OBSERVED_TOKENS = 8


class Books:
    """Reservations of placements, and the calibration that their course teaches."""

    def __init__(
        self,
        cluster: Cluster,
        lookup: PrefixLookup,
        calibrations: dict[str, Calibration] | None,
        tbt_share: float,
    ) -> None:
        self.calibrations = calibrations if calibrations is not None else {}
        self._cluster = cluster
        self._lookup = lookup
        self._tbt_share = tbt_share
        self._tickets = 0
        kernels = rank_kernels()
        self._place, self._advance, self._end = kernels.place, kernels.advance, kernels.end
        self._move, self._borne_s = kernels.move, kernels.borne_s
        for instance in cluster:
            self.apply(instance.instance_class)

    def calibration(self, instance_class: InstanceClass) -> Calibration:
        """What was learned of a class of instances."""
        learned = self.calibrations.get(instance_class.name)
        if learned is None:
            learned = self.calibrations[instance_class.name] = Calibration()
        return learned

    def apply(self, instance_class: InstanceClass) -> None:
        """Let estimates use what was learned."""
        self._use(self.calibration(instance_class), instance_class)

    def _use(self, learned: Calibration, instance_class: InstanceClass) -> None:
        self._cluster.tables.calibrate(instance_class, learned.prefill.factor, learned.decode.factor)

    def reserve(self, record: PlacementRecord, now_s: float) -> None:
        """Book the work and the transfers of a placement, so that the next decision sees them."""
        placement, request = record.placement, record.request
        plan, rank, decode = placement.plan, record.prefill, record.decode
        self._tickets = record.ticket = ticket = self._tickets + 1
        whole = decode is rank
        if self._place(
            rank.address,
            now_s,
            self._tbt_share,
            ticket,
            True,  # prefills here
            whole,  # decodes here
            request.prompt_tokens,
            record.output_tokens,
            placement.overlap_tokens,
            plan.tokens,
            plan.prefill_s,
            request.streamed or not whole,  # its end shows when the first token streams or when it hands off
            record.tbt_objective_s,
            record.long_steps,
        ):
            rank.grow()
        if not whole and self._place(
            decode.address,
            now_s,
            self._tbt_share,
            ticket,
            False,  # prefills there
            True,
            request.prompt_tokens,
            record.output_tokens,
            record.held_by_decode,
            plan.tokens,
            0.0,
            False,
            record.tbt_objective_s,
            False,
        ):
            decode.grow()
        if record.peer is not None:
            self.transfer(record, record.peer, rank)
        if plan.fetch_s > 0.0:
            self._cluster.load(rank, plan, now_s)
        if record.cache_group is not None:
            self._lookup.prefill_begins(placement.placement_id, request, record.cache_group, rank.holder)

    def transfer(self, record: PlacementRecord, giver: RankState, taker: RankState) -> None:
        """A transfer begins: a fetch with the placement, a hand-off when the prefill has ended."""
        record.transfer = (giver, taker)
        self._move(giver.address, 0, 1)
        self._move(taker.address, 1, 0)

    def end_transfer(self, record: PlacementRecord) -> None:
        """What was on a link for it has arrived, or never will."""
        if record.transfer is not None:
            giver, taker = record.transfer
            record.transfer = None
            self._move(giver.address, 0, -1)
            self._move(taker.address, -1, 0)

    def end_prefill(self, record: PlacementRecord, now_s: float, *, learn: bool) -> None:
        """Release the prefill reservation; its service time teaches the calibration if ``learn``."""
        self._lookup.prefill_ended(record.placement.placement_id)
        service_s = self._advance(record.prefill.address, now_s, self._tbt_share, record.ticket, True, False)
        if learn:
            self._learn_prefill(record, service_s)

    def begin_decode(self, record: PlacementRecord, now_s: float, *, learn: bool) -> None:
        """The first token of the answer is out, so the prefill has ended, if that was not told before."""
        rank = record.decode
        if record.prefill is not rank:
            self.end_prefill(record, now_s, learn=learn)
            self._advance(rank.address, now_s, self._tbt_share, record.ticket, False, True)
            return
        self._lookup.prefill_ended(record.placement.placement_id)
        service_s = self._advance(rank.address, now_s, self._tbt_share, record.ticket, True, True)
        if learn:
            self._learn_prefill(record, service_s)

    def end(self, record: PlacementRecord, now_s: float, *, prefilling: bool, learn: bool) -> None:
        """Release what is still taken; the pace of the decode teaches the calibration if ``learn``.

        ``prefilling``: nobody told that its prefill has ended.
        """
        if learn:
            self._learn_decode(record, now_s)
        rank, whole = record.decode, record.decode is record.prefill
        if prefilling:
            if whole:
                self._lookup.prefill_ended(record.placement.placement_id)
            else:
                self.end_prefill(record, now_s, learn=False)
        self._end(rank.address, now_s, self._tbt_share, record.ticket, prefilling and whole)

    def _learn_prefill(self, record: PlacementRecord, service_s: float) -> None:
        """From its service time; NaN: that is not known."""
        placement = record.placement
        instance = self._cluster.get(placement.prefill.instance_id)
        if instance is not None and not isnan(service_s):
            calibration = self.calibration(instance.instance_class)
            # Without the factor of the moment of the placement, which may be long ago.
            calibration.observe_prefill(placement.plan.prefill_s / record.prefill_factor, service_s)
            self._use(calibration, instance.instance_class)

    def _learn_decode(self, record: PlacementRecord, now_s: float) -> None:
        """The mean gap between a streamed answer's tokens, beside what the decode rank's load predicts.

        The load changed while the answer ran, so the prediction is the mean of those at its first and last token.
        Prefills that ran beside it say nothing about the pace of decoding.
        """
        usage, started_s = record.usage, record.first_token_s
        instance = self._cluster.get(record.placement.decode.instance_id)
        if (
            usage is None
            or usage.output_tokens is None
            or usage.output_tokens < _MIN_OBSERVED_TOKENS
            or started_s is None
            or record.raw_step_at_first_token_s is None
            or instance is None
        ):
            return
        borne_s = self._borne_s(record.decode.address, now_s, record.ticket)
        observed_s = max(now_s - started_s - borne_s, 0.0) / (usage.output_tokens - 1)
        calibration = self.calibration(instance.instance_class)
        raw_s = 0.5 * (record.raw_step_at_first_token_s + self.raw_step_s(record.decode, instance))
        calibration.observe_decode(raw_s, observed_s)
        self._use(calibration, instance.instance_class)

    def step_s(self, rank: RankState, instance: InstanceState) -> float:
        """A decode step of what is on ``rank`` now."""
        return self.calibration(instance.instance_class).decode.factor * self.raw_step_s(rank, instance)

    @staticmethod
    def raw_step_s(rank: RankState, instance: InstanceState) -> float:
        """`step_s` by the catalogue alone."""
        c, head = instance.instance_class, rank.head
        return (
            c.decode_base_s
            + c.decode_s_per_sequence * head[ACTIVE_DECODES]
            + c.decode_s_per_context_token * head[CONTEXT_TOKENS]
        )
