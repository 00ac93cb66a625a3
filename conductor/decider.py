"""One decision: candidates, estimates, the policy's choice, and the record of it; nothing is reserved here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from msgspec.structs import replace

from cache_index import CacheIndex, Tier
from conductor.admission import Gate
from conductor.cluster import Cluster
from conductor.costs import Floats, Ints
from conductor.costs import kernels as k
from conductor.costs.tables import ACTIVE_DECODES, DECODE, MIXED, PREFILL, PREFILL_SCALE
from conductor.estimates import Estimates, Estimator, roles_for
from conductor.explanation import PlacementRecord
from conductor.joint import MAX_TOGETHER, assign
from conductor.placement import (
    ModelCard,
    NoInstanceError,
    Objectives,
    Placement,
    PlacementError,
    PlacementRequest,
    PlanSegment,
    PrefixPlan,
    TooLongError,
    UnknownModelError,
)
from conductor.policies import Policy
from conductor.policies.candidates import NO_PEER, Choice
from conductor.policies.slo import Slo
from conductor.policies.slo_search import NOTHING_FOUND, Found
from conductor.prefix_lookup import PrefixLookup
from conductor.prefix_plan import hand_off_s, plan_of
from conductor.roster import Roster, make_roster

# What is left of the TTFT objective of a request that was held too long.
_LEAST_OBJECTIVE_S = 1e-3


class Decider:
    """Reads the cluster, the index and what was learned; changes none of them."""

    def __init__(
        self,
        cluster: Cluster,
        index: CacheIndex,
        lookup: PrefixLookup,
        gate: Gate,
        objectives: Objectives,
        aliases: dict[str, str],
    ) -> None:
        self.objectives = objectives
        self.aliases = aliases
        self._cluster = cluster
        self._index = index
        self._lookup = lookup
        self._gate = gate
        self._estimator = Estimator()
        self._rosters: dict[str, Roster] = {}
        self._turn = 0

    def objectives_of(self, request: PlacementRequest) -> Objectives:
        """Its own where it brings any."""
        if request.ttft_objective_s is None and request.tbt_objective_s is None:
            return self.objectives
        return Objectives(
            request.ttft_objective_s or self.objectives.ttft_s,
            request.tbt_objective_s or self.objectives.tbt_s,
            self.objectives.tbt_share,
        )

    def recycle(self, blocks: Sequence[Floats]) -> None:
        """Nobody reads the estimates in them any more."""
        self._estimator.recycle(blocks)

    def models(self) -> list[ModelCard]:
        """The models that can be asked for, aliases included."""
        cards = self._cluster.models()
        known = {card.model: card for card in cards}
        aliases = [
            ModelCard(alias, known[name].max_model_len, known[name].instances, parent=name)
            for alias, name in self.aliases.items()
            if name in known and alias not in known
        ]
        return cards + aliases

    def decide(
        self, request: PlacementRequest, policy: Policy, placement_id: str, now_s: float
    ) -> PlacementRecord:
        """Raises UnknownModelError when no instance serves the model, NoInstanceError when none can take it now,
        TooLongError when none ever can.
        """
        model = self.aliases.get(request.model, request.model)
        roster = self._roster(request, model, now_s)
        beginning = request.beginning()
        output_tokens, ttft_objective_s, tbt_objective_s = self._wanted(request, beginning, now_s)
        if type(policy) is Slo and request.prefill_on is None and len(roster.cache_groups) < 2:
            block, found = self._estimator.search(
                request,
                roster,
                self._lookup,
                now_s,
                output_tokens,
                ttft_objective_s,
                tbt_objective_s,
                policy.decode_prefill_tokens,
            )
        else:
            candidates = self._estimator.estimate(
                request, roster, self._lookup, now_s, output_tokens, ttft_objective_s, tbt_objective_s
            )
            block, found = candidates.block, _found(candidates, policy.choose(candidates))
        (
            prefill_at,
            decode_at,
            peer_at,
            group,
            tokens,
            local,
            held,
            held_by_decode,
            prefill_factor,
            fetch_s,
            prefill_s,
            queue_s,
            moving_s,
            wait_s,
            tbt_s,
            long_steps,
            skips_prefill,
        ) = found
        if prefill_at < 0:
            self._estimator.recycle((block,))
            raise _why_none(model, request, roster)
        prefill, decode = roster.ranks[prefill_at], roster.ranks[decode_at]
        if tokens == local == held:  # nothing to load or to fetch
            on_device = (PlanSegment(0, local, prefill.holder, Tier.DEVICE),) if local else ()
            plan = PrefixPlan(tokens, on_device, fetch_s, prefill_s)
        else:
            candidates = Estimates(
                request, roster, block, now_s, output_tokens, ttft_objective_s, tbt_objective_s, roster.roles
            )
            plan = plan_of(candidates, Choice(prefill_at, decode_at, peer_at))
            prefill_s = plan.prefill_s
        # By position: by name a struct takes five times as long to make.
        placement = Placement(
            placement_id,
            request.request_id,
            model,
            prefill.target,
            decode.target,
            held,
            plan,
            queue_s + prefill_s + (wait_s if wait_s > moving_s else moving_s),
            tbt_s,
            output_tokens,
        )
        return PlacementRecord(
            placement,
            request,
            policy.name,
            roster,
            block,
            ttft_objective_s,
            tbt_objective_s,
            prefill_at,
            decode_at,
            peer_at,
            now_s,
            queue_s,
            moving_s,
            output_tokens,
            beginning,
            prefill_factor,
            long_steps,
            skips_prefill,
            held_by_decode,
            int(decode.head[ACTIVE_DECODES]),
            prefill,
            decode,
            roster.cache_groups[group] if group >= 0 else None,
            roster.ranks[peer_at] if peer_at != NO_PEER else None,
            now_s - request.arrived_s if request.arrived_s is not None else 0.0,
        )

    def anywhere(self, request: PlacementRequest, now_s: float) -> Placement:
        """A rank of any instance that serves the model and is up, each in its turn; the placement has no id.

        Raises as `decide` does.
        """
        model = self._model_of(request)
        roster = self._roster(request, model, now_s)
        if not roster.ranks:
            reasons = "; ".join(f"{name} ({why})" for name, why in roster.excluded.items())
            raise NoInstanceError(f"no instance can take a request for {model!r} now: {reasons}")
        self._turn += 1
        target = roster.ranks[self._turn % len(roster.ranks)].target
        plan = PrefixPlan(tokens=0, segments=(), fetch_s=0.0, prefill_s=0.0)
        return Placement("", request.request_id, model, target, target, 0, plan, 0.0, 0.0)

    def _wanted(
        self, request: PlacementRequest, beginning: int | None, now_s: float
    ) -> tuple[int, float, float]:
        """The answer's length as predicted, and what is left of the objectives for TTFT and TBT."""
        ttft_s = request.ttft_objective_s or self.objectives.ttft_s
        if request.arrived_s is not None:
            ttft_s -= now_s - request.arrived_s
        return (
            self._gate.output_tokens(request, beginning),
            ttft_s if ttft_s > _LEAST_OBJECTIVE_S else _LEAST_OBJECTIVE_S,
            request.tbt_objective_s or self.objectives.tbt_s,
        )

    def assigned(
        self, requests: Sequence[PlacementRequest], now_s: float
    ) -> Iterator[tuple[int, PlacementRequest]]:
        """The requests with their numbers, in the order to place them in, prefill ranks fixed where that pays.

        Of those that begin alike only the first is assigned with others.
        """
        apart: dict[str, list[int]] = {}
        alike: list[int] = []
        beginnings: set[int | None] = set()
        for i, request in enumerate(requests):
            beginning = request.beginning()
            if request.excluded or request.prefill_on is not None or beginning in beginnings:
                alike.append(i)
                continue
            if beginning is not None:
                beginnings.add(beginning)
            apart.setdefault(request.model, []).append(i)
        for together in apart.values():
            for first in range(0, len(together), MAX_TOGETHER):
                chunk = together[first : first + MAX_TOGETHER]
                yield from self._assign([(i, requests[i]) for i in chunk], now_s)
        yield from ((i, requests[i]) for i in alike)

    def _assign(
        self, chunk: list[tuple[int, PlacementRequest]], now_s: float
    ) -> list[tuple[int, PlacementRequest]]:
        """Those of ``chunk``, all for one model, in the order to place them in."""
        if len(chunk) == 1:
            return chunk
        model = self._model_of(chunk[0][1])
        try:
            batch = [
                self._estimator.estimate(
                    request,
                    self._roster(request, model, now_s),
                    self._lookup,
                    now_s,
                    *self._wanted(request, request.beginning(), now_s),
                )
                for _, request in chunk
            ]
        except PlacementError:
            return chunk  # `place` says it again, request by request
        assignment = assign(batch)
        holders = [candidates.ranks for candidates in batch]
        self._estimator.recycle([candidates.block for candidates in batch])
        if assignment is None:
            return chunk
        fixed = []
        for b in assignment.order:
            i, request = chunk[b]
            fixed.append((i, replace(request, prefill_on=holders[b][assignment.ranks[b]].holder)))
        return fixed

    def _model_of(self, request: PlacementRequest) -> str:
        """The name that engines know."""
        return self.aliases.get(request.model, request.model)

    def _roster(self, request: PlacementRequest, model: str, now_s: float) -> Roster:
        """The candidates; gathered anew only when the cluster changed, or for a retry."""
        if request.excluded:
            why = {} if request.hedge_of is None else {"why": "has this request already"}
            roster = make_roster(self._cluster, self._index, model, now_s, request.excluded, **why)
        else:
            roster = self._rosters.get(model)
            if roster is None or roster.version != self._cluster.version or now_s >= roster.valid_until_s:
                roster = make_roster(self._cluster, self._index, model, now_s)
                if roster is not None:
                    self._rosters[model] = roster
        if roster is None:
            raise self._why_no_roster(model)
        return roster

    def check_served(self, model: str) -> None:
        """Raises UnknownModelError, or NoInstanceError while no instance is up; ``model`` may be an alias."""
        name = self.aliases.get(model, model)
        if not any(instance.serves(name) for instance in self._cluster):
            raise self._why_no_roster(name)

    def _why_no_roster(self, model: str) -> PlacementError:
        """What is served is known of instances once they are up: before that, no model is unknown."""
        served = [card.model for card in self.models()]
        if not served:
            waiting = ", ".join(i.instance_id for i in self._cluster) or "none"
            return NoInstanceError(f"no instance is up, so no model is served (configured: {waiting})")
        return UnknownModelError(f"the model {model!r} is not served here; served: {', '.join(served)}")


