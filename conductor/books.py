"""What is under way, in the books of the ranks: work and transfers reserved, released, and learned from."""

from __future__ import annotations

from conductor.cluster import Cluster, InstanceState
from conductor.costs import Calibration, InstanceClass
from conductor.explanation import PlacementRecord
from conductor.prefix_lookup import PrefixLookup
from conductor.rank import PendingPrefill, RankState

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
        placement_id, plan, cluster = placement.placement_id, placement.plan, self._cluster
        prompt_tokens, output_tokens, prefill_s = request.prompt_tokens, record.output_tokens, plan.prefill_s
        rank, decode = record.prefill, record.decode
        whole = decode is rank
        # Its end shows when the first token streams or when it hands off.
        observed = request.streamed or placement.disaggregated
        rank.add_prefill(
            placement_id, PendingPrefill(prefill_s, prompt_tokens - plan.tokens, observed), now_s
        )
        decode.decodes[placement_id] = context_tokens = prompt_tokens + output_tokens // 2
        decode.context_tokens += context_tokens
        decode.exposure.placed(
            placement_id,
            prefill_s if whole else 0.0,
            output_tokens,
            record.tbt_objective_s,
            record.long_steps,
        )
        rank.placements += 1
        if not whole:
            decode.placements += 1
            cluster.write(rank)
        cluster.settle(decode, self._tbt_share, now_s)
        if not whole:
            cluster.store(rank, prompt_tokens - placement.overlap_tokens, now_s)
        cluster.store(decode, prompt_tokens - record.held_by_decode + output_tokens, now_s)
        if record.peer is not None:
            self.transfer(record, record.peer, rank)
        if plan.fetch_s > 0.0:
            cluster.load(rank, plan, now_s)
        if record.cache_group is not None:
            self._lookup.prefill_begins(placement_id, request, record.cache_group, rank.holder)

    def transfer(self, record: PlacementRecord, giver: RankState, taker: RankState) -> None:
        """A transfer begins: a fetch with the placement, a hand-off when the prefill has ended."""
        record.transfer = (giver, taker)
        giver.transfers_out += 1
        taker.transfers_in += 1
        self._cluster.write(giver)
        self._cluster.write(taker)

    def end_transfer(self, record: PlacementRecord) -> None:
        """What was on a link for it has arrived, or never will."""
        if record.transfer is not None:
            giver, taker = record.transfer
            record.transfer = None
            giver.transfers_out -= 1
            taker.transfers_in -= 1
            self._cluster.write(giver)
            self._cluster.write(taker)

    def end_prefill(self, record: PlacementRecord, now_s: float, *, learn: bool) -> None:
        """Release the prefill reservation; its service time teaches the calibration if ``learn``."""
        placement, rank = record.placement, record.prefill
        self._lookup.prefill_ended(placement.placement_id)
        pending = len(rank.prefills)
        if not pending:
            return
        service_s = rank.end_prefill(placement.placement_id, now_s)
        if len(rank.prefills) != pending:
            self._cluster.write(rank)
        if not learn or service_s is None:
            return
        instance = self._cluster.get(placement.prefill.instance_id)
        if instance is not None:
            calibration = self.calibration(instance.instance_class)
            # Without the factor of the moment of the placement, which may be long ago.
            calibration.observe_prefill(placement.plan.prefill_s / record.prefill_factor, service_s)
            self._use(calibration, instance.instance_class)

    def begin_decode(self, record: PlacementRecord, now_s: float) -> None:
        """The first token of the answer is out."""
        rank = record.decode
        rank.exposure.began(
            record.placement.placement_id, rank.queue_s(now_s) if rank.prefills else 0.0, now_s
        )
        self._cluster.expose(rank, self._tbt_share, now_s)

    def end_decode(self, record: PlacementRecord, now_s: float, *, learn: bool) -> None:
        """Release what the decode took; its pace teaches the calibration if ``learn``."""
        placement_id, rank = record.placement.placement_id, record.decode
        borne_s = rank.exposure.ended(placement_id, rank.queue_s(now_s) if rank.prefills else 0.0)
        if learn:
            self._learn_decode(record, now_s, borne_s)
        rank.end_decode(placement_id)
        self._cluster.settle(rank, self._tbt_share, now_s)

    def _learn_decode(self, record: PlacementRecord, now_s: float, borne_s: float) -> None:
        """The mean gap between a streamed answer's tokens, beside what the decode rank's load predicts.

        The load changed while the answer ran, so the prediction is the mean of those at its first and last token.
        Prefills that ran beside it for ``borne_s`` say nothing about the pace of decoding.
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
        c = instance.instance_class
        return (
            c.decode_base_s
            + c.decode_s_per_sequence * len(rank.decodes)
            + c.decode_s_per_context_token * rank.context_tokens
        )
