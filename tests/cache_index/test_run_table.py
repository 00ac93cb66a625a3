"""The table of run numbers against a dictionary."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_index.run_table import Keys, RunTable

SAME_HOME = (np.arange(40, dtype=np.uint64) << np.uint64(58)) + np.uint64(7)  # they collide in a small table


def keys_at(places: list[int]) -> Keys:
    return SAME_HOME[np.array(places, np.int64)]


STEPS = st.lists(
    st.tuples(st.booleans(), st.lists(st.integers(0, 39), unique=True, max_size=12), st.integers(0, 12)),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(STEPS)
def test_any_history_gives_what_a_dictionary_holds(steps: list[tuple[bool, list[int], int]]) -> None:
    table = RunTable()
    expected: dict[int, int] = {}
    for number, (adds, places, most) in enumerate(steps):
        if adds:
            distinct = list(dict.fromkeys(places))
            before, new, leading = table.put(keys_at(distinct), number)
            had = [expected.get(place, -1) for place in distinct]
            assert (before.tolist(), new) == (had, had.count(-1))
            assert leading == (had.index(-1) if new else len(had))
            expected.update(dict.fromkeys(places, number))
        elif places:
            wanted = expected.get(places[-1], 0)
            taken, stop = table.take_last(keys_at(places), len(places), wanted, most)
            having = [i for i in reversed(range(len(places))) if expected.get(places[i]) == wanted][:most]
            assert taken.tolist() == having
            assert all(expected.get(places[i]) != wanted or i in having for i in range(stop, len(places)))
            for i in having:
                del expected[places[i]]
        assert len(table) == len(expected)
    before, _, _ = table.put(SAME_HOME, len(steps))
    assert before.tolist() == [expected.get(place, -1) for place in range(40)]


def test_it_grows_with_its_keys() -> None:
    table = RunTable()
    keys = np.random.default_rng(0).integers(1, 1 << 63, 5_000, dtype=np.uint64)
    for number in range(0, 5_000, 500):
        table.put(keys[number : number + 500], number)
    assert len(table) == 5_000
    before, new, leading = table.put(keys, 5_000)
    assert before.tolist() == [number // 500 * 500 for number in range(5_000)]
    assert (new, leading) == (0, 5_000)