_NO_PLAN: Final = (-1, 0)  # it is not that of the rank


def _found(c: Estimates, choice: Choice | None) -> Found:
    """What the compiled search tells of its own choice; the plan is to be made by `plan_of`."""
    if choice is None:
        return NOTHING_FOUND
    i, j, seconds, roster = choice.prefill, choice.decode, c.seconds, c.roster
    return (
        i,
        j,
        choice.peer,
        roster.group_of.item(i),
        *_NO_PLAN,
        c.held.item(i, Tier.DEVICE),
        c.held.item(j, Tier.DEVICE),
        c.tables.classes.item(roster.class_ids.item(i), PREFILL_SCALE),
        seconds.item(k.FETCH_S, i),
        seconds.item(k.PREFILL_S, i),
        seconds.item(k.QUEUE_S, i),
        hand_off_s(c, i, j),
        seconds.item(k.WAIT_S, j),
        seconds.item(k.TBT_S, j),
        seconds.item(k.STEP_S, i) > k.LONG * c.tbt_objective_s,
        i == j and c.roles.item(i) == DECODE,
    )


def _why_none(model: str, request: PlacementRequest, roster: Roster) -> PlacementError:
    reasons = [f"{name} ({why})" for name, why in roster.excluded.items()]
    roles, prompt_tokens = roles_for(request, roster), request.prompt_tokens
    most_tokens = _longest_prompt(roster.limit_tokens, roles)
    if 0 <= most_tokens < prompt_tokens:
        too_long = f"the prompt of {prompt_tokens} tokens does not fit into the KV memory of"
        if not reasons:
            return TooLongError(f"{too_long} any instance of {model!r}; {most_tokens} tokens do")
        reasons.append(f"{too_long} the others; {most_tokens} tokens do")
    elif PREFILL in roles and DECODE not in roles:
        reasons.append("prefill instances are up but no decode instance is")
    elif DECODE in roles and PREFILL not in roles:
        reasons.append("decode instances are up but no prefill instance is")
    return NoInstanceError(
        f"no instance can take a request for {model!r} now: {'; '.join(reasons) or 'none is up'}"
    )


def _longest_prompt(limit_tokens: Ints, roles: Ints) -> int:
    """That fits into the KV memory of a mixed rank, or of one of each role, in tokens; -1: there are no such."""

    def longest_tokens(role: int) -> int:
        return int(limit_tokens[roles == role].max(initial=0)) - 1

    return max(longest_tokens(MIXED), min(longest_tokens(PREFILL), longest_tokens(DECODE)))
