from __future__ import annotations

import json
import math
from collections import OrderedDict
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conductor.admission import OutputLengths, dump_output_lengths, load_output_lengths
from conductor.placement import PlacementRequest


def request(
    tenant: str = "t", route: str = "chat", model: str = "m", max_output_tokens: int | None = None
) -> PlacementRequest:
    return PlacementRequest(
        "r",
        model,
        np.empty(0, np.uint32),
        100,
        tenant=tenant,
        route=route,
        max_output_tokens=max_output_tokens,
    )


def learned(answers: list[int], **kind: Any) -> OutputLengths:
    lengths = OutputLengths()
    for tokens in answers:
        lengths.observe(request(**kind), None, tokens)
    return lengths


def lognormal(mean_log: float, answers: int, seed: int = 0) -> list[int]:
    drawn = np.random.default_rng(seed).lognormal(mean_log, 0.8, answers)
    return [int(x) + 1 for x in drawn]


def test_nothing_known_is_256_tokens() -> None:
    prediction = OutputLengths().predict(request())
    assert prediction.observations == 0
    assert prediction.mean_tokens == pytest.approx(256, rel=0.02)
    assert prediction.p90_tokens == pytest.approx(256 * np.log(10), rel=0.02)


@pytest.mark.parametrize("mean_log", [0.5, 3.0, 5.0, 7.0])
def test_mean_and_tail_converge(mean_log: float) -> None:
    answers = lognormal(mean_log, 4000)
    lengths = OutputLengths(window=4000)
    for tokens in answers:
        lengths.observe(request(), 7, tokens)
    prediction = lengths.predict(request(), 7)
    assert prediction.mean_tokens == pytest.approx(np.mean(answers), rel=0.1)
    assert prediction.p90_tokens == pytest.approx(np.quantile(answers, 0.9), rel=0.15)
    assert prediction.observations == 4000


def test_a_kind_that_is_new_is_predicted_like_its_parent() -> None:
    lengths = learned([40] * 300)
    for unseen in (
        lengths.predict(request(), 12),
        lengths.predict(request(tenant="new")),
        lengths.predict(request(route="new")),
    ):
        assert unseen.mean_tokens == pytest.approx(40, rel=0.15)
        assert unseen.observations == 300
    assert lengths.predict(request(model="other")).observations == 0


def test_every_level_of_detail_counts_once_it_is_known() -> None:
    lengths = OutputLengths()
    for _ in range(200):
        lengths.observe(request(route="chat"), None, 400)
        lengths.observe(request(route="code"), None, 20)
        lengths.observe(request(route="code", tenant="verbose"), None, 100)
        lengths.observe(request(route="code", tenant="verbose"), 5, 1000)
    assert lengths.predict(request(route="chat")).mean_tokens == pytest.approx(400, rel=0.1)
    assert lengths.predict(request(route="code")).mean_tokens == pytest.approx(20, rel=0.4)
    assert lengths.predict(request(route="code", tenant="verbose"), 5).mean_tokens == pytest.approx(
        1000, rel=0.1
    )


def test_few_answers_move_a_kind_part_of_the_way() -> None:
    lengths = learned([100] * 500)
    means = []
    for _ in range(12):
        lengths.observe(request(), 1, 400)
        means.append(lengths.predict(request(), 1).mean_tokens)
    assert means == sorted(means)
    assert 100 < means[0] < 250
    assert means[-1] > 320


def test_the_limit_of_the_request_caps_the_prediction() -> None:
    answers = lognormal(5.0, 2000)
    lengths = learned(answers)
    prediction = lengths.predict(request(max_output_tokens=64))
    assert prediction.p90_tokens == 64
    recent = np.minimum(answers[-500:], 64)
    assert prediction.mean_tokens == pytest.approx(recent.mean(), rel=0.1)


def test_answers_cut_at_their_limit_do_not_shorten_those_without_one() -> None:
    natural = lognormal(5.0, 2000)
    lengths = OutputLengths(window=2000)
    for i, tokens in enumerate(natural):
        limit = 50 if i % 2 else None
        lengths.observe(request(max_output_tokens=limit), None, min(tokens, limit or tokens))
    assert lengths.predict(request()).mean_tokens == pytest.approx(np.mean(natural), rel=0.15)


def test_a_runaway_answer_moves_the_mean_by_a_bounded_step() -> None:
    lengths = learned([100] * 400)
    lengths.observe(request(), None, 10**9)
    assert lengths.predict(request()).mean_tokens < 110


def test_a_known_model_bounds_the_runaway_of_a_new_prefix() -> None:
    lengths = learned([100] * 400)
    lengths.observe(request(), 3, 130_000)
    assert lengths.predict(request(), 3).mean_tokens < 400


