"""Block ids of contexts made of pieces: equal exactly where the tokens up to the block's end are."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.workloads.prefix_names import Context, PrefixNames

PIECES = st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 9)), max_size=6)


@given(st.lists(PIECES, min_size=1, max_size=5), st.integers(1, 5))
def test_equal_ids_mean_equal_prefixes(prompts: list[list[tuple[str, int]]], block_tokens: int) -> None:
    names = PrefixNames(block_tokens)
    of_id: dict[int, tuple[tuple[str, int, int], ...]] = {}
    id_of: dict[tuple[tuple[str, int, int], ...], int] = {}
    for pieces in prompts:
        context, tokens = Context(names), []
        for content, count in pieces:
            # A content's tokens depend on how many of it there are, so that a cut content is another one.
            context.append((content, count), count)
            tokens += [(content, count, place) for place in range(count)]
        assert context.tokens == len(tokens)
        ids = context.hash_ids()
        assert len(ids) == -(-len(tokens) // block_tokens)
        for block, hash_id in enumerate(ids):
            prefix = tuple(tokens[: (block + 1) * block_tokens])
            assert of_id.setdefault(hash_id, prefix) == prefix
            assert id_of.setdefault(prefix, hash_id) == hash_id


def test_contexts_grow_without_changing_full_blocks() -> None:
    context = Context(PrefixNames(4))
    context.append("system", 6)
    first = context.hash_ids()
    context.append("answer", 5)
    second = context.hash_ids()
    assert (len(first), len(second)) == (2, 3)
    assert first[0] == second[0]
    assert first[1] != second[1]


def test_unshared_ids_are_new() -> None:
    names = PrefixNames(4)
    context = Context(names)
    context.append("x", 8)
    assert not {*names.unshared(3)} & {*context.hash_ids(), *names.unshared(3)}


def test_blocks_have_tokens() -> None:
    with pytest.raises(ValueError, match="block_tokens"):
        PrefixNames(0)
