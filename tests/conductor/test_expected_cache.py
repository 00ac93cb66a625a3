"""What prefills under way will leave in caches counts while they run, and for those who are there."""

from __future__ import annotations

import numpy as np
from cluster_factory import BLOCK, facts, make_scheduler, request
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_index import CacheIndex, Holder, Namespace, sequence_hashes
from conductor.catalogue import LLAMA_8B_H100
from conductor.cluster import make_instance
from conductor.expected_cache import FEW, STRIDE, ExpectedCache
from conductor.placement import Role

NAMESPACE = Namespace("llama", BLOCK)
PROMPT = sequence_hashes(request(2048).tokens, BLOCK)
BLOCKS = len(PROMPT)


def raised(expected: ExpectedCache, index: CacheIndex) -> dict[Holder, list[int]]:
    """Blocks of the prompt by holder and tier, of which only expected ones can be there."""
    levels = index.match(NAMESPACE, PROMPT)
    expected.raise_levels(levels, NAMESPACE, PROMPT)
    return {holder: levels[row].tolist() for holder, row in index.registered()[1].items()}


def test_a_prefill_counts_in_strides_until_it_ends() -> None:
    index = CacheIndex()
    expected = ExpectedCache(index)
    a, b = Holder("a"), Holder("b")
    index.register(b)
    expected.expect("1", a, NAMESPACE, PROMPT[: 3 * STRIDE + 1])
    expected.expect("2", a, NAMESPACE, PROMPT[:STRIDE])
    assert raised(expected, index) == {a: [3 * STRIDE] * 5, b: [0] * 5}
    expected.ended("1")
    assert raised(expected, index)[a] == [STRIDE] * 5
    expected.ended("2")
    expected.ended("2")
    assert raised(expected, index)[a] == [0] * 5


def test_who_takes_the_row_of_one_that_left_is_expected_to_have_nothing() -> None:
    index = CacheIndex()
    expected = ExpectedCache(index)
    row = index.register(Holder("a"))
    expected.expect("1", Holder("a"), NAMESPACE, PROMPT)
    expected.forget(Holder("a"))
    index.unregister(Holder("a"))
    assert index.register(Holder("b")) == row
    assert raised(expected, index) == {Holder("b"): [0] * 5}
    expected.ended("1")
    expected.expect("2", Holder("b"), NAMESPACE, PROMPT)
    assert raised(expected, index) == {Holder("b"): [BLOCKS] * 5}


def test_coming_and_going_leaves_nothing_behind() -> None:
    index = CacheIndex()
    expected = ExpectedCache(index)
    for number in range(200):
        holder = Holder(f"i{number}")
        expected.expect(f"{number}", holder, NAMESPACE, PROMPT)
        assert raised(expected, index) == {holder: [BLOCKS] * 5}
        if number % 2:
            expected.ended(f"{number}")
        expected.forget(holder)
        index.unregister(holder)
    assert expected.holders == 0
    assert len(index.match(NAMESPACE, PROMPT)) == 1, "one row, given away again and again"


def test_the_scheduler_tells_who_has_left() -> None:
    """The row of the instance that left is given to another one, whom nothing is expected of."""
    scheduler = make_scheduler("m")
    prompt = request(4096)
    scheduler.place(prompt, 0.0)
    row = scheduler.index.holder_id(Holder("m0"))
    scheduler.remove_instance("m0")
    scheduler.add_instance(
        make_instance(
            instance_id="next",
            url="http://10.0.0.9:8000",
            role=Role.MIXED,
            instance_class=LLAMA_8B_H100,
            protocol="vllm-nixl",
        )
    )
    scheduler.instance_up("next", facts())
    assert scheduler.index.holder_id(Holder("next")) == row
    candidates = scheduler.consider(prompt, 0.1).candidates
    assert candidates is not None
    assert np.all(candidates.local_tokens == 0)
    assert scheduler.place(prompt, 0.1).overlap_tokens == 0
    assert scheduler.consider(prompt, 0.2).placement.overlap_tokens == 4096 - BLOCK


def chain(begin: int, shared: int, length: int) -> list[int]:
    """Tokens of blocks: prompts of one ``begin`` have the first ``shared`` in common."""
    return [begin] * min(shared, length) + [begin + 10 + shared] * (length - shared)


_CHAINS = st.builds(chain, st.integers(0, 1), st.integers(1, 5 * STRIDE), st.integers(1, 5 * STRIDE))


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.sampled_from("abc"), _CHAINS),  # begins
            st.integers(0, 2 * FEW),  # ends
            _CHAINS,  # asks
        ),
        max_size=60,
    )
)
def test_whoever_asks_finds_the_longest_beginning_in_strides(
    steps: list[tuple[str, list[int]] | int | list[int]],
) -> None:
    index = CacheIndex()
    expected = ExpectedCache(index)
    rows = {name: index.register(Holder(name)) for name in "abc"}
    under_way: dict[str, tuple[str, list[int]]] = {}

    def hashes_of(blocks: list[int]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        return sequence_hashes(np.repeat(np.array(blocks, np.uint32), BLOCK), BLOCK)

    for number, step in enumerate(steps):
        if isinstance(step, tuple):
            under_way[str(number)] = step
            expected.expect(str(number), Holder(step[0]), NAMESPACE, hashes_of(step[1]))
        elif isinstance(step, int):
            if step < len(under_way):
                placement_id = list(under_way)[step]
                del under_way[placement_id]
                expected.ended(placement_id)
        else:
            levels = index.match(NAMESPACE, hashes_of(step))
            expected.raise_levels(levels, NAMESPACE, hashes_of(step))
            longest = dict.fromkeys("abc", 0)
            for name, blocks in under_way.values():
                pairs = zip(blocks, step, strict=False)
                common = next((i for i, (one, other) in enumerate(pairs) if one != other), None)
                common = min(len(blocks), len(step)) if common is None else common
                longest[name] = max(longest[name], common // STRIDE * STRIDE)
            assert {name: levels[row].tolist() for name, row in rows.items()} == {
                name: [blocks] * 5 for name, blocks in longest.items()
            }