def test_long_answers_that_recur_are_believed() -> None:
    lengths = OutputLengths(window=1000)
    answers = [10] * 19 + [8000]
    for tokens in answers * 150:
        lengths.observe(request(), None, tokens)
    assert lengths.predict(request()).mean_tokens == pytest.approx(np.mean(answers), rel=0.15)


def test_drift_is_followed() -> None:
    lengths = OutputLengths(window=100)
    for tokens in [50] * 2000 + [800] * 400:
        lengths.observe(request(), None, tokens)
    assert lengths.predict(request()).mean_tokens == pytest.approx(800, rel=0.1)


def test_memory_is_bounded_and_coarse_kinds_survive() -> None:
    lengths = OutputLengths(max_keys=16)
    for i in range(500):
        lengths.observe(request(tenant=f"t{i}"), i, 30)
    assert len(lengths) == 16
    assert lengths.predict(request(tenant="t0"), 0).observations == 500  # by model and route
    assert lengths.predict(request(tenant="t499"), 499).observations == 1


def test_a_forgotten_kind_leaves_nothing_behind() -> None:
    lengths = OutputLengths(max_keys=4)
    for _ in range(50):
        lengths.observe(request(tenant="a"), 1, 3000)
    for _ in range(50):
        lengths.observe(request(tenant="b", route="other", model="n"), 2, 10)
    assert lengths.predict(request(tenant="b", route="other", model="n"), 2).mean_tokens < 20


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from("mn"), st.sampled_from("ab"), st.none() | st.integers(0, 3)), max_size=60
    ),
    st.sampled_from([4, 6, 100]),
)
def test_the_kinds_observed_last_are_kept_in_order(
    answers: list[tuple[str, str, int | None]], max_keys: int
) -> None:
    lengths = OutputLengths(max_keys=max_keys)
    kept: OrderedDict[tuple[Any, ...], None] = OrderedDict()
    for model, tenant, prefix in answers:
        lengths.observe(request(tenant, model=model), prefix, 30)
        coarse = [(model, "chat", tenant), (model, "chat"), (model,)]
        if len(kept) == max_keys:  # these are not to make room for a finer kind of the same answer
            for known in reversed(coarse):
                if known in kept:
                    kept.move_to_end(known)
        for kind in ([] if prefix is None else [(*coarse[0], prefix)]) + coarse:
            if kind not in kept and len(kept) == max_keys:
                kept.popitem(last=False)
            kept[kind] = None
            kept.move_to_end(kind)
    kinds = json.loads(dump_output_lengths(lengths))["kinds"]
    assert [tuple(key) for key, *_ in kinds] == list(kept)


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["m", "n"]),
            st.sampled_from(["a", "b"]),
            st.none() | st.integers(0, 3),
            st.integers(-1, 10**7),
            st.none() | st.integers(1, 10**6),
        ),
        max_size=60,
    ),
    st.none() | st.integers(1, 10**6),
)
def test_whatever_was_seen_predictions_are_sane(
    answers: list[tuple[str, str, int | None, int, int | None]], limit: int | None
) -> None:
    lengths = OutputLengths(max_keys=6)
    for model, tenant, prefix, tokens, cut in answers:
        lengths.observe(request(tenant, model=model, max_output_tokens=cut), prefix, tokens)
    for prefix in (None, 1):
        prediction = lengths.predict(request("a", max_output_tokens=limit), prefix)
        assert 0.9999 <= prediction.mean_tokens <= 1.0001 * (limit or 2**17)
        assert 0 < prediction.p90_tokens <= (limit or 2**17)
        assert prediction.observations >= 0
    reloaded = load_output_lengths(dump_output_lengths(lengths), max_keys=6)
    assert len(reloaded) == len(lengths)
    for prefix in (None, 1):
        before, after = lengths.predict(request("a"), prefix), reloaded.predict(request("a"), prefix)
        assert after.mean_tokens == pytest.approx(before.mean_tokens, rel=1e-3)
        assert after.p90_tokens == pytest.approx(before.p90_tokens, rel=1e-2)
        assert after.observations == before.observations


