"""The books of a rank as kernels keep them, beside the same in plain Python."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from rank_oracle import RankOracle
from rank_work import TBT_SHARE, begin_decode, end_decode, end_prefill, move, place

from conductor.catalogue import LLAMA_8B_H100
from conductor.cluster import Cluster, make_instance
from conductor.costs import tables as t
from conductor.placement import Role
from conductor.rank import NO_ROW, PlacedElsewhere, RankState


def cluster_of(ranks: int) -> Cluster:
    cluster = Cluster()
    cluster.add(
        make_instance(
            instance_id="a",
            url="http://10.0.0.1:8000",
            role=Role.MIXED,
            instance_class=LLAMA_8B_H100,
            protocol="vllm-nixl",
            ranks=ranks,
        )
    )
    return cluster


SECONDS = st.sampled_from([0.0, 0.001, 0.1, 0.3, 2.0])


class RankBooks(RuleBasedStateMachine):
    """Two ranks, so that a row that is not its own would show."""

    @initialize()
    def start(self) -> None:
        self.cluster, self.now_s, self.tickets = cluster_of(2), 0.0, 0
        self.ranks = self.cluster["a"].ranks
        self.oracles = [RankOracle(LLAMA_8B_H100, TBT_SHARE) for _ in self.ranks]

    def pair(self, which: int) -> tuple[RankState, RankOracle]:
        return self.ranks[which], self.oracles[which]

    @rule(passed_s=SECONDS)
    def time_passes(self, passed_s: float) -> None:
        self.now_s += passed_s

    @rule(
        which=st.integers(0, 1),
        prefill_s=st.none() | st.floats(0.0, 3.0),
        decodes=st.booleans(),
        prompt_tokens=st.integers(9000, 100_000),
        output_tokens=st.integers(1, 2000),
        held_tokens=st.integers(0, 9000),
        plan_tokens=st.integers(0, 9000),
        observed=st.booleans(),
        tbt_objective_s=st.sampled_from([0.001, 0.03, 0.05, 0.2]),
        long_steps=st.booleans(),
        times=st.integers(1, 12),
    )
    def placed(self, which: int, times: int, **work) -> None:
        rank, oracle = self.pair(which)
        for _ in range(times):
            self.tickets += 1
            place(rank, self.tickets, self.now_s, **work)
            oracle.place(self.tickets, self.now_s, **work)

    @rule(which=st.integers(0, 1), data=st.data())
    def prefill_ends(self, which: int, data: st.DataObject) -> None:
        rank, oracle = self.pair(which)
        ticket = data.draw(self.some_ticket(oracle))
        assert same(end_prefill(rank, ticket, self.now_s), oracle.end_prefill(ticket, self.now_s))

    @rule(which=st.integers(0, 1), prefilled=st.booleans(), data=st.data())
    def decode_begins(self, which: int, prefilled: bool, data: st.DataObject) -> None:
        rank, oracle = self.pair(which)
        ticket = data.draw(self.some_ticket(oracle))
        assert same(
            begin_decode(rank, ticket, self.now_s, prefilled=prefilled),
            oracle.begin_decode(ticket, self.now_s, prefilled=prefilled),
        )

    @rule(which=st.integers(0, 1), data=st.data())
    def decode_ends(self, which: int, data: st.DataObject) -> None:
        rank, oracle = self.pair(which)
        ticket, prefilled = data.draw(self.some_ticket(oracle)), data.draw(st.booleans())
        borne_s = end_decode(rank, ticket, self.now_s, prefilled=prefilled)
        assert borne_s == oracle.end_decode(ticket, self.now_s, prefilled=prefilled)

    @rule(which=st.integers(0, 1), taken=st.integers(-1, 1), given=st.integers(-1, 1))
    def moves(self, which: int, taken: int, given: int) -> None:
        rank, oracle = self.pair(which)
        move(rank, taken=taken, given=given)
        oracle.move(taken, given)

    @rule(
        which=st.integers(0, 1),
        queue_s=st.floats(0.0, 5.0),
        counts=st.none() | st.lists(st.integers(0, 50_000), min_size=6, max_size=6),
    )
    def others_place(self, which: int, queue_s: float, counts: list[int] | None) -> None:
        rank, oracle = self.pair(which)
        others = PlacedElsewhere(self.now_s, queue_s, *counts) if counts is not None else None
        rank.place_elsewhere(others)
        oracle.place_elsewhere(others)

    def some_ticket(self, oracle: RankOracle) -> st.SearchStrategy[int]:
        """Mostly one that is under way there."""
        return st.sampled_from([*sorted(oracle.under_way()), 0, self.tickets])

    @precondition(lambda self: hasattr(self, "ranks"))
    @invariant()
    def the_table_has_what_the_books_say(self) -> None:
        for rank, oracle in zip(self.ranks, self.oracles, strict=True):
            row = self.cluster.tables.loads[rank.row]
            # Harm is written in another order of sums here; all else is the same to the last bit.
            assert row[: t.HARM].tolist() == oracle.row[: t.HARM]
            assert row[t.HARM : t.REPORTED_RUNNING] == pytest.approx(
                oracle.row[t.HARM : t.REPORTED_RUNNING], rel=1e-9, abs=1e-9
            )
            assert row[t.REPORTED_RUNNING :] == pytest.approx(oracle.row[t.REPORTED_RUNNING :], rel=1e-12)
            assert rank.queue_s(self.now_s) == oracle.queue_s(self.now_s)
            assert rank.under_way() == oracle.under_way()
            rank.check(self.cluster.tables)


def same(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))


TestRankBooks = RankBooks.TestCase
TestRankBooks.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 600), st.randoms(use_true_random=False))
def test_many_may_be_under_way_on_a_rank(many: int, random) -> None:
    cluster = cluster_of(1)
    rank = cluster["a"].ranks[0]
    tickets = list(range(many))
    for ticket in tickets:
        place(rank, ticket, 0.0, prefill_s=1.0, decodes=True, prompt_tokens=ticket)
    assert rank.under_way() == set(tickets)
    random.shuffle(tickets)
    for ended, ticket in enumerate(tickets, start=1):
        end_prefill(rank, ticket, 0.0)
        end_decode(rank, ticket, 0.0)
        assert rank.pending_prefills == rank.active_decodes == many - ended
    assert (rank.pending_tokens, rank.context_tokens, rank.queue_s(0.0)) == (0, 0, 0.0)
    rank.check(cluster.tables)


def test_an_empty_queue_forgets_what_sums_of_floats_have_drifted() -> None:
    cluster = cluster_of(1)
    rank = cluster["a"].ranks[0]
    for ticket, prefill_s in ((1, 0.1), (2, 0.2), (3, 0.3)):
        place(rank, ticket, 0.0, prefill_s=prefill_s)
    assert 0.1 + 0.2 + 0.3 - 0.1 - 0.2 - 0.3 != 0.0
    for ticket in (1, 2, 3):
        end_prefill(rank, ticket, 0.0)
    place(rank, 4, 0.0, prefill_s=0.001)
    assert cluster.tables.loads[rank.row, t.REST_PREDICTED_S] == 0.0


def test_books_are_kept_of_a_rank_that_has_left_while_another_has_its_row() -> None:
    cluster = cluster_of(1)
    rank = cluster["a"].ranks[0]
    place(rank, 1, 0.0, prefill_s=1.0, decodes=True, prompt_tokens=100)
    cluster.remove("a")
    assert rank.row == NO_ROW
    other = cluster_of(1)["a"]
    cluster.add(other)
    place(rank, 2, 0.0, prefill_s=1.0, decodes=True, prompt_tokens=50)
    end_decode(rank, 1, 0.0)
    begin_decode(rank, 2, 0.5, prefilled=True)
    move(rank, taken=1)
    assert (rank.active_decodes, rank.context_tokens, rank.pending_prefills) == (1, 50, 1)
    assert (
        cluster.tables.loads[other.ranks[0].row, : t.REPORTED_RUNNING].tolist() == [0.0] * t.REPORTED_RUNNING
    )


def test_tables_may_grow_under_a_rank() -> None:
    cluster = cluster_of(1)
    rank = cluster["a"].ranks[0]
    for number in range(100):
        cluster.add(
            make_instance(
                instance_id=f"b{number}",
                url="http://10.0.0.1:8000",
                role=Role.MIXED,
                instance_class=LLAMA_8B_H100,
                protocol="vllm-nixl",
            )
        )
    place(rank, 1, 0.0, decodes=True, prompt_tokens=100)
    assert cluster.tables.loads[rank.row, t.CONTEXT_TOKENS] == 100
    assert cluster.tables.loads[:, t.CONTEXT_TOKENS].sum() == 100
