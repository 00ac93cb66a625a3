"""The tree of routed prompts, against a plain oracle."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from conductor.policies.routed_prefixes import RoutedPrefixes


def _hashes(prompt: str) -> np.ndarray:
    """One block a letter; equal prefixes have equal hashes."""
    return np.array([hash((1, prompt[: i + 1])) & (2**64 - 1) for i in range(len(prompt))], np.uint64)


@given(
    st.lists(st.tuples(st.text("ab", max_size=6), st.integers(0, 3)), max_size=30), st.text("ab", max_size=7)
)
def test_the_longest_routed_prefix_and_who_had_it_last(routed: list[tuple[str, int]], asked: str) -> None:
    tree = RoutedPrefixes()
    owners: dict[str, int] = {}
    for prompt, row in routed:
        tree.insert(_hashes(prompt), row, max_blocks=1000)
        owners |= {prompt[: i + 1]: row for i in range(len(prompt))}
    blocks = max((i for i in range(1, len(asked) + 1) if asked[:i] in owners), default=0)
    assert tree.match(_hashes(asked)) == (blocks, owners.get(asked[:blocks], -1))


@settings(deadline=None)
@given(st.lists(st.text("ab", max_size=6), max_size=40), st.integers(1, 8))
def test_what_is_left_is_bounded_and_has_no_gaps(prompts: list[str], max_blocks: int) -> None:
    tree = RoutedPrefixes()
    for prompt in prompts:
        tree.insert(_hashes(prompt), 0, max_blocks)
        assert len(tree) <= max_blocks
        assert tree.match(_hashes(prompt))[0] == min(len(prompt), max_blocks)
        for other in prompts:
            known = [tree.match(_hashes(other[:i]))[0] for i in range(len(other) + 1)]
            assert known == [min(i, known[-1]) for i in range(len(other) + 1)]