class PlainLengths:
    """The same rules in plain sums, with nothing forgotten: the oracle."""

    def __init__(self, keep: float) -> None:
        ends = [*range(1, 9), *(round(8 * 2 ** (i / 4)) for i in range(1, 57))]
        self.bins = list(zip([1, *(end + 1 for end in ends)], ends, strict=False))
        last = [*(1 - math.exp(-end / 256) for end in ends[:-1]), 1.0]
        self.assumed = [b - a for a, b in pairwise([0.0, *last])]
        self.keep = keep
        self.kinds: dict[tuple[object, ...], list[float]] = {}

    def shares(self, names: tuple[object, ...]) -> list[float]:
        shares = self.assumed
        for level in range(1, len(names) + 1):
            counts = self.kinds.get(names[:level])
            if counts is None:
                break
            total = sum(counts) + 2.0
            shares = [(c + 2.0 * s) / total for c, s in zip(counts, shares, strict=True)]
        return shares

    def mean_tokens(self, names: tuple[object, ...], limit: float) -> float:
        shares = self.shares(names)
        return sum(s * min((low + high) / 2, limit) for s, (low, high) in zip(shares, self.bins, strict=True))

    def observe(self, names: tuple[object, ...], tokens: int, cut: bool) -> None:
        shares = self.shares(names)
        longest = sum(below < 0.99 for below in accumulate(shares)) + 8
        place = min(sum(high < tokens for _, high in self.bins), longest, 63)
        added = [float(i == place) for i in range(64)]
        if cut:
            beyond = [s if i >= place else 0.0 for i, s in enumerate(shares)]
            added = [s / sum(beyond) for s in beyond]
        for level in range(1, len(names) + 1):
            counts = self.kinds.get(names[:level], [0.0] * 64)
            self.kinds[names[:level]] = [self.keep * c + more for c, more in zip(counts, added, strict=True)]


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["a", "b"]),
            st.none() | st.integers(0, 3),
            st.integers(1, 3000) | st.just(10**7),
            st.none() | st.integers(1, 3000),
        ),
        max_size=40,
    ),
    st.none() | st.integers(1, 3000),
)
def test_predictions_are_those_of_plain_sums(
    answers: list[tuple[str, int | None, int, int | None]], limit: int | None
) -> None:
    lengths, plain = OutputLengths(window=20), PlainLengths(math.exp(-1 / 20))
    for tenant, prefix, tokens, cut in answers:
        names = ("m", "chat", tenant) if prefix is None else ("m", "chat", tenant, prefix)
        answer = min(tokens, cut or tokens)
        lengths.observe(request(tenant, max_output_tokens=cut), prefix, answer)
        plain.observe(names, answer, answer == cut)
    for prefix in (None, 0, 1):
        names = ("m", "chat", "a") if prefix is None else ("m", "chat", "a", prefix)
        prediction = lengths.predict(request("a", max_output_tokens=limit), prefix)
        expected = plain.mean_tokens(names, math.inf if limit is None else limit)
        assert prediction.mean_tokens == pytest.approx(expected, rel=1e-4)


def test_a_full_memory_forgets_others_than_those_of_the_answer() -> None:
    lengths = OutputLengths(max_keys=6)
    for _ in range(20):
        lengths.observe(request("a"), None, 30)
    for prefix in range(2):
        lengths.observe(request("b"), prefix, 30)
    lengths.observe(request("a"), 9, 30)
    assert len(lengths) == 6
    assert lengths.predict(request("a")).observations == 21


def test_a_smaller_memory_loads_what_was_seen_last() -> None:
    lengths = OutputLengths()
    for i in range(20):
        lengths.observe(request(tenant=f"t{i}"), None, 30)
    loaded = load_output_lengths(dump_output_lengths(lengths), max_keys=5)
    assert len(loaded) == 5
    assert loaded.predict(request(tenant="t19")).observations == 1
    assert loaded.predict(request(tenant="t0")).observations == 20


KIND = [["m"], 3, 5, [1.0, 2.0]]


@pytest.mark.parametrize(
    "saved",
    [
        b"",
        b"[]",
        b"{}",
        b"\xff\xfe",
        json.dumps({"bins": 12, "kinds": []}).encode(),
        *(
            json.dumps({"bins": 64, "kinds": [kind]}).encode()
            for kind in (
                [[], 3, 5, [1.0]],
                [[1], 3, 5, [1.0]],
                [["m", "r", "t", "no prefix"], 3, 5, [1.0]],
                [["m", "r", "t", 1, 2], 3, 5, [1.0]],
                [["m"], 0, 5, [1.0]],
                [["m"], 3, -1, [1.0]],
                [["m"], 3, 60, [1.0] * 10],
                [["m"], 3, 5, []],
                [["m"], 3, 5, [0.0]],
                [["m"], 3, 5, [-1.0, 2.0]],
                [["m"], 3, 5, [float("nan")]],
                [["m"], 3, 5, "text"],
                [["m"], 3, 5],
                "m",
            )
        ),
    ],
)
def test_what_was_not_saved_here_is_refused(saved: bytes) -> None:
    with pytest.raises(ValueError, match="not saved output lengths"):
        load_output_lengths(saved)


def test_the_saved_form_is_the_one_refused_variants_are_made_of() -> None:
    assert len(load_output_lengths(json.dumps({"bins": 64, "kinds": [KIND]}).encode())) == 1


@pytest.mark.parametrize("bounds", [{"window": 1}, {"max_keys": 3}])
def test_bounds_that_cannot_learn_are_refused(bounds: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(bounds))):
        OutputLengths(**bounds)
