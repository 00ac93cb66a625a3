from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conductor.admission import DecodeForecast


@dataclass
class Decode:
    row: int
    start_s: float
    lasts_s: float
    context: int
    output: int
    started: bool = False


class Oracle:
    """The same forecast, placement by placement."""

    def __init__(self) -> None:
        self.decodes: dict[str, Decode] = {}

    def at(self, t_s: float, now_s: float | None, rows: int) -> tuple[list[int], list[float]]:
        sequences, context = [0] * rows, [0.0] * rows
        for d in self.decodes.values():
            start, end = d.start_s, d.start_s + d.lasts_s
            if now_s is not None:
                if not d.started and start < now_s:
                    start, end = now_s, now_s + d.lasts_s
                elif d.started and end <= now_s:
                    end = math.nextafter(now_s, math.inf) + (now_s - end)
            if start <= t_s < end:
                sequences[d.row] += 1
                rate = d.output / d.lasts_s if d.lasts_s else 0.0
                context[d.row] += d.context + rate * (t_s - start)
        return sequences, context

    def at_uniform(self, t_s: float, decode_s: float, now_s: float, rows: int) -> list[int]:
        sequences = [0] * rows
        for d in self.decodes.values():
            start = d.start_s if d.started else max(d.start_s, now_s)
            sequences[d.row] += start <= t_s < start + decode_s
        return sequences


times = st.integers(0, 60).map(lambda n: n / 2)
names = st.integers(0, 90).map(lambda n: f"p{n}")
events = st.one_of(
    st.tuples(
        st.just("placed"),
        names,
        st.integers(0, 5),
        times,
        times,
        st.integers(0, 5000),
        st.integers(0, 900),
    ),
    st.tuples(st.just("started"), names, times),
    st.tuples(st.just("ended"), names),
)


@settings(deadline=None)
@given(st.lists(events, max_size=150), times, st.none() | times)
def test_the_forecast_agrees_with_counting(
    happened: list[tuple[object, ...]], t_s: float, now_s: float | None
) -> None:
    forecast, oracle = DecodeForecast(), Oracle()
    for event in happened:
        match event:
            case "placed", str(name), int(row), float(start), float(lasts), int(context), int(output):
                forecast.placed(
                    name,
                    row,
                    start_s=start,
                    end_s=start + lasts,
                    context_tokens=context,
                    output_tokens=output,
                )
                oracle.decodes[name] = Decode(row, start, lasts, context, output)
            case "started", str(name), float(at_s):
                forecast.started(name, at_s)
                known = oracle.decodes.get(name)
                if known is not None and not known.started:
                    known.start_s, known.started = at_s, True
            case "ended", str(name):
                forecast.ended(name)
                oracle.decodes.pop(name, None)
    assert len(forecast) == len(oracle.decodes)
    sequences, context = forecast.at(t_s, now_s, rows=6)
    expected = oracle.at(t_s, now_s, 6)
    assert sequences.tolist() == expected[0]
    np.testing.assert_allclose(context, expected[1], rtol=1e-9, atol=1e-6)
    if now_s is not None:
        uniform = forecast.at_uniform(t_s, 7.5, now_s, rows=6)
        assert uniform.sequences.tolist() == oracle.at_uniform(t_s, 7.5, now_s, 6)


def place(forecast: DecodeForecast, name: str = "a", row: int = 0, start_s: float = 10.0) -> None:
    forecast.placed(name, row, start_s=start_s, end_s=start_s + 10.0, context_tokens=1000, output_tokens=200)


def test_a_decode_comes_grows_and_goes() -> None:
    forecast = DecodeForecast()
    place(forecast, row=2)
    assert forecast.at(9.9).sequences.tolist() == [0, 0, 0]
    assert forecast.at(10.0).context_tokens.tolist() == [0, 0, 1000]
    assert forecast.at(15.0).context_tokens.tolist() == [0, 0, 1100]
    assert forecast.at(20.0).sequences.tolist() == [0, 0, 0]


def test_a_late_prefill_moves_its_decode() -> None:
    forecast = DecodeForecast()
    place(forecast)
    assert forecast.at(25.0).sequences.tolist() == [0]
    assert forecast.at(25.0, now_s=16.0).sequences.tolist() == [1]  # it has not started: 16 to 26
    forecast.started("a", 17.0)
    assert forecast.at(26.5, now_s=18.0).sequences.tolist() == [1]


def test_an_overdue_decode_lasts_as_long_again_as_it_is_overdue() -> None:
    forecast = DecodeForecast()
    place(forecast)
    forecast.started("a", 10.0)
    assert forecast.at(24.0, now_s=24.0).sequences.tolist() == [1]  # overdue by 4
    assert forecast.at(27.9, now_s=24.0).sequences.tolist() == [1]
    assert forecast.at(28.1, now_s=24.0).sequences.tolist() == [0]
    assert forecast.at(20.0, now_s=20.0).sequences.tolist() == [1]  # not ended, so it is there


def test_unknown_placements_are_ignored() -> None:
    forecast = DecodeForecast()
    forecast.started("never placed", 1.0)
    forecast.ended("never placed")
    place(forecast)
    forecast.ended("a")
    forecast.ended("a")
    forecast.started("a", 12.0)
    assert len(forecast) == 0
    assert forecast.at(15.0, now_s=12.0).sequences.sum() == 0


def test_books_are_right_after_thousands_of_placements() -> None:
    forecast = DecodeForecast()
    for i in range(5000):
        place(forecast, f"p{i}", row=i % 3)
        if i >= 100:
            forecast.ended(f"p{i - 100}")
    assert len(forecast) == 100
    assert forecast.at(15.0).sequences.sum() == 100


def test_rows_never_placed_on_are_answered_for() -> None:
    assert DecodeForecast().at(1.0, rows=4).context_tokens.tolist() == [0, 0, 0, 0]


def test_a_negative_row_is_refused() -> None:
    with pytest.raises(ValueError, match="row -1"):
        place(DecodeForecast(), row=-1)
