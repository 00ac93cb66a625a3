"""The least work that requests are to a cluster, in seconds of its instances, and how much of it these can do.

A step of an engine takes ``max(base, prompts) + decodes``: the prefill terms of its prompt chunks, at least the
base, plus what each decoding sequence and its context add. Counted are only terms that add up:

* prefill: what the due tokens cost (`simulator.bounds.demand`) and the base of each prompt; of what is cached
  nothing. A pipeline of k nodes does k times as much.
* decode: of each gap between tokens, the sequence's term and its context's.
* a step's base, which its sequences share: those in one step hold different room, and no more than the instance
  has, so each is charged ``base * its room / all room``; or, as there are at most so many, ``base / sequences``.

On instances that do both, a step with chunks hides its base behind them. A step whose token budget is full
computes at least ``(chunk - sequences) a`` seconds of tokens, of which the base is at most a part ``phi``; any
other step with chunks completes a prompt. So if each prompt gives up its own base and a part ``phi`` of its tokens'
work, all steps can be charged for theirs; where a prompt's base is less than a step's, it gives up the difference
too. (A step that completes a prompt completes it once: the first time. What is computed again is not counted.)
`Charge` says which of these ways of counting is taken; each is valid, and the one that counts most is best.

**Roles.** Instances that prefill never decode. Those that decode may prefill as well, for nothing in an engine
keeps a scheduler from it: they are taken as instances that do both, unless it is known how many tokens of a prompt
they compute at most. Then what prefill instances must do is counted for them (`Demand.elsewhere_tokens`), and
prefill on decode instances not at all.

**Different instance classes.** Each instance has a speed, and the least work is measured in units of which an
instance does ``speed`` a second: a constant of the unit is the least of ``speed * constant`` over the instances.
So whatever is done where, an instance needs at least ``units / speed`` seconds for it. That holds for any speeds;
taken are those in inverse proportion to what the whole workload would cost on that class.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import ceil

import numpy as np

from conductor.costs import Floats
from conductor.placement import Role
from simulator.bounds.demand import Demand
from simulator.cluster.specification import ClusterSpec, InstanceSpec


class Charge(StrEnum):
    """How the base of a decode step is charged to the sequences in it."""

    NOTHING = "nothing"
    ROOM = "room"
    SEQUENCES = "sequences"


@dataclass(frozen=True, slots=True)
class Work:
    """What requests cost and what instances can do; arrays of [request].

    ``prefill_s`` is done between a request's arrival and its first token, at most ``fastest`` of it a second;
    ``decode_s`` after that. ``own_s`` is the least TTFT of a request alone in the cluster. Capacities are units a
    second: of instances that only prefill, that only decode, and that do both. ``served_late_s`` is work that,
    over all, may be left undone at any time although it was counted as due. ``undivided_s`` is the prefill again,
    with no base of decode steps charged to anybody and hence nothing given up, on an instance of the fastest kind;
    ``abreast`` of these can do no less than all instances.
    """

    arrival_s: Floats
    own_s: Floats
    prefill_s: Floats
    decode_s: Floats
    prefill_only: float
    decode_only: float
    mixed: float
    fastest: float
    served_late_s: float
    undivided_s: Floats
    abreast: int
    room: Floats
    room_tokens: float  # of all instances that decode; more if they die with requests aboard

    @property
    def prefill_capacity(self) -> float:
        return self.prefill_only + self.mixed

    @property
    def decode_capacity(self) -> float:
        return self.decode_only + self.mixed

    def __len__(self) -> int:
        return len(self.arrival_s)

    def of(self, requests: slice) -> Work:
        """The work of some requests on the same instances."""
        return replace(
            self,
            arrival_s=self.arrival_s[requests],
            own_s=self.own_s[requests],
            prefill_s=self.prefill_s[requests],
            decode_s=self.decode_s[requests],
            undivided_s=self.undivided_s[requests],
            room=self.room[requests],
        )


@dataclass(frozen=True, slots=True)
class _Costs:
    """Seconds on one instance: by prompt token, its square, and prompt; by sequence, context and room of a gap."""

    token_s: float = 0.0
    square_s: float = 0.0
    prompt_s: float = 0.0
    given_up_s: float = 0.0
    sequence_s: float = 0.0
    context_s: float = 0.0
    room_s: float = 0.0

    def prefill_s(self, demand: Demand) -> Floats:
        """Of what decode instances never compute."""
        return (
            self.token_s * demand.elsewhere_tokens + self.square_s * demand.elsewhere_squares + self.prompt_s
        )

    def decode_s(self, demand: Demand) -> Floats:
        return (
            self.sequence_s * demand.gaps + self.context_s * demand.contexts + self.room_s * demand.room_steps
        )


def roles_at_will(cluster: ClusterSpec) -> ClusterSpec:
    """The same instances, of which those that decode may prefill as much as they like."""
    return replace(
        cluster,
        instances=tuple(
            replace(i, role=Role.MIXED) if i.role is Role.DECODE else i for i in cluster.instances
        ),
    )


def least_work(cluster: ClusterSpec, demand: Demand, *, all_served: bool) -> Work:
    """The way of counting that counts most.

    ``all_served``: every request has a first token in the end. Else those that have not may complete prompts
    without being counted, and no more may be given up than they themselves cost. Raises ValueError for a cluster
    where nothing can prefill or decode.
    """
    prefilling = [i for i in cluster.instances if i.role is not Role.DECODE]
    decoding = [i for i in cluster.instances if i.role is not Role.PREFILL]
    if not prefilling or not decoding:
        raise ValueError("a cluster needs instances that prefill and instances that decode")
    works = [_work(cluster, demand, charge) for charge in Charge if _applies(charge, prefilling, all_served)]
    most = max(works, key=lambda work: float(work.prefill_s.sum() + work.decode_s.sum() - work.served_late_s))
    undivided = works[0]  # `Charge.NOTHING`, which always applies
    return replace(most, undivided_s=undivided.undivided_s, abreast=undivided.abreast)


def _applies(charge: Charge, prefilling: Sequence[InstanceSpec], all_served: bool) -> bool:
    mixed = [i for i in prefilling if i.role is Role.MIXED]
    if charge is Charge.NOTHING or not mixed:
        return True
    return all(
        _hidden_part(i) < 1.0
        and (all_served or i.instance_class.prefill_base_s >= i.instance_class.decode_base_s)
        for i in mixed
    )


def _work(cluster: ClusterSpec, demand: Demand, charge: Charge) -> Work:
    costs = {i.name: _costs(i, charge) for i in cluster.instances}
    totals = {
        name: (float(each.prefill_s(demand).sum()), float(each.decode_s(demand).sum()))
        for name, each in costs.items()
    }
    prefills = [i for i in cluster.instances if i.role is not Role.DECODE]
    decodes = [i for i in cluster.instances if i.role is not Role.PREFILL]
    least_prefill_s = min(totals[i.name][0] * i.pipeline for i in prefills)
    least_decode_s = min(totals[i.name][1] for i in decodes)
    speed: dict[str, float] = {}
    for instance in cluster.instances:
        both_s = totals[instance.name]
        if instance.role is Role.PREFILL:
            speed[instance.name] = _ratio(least_prefill_s, both_s[0])
        elif instance.role is Role.DECODE:
            speed[instance.name] = _ratio(least_decode_s, both_s[1])
        else:
            speed[instance.name] = _ratio(least_prefill_s + least_decode_s, sum(both_s))

    def least(name: str, instances: Sequence[InstanceSpec]) -> float:
        return min(speed[i.name] * float(getattr(costs[i.name], name)) for i in instances)

    def capacity(role: Role) -> float:
        return sum(speed[i.name] for i in cluster.instances if i.role is role)

    unit = _Costs(
        token_s=least("token_s", prefills),
        square_s=least("square_s", prefills),
        # A prompt that a decode instance finishes need not begin on any other.
        prompt_s=0.0 if demand.decode_prefill_tokens else least("prompt_s", prefills),
        given_up_s=max(speed[i.name] * costs[i.name].given_up_s for i in prefills),
        sequence_s=least("sequence_s", decodes),
        context_s=least("context_s", decodes),
        room_s=least("room_s", decodes),
    )
    decode_s = unit.decode_s(demand) - unit.given_up_s
    prefill_s = unit.prefill_s(demand) + np.minimum(decode_s, 0.0)
    fastest = max(speed[i.name] for i in prefills)
    prefill_capacity = capacity(Role.PREFILL) + capacity(Role.MIXED)
    return Work(
        arrival_s=demand.arrival_s,
        own_s=_own_s(cluster, demand),
        prefill_s=np.maximum(prefill_s, 0.0),
        decode_s=np.maximum(decode_s, 0.0),
        prefill_only=capacity(Role.PREFILL),
        decode_only=capacity(Role.DECODE),
        mixed=capacity(Role.MIXED),
        fastest=fastest,
        served_late_s=float(np.maximum(-prefill_s, 0.0).sum()),
        undivided_s=np.maximum(prefill_s, 0.0) / fastest,
        abreast=ceil(prefill_capacity / fastest * (1.0 - 1e-12)),
        room=demand.room,
        room_tokens=float(_room_tokens(cluster)),
    )


def _costs(instance: InstanceSpec, charge: Charge) -> _Costs:
    known = instance.instance_class
    charged_s = known.decode_base_s if charge is not Charge.NOTHING else 0.0
    mixed = instance.role is Role.MIXED
    kept = 1.0 - _hidden_part(instance) if mixed and charged_s else 1.0
    return _Costs(
        token_s=kept * known.prefill_s_per_token / instance.pipeline,
        square_s=kept * known.prefill_s_per_token_squared / instance.pipeline,
        prompt_s=0.0 if mixed and charged_s else known.prefill_base_s / instance.pipeline,
        given_up_s=max(charged_s - known.prefill_base_s, 0.0) if mixed else 0.0,
        sequence_s=known.decode_s_per_sequence
        + (charged_s / instance.sequences if charge is Charge.SEQUENCES else 0.0),
        context_s=known.decode_s_per_context_token,
        room_s=charged_s / instance.kv_tokens if charge is Charge.ROOM else 0.0,
    )


def _hidden_part(instance: InstanceSpec) -> float:
    """The step's base as a part of the least that a full budget of prompt tokens takes; 1 for no such part."""
    known = instance.instance_class
    full_s = (known.chunk_tokens - instance.sequences) * known.prefill_s_per_token
    return min(known.decode_base_s / full_s, 1.0) if full_s > 0.0 else 1.0


def _own_s(cluster: ClusterSpec, demand: Demand) -> Floats:
    """The least TTFT of each request: its due prefill in a row on the best of constants, a step at least."""
    handed_off = not demand.decode_prefill_tokens and all(i.role is not Role.MIXED for i in cluster.instances)
    prefills = [i for i in cluster.instances if i.role is not Role.DECODE or demand.decode_prefill_tokens]

    def least(name: str) -> float:
        return min(float(getattr(i.instance_class, name)) / i.pipeline for i in prefills)

    own_s = np.maximum(
        least("prefill_s_per_token") * demand.tokens
        + least("prefill_s_per_token_squared") * demand.squares
        + least("prefill_base_s"),
        least("decode_base_s"),
    )
    if not handed_off:
        return own_s
    # The instance that decodes says the first token, with its first step.
    prompts, one = demand.prompt_tokens.astype(np.int64), np.ones(len(demand), np.int64)
    decodes = [i.instance_class for i in cluster.instances if i.role is Role.DECODE]
    first_step_s: Floats = np.min([each.decode_step_s(one, prompts) for each in decodes], axis=0)
    return own_s + first_step_s


def _room_tokens(cluster: ClusterSpec) -> int:
    """Room of requests that decode, once more for each time that an instance dies with them."""
    room = {i.name: i.kv_tokens for i in cluster.instances if i.role is not Role.PREFILL}
    return sum(room.values()) + sum(room.get(outage.instance, 0) for outage in cluster.outages)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0.0 else 1.0
