"""Stores outside of device memory leave extra keys out; the engine's hash still says which block is meant."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wire_twins import HOLDER, Stream, batch, check_same, removed, stored

from cache_index import Namespace, Tier, ingest, sequence_hashes, slots

SIZE = 4
NAMESPACE = Namespace("tiny", SIZE)
TOKENS = list(range(12))
# a first store of each namespace makes it known to the compiled reader
KNOWN = [
    batch(stored([900], [9] * SIZE)),
    batch(stored([901], [9] * SIZE, lora_name="sql", extra_keys=[["sql"]])),
]


@pytest.fixture(autouse=True, scope="module")
def reclaimed_between_groups_only() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slots, "SWEEP_PER_BLOCK", 0)
        patch.setattr(slots, "SWEEP_PER_CALL", 0)
        yield


@pytest.fixture(params=["compiled", "readable"])
def stream(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Stream:
    made = Stream(compiled=request.param == "compiled")
    made.apply(KNOWN[:1])
    if request.param == "compiled":
        monkeypatch.setattr(ingest, "decode_batch", None)  # nothing else is left to the decoder
    return made


def held(stream: Stream, salt: str | None = None, namespace: Namespace = NAMESPACE) -> list[int]:
    """Blocks of the prompt in device memory, and in device and host memory."""
    hashes = sequence_hashes(np.array(TOKENS, np.uint32), SIZE, cache_salt=salt)
    device, host, *_ = stream.index.match(namespace, hashes)[0].tolist()
    return [device, host]


def on_device(
    names: Sequence[int], salt: str | None, tokens: Sequence[int] = TOKENS, parent: Any = None
) -> Any:
    keys = None if salt is None else [[salt], *[None] * (len(names) - 1)]
    return stored(names, tokens, parent=parent, medium="GPU", extra_keys=keys)


def in_memory(name: int, block: int, parent: int | None) -> Any:
    """As vLLM's connector for Mooncake's store tells it."""
    tokens = TOKENS[SIZE * block : SIZE * (block + 1)]
    return stored([name], tokens, parent=parent, medium="cpu", lora_id=None, lora_name=None, group_idx=0)


def test_a_copy_in_memory_is_of_the_salted_prompt(stream: Stream) -> None:
    stream.apply([batch(on_device([1, 2, 3], "tenant"))])
    stream.apply([batch(in_memory(1, 0, None)), batch(in_memory(2, 1, 1), in_memory(3, 2, 2))])
    assert held(stream) == [0, 0]
    assert held(stream, "tenant") == [3, 3]
    stream.apply([batch(*(removed(name, medium="GPU") for name in (1, 2, 3)))])
    assert held(stream, "tenant") == [0, 3]
    stream.apply([batch(*(removed(name, medium="cpu") for name in (3, 2)))])
    assert held(stream, "tenant") == [0, 1]
    assert stream.ingest.counters.unresolved_blocks == 0


def test_several_blocks_of_one_store(stream: Stream) -> None:
    stream.apply([batch(on_device([1, 2, 3], "tenant"))])
    stream.apply([batch(stored([1, 2, 3], TOKENS, medium="cpu"))])
    assert (held(stream), held(stream, "tenant")) == ([0, 0], [3, 3])
    stream.apply([batch(stored([4, 2], TOKENS[:8], medium="cpu"))])  # nobody can say what 4 is
    assert stream.ingest.counters.unresolved_blocks == 2
    assert (held(stream), held(stream, "tenant")) == ([0, 0], [3, 3])


def test_an_image_in_the_middle(stream: Stream) -> None:
    """Extra keys of a later block: what lies before it is shared with plain prompts."""
    keys = [None, ["image"], None]
    stream.apply([batch(stored([1, 2, 3], TOKENS, medium="GPU", extra_keys=keys))])
    stream.apply([batch(in_memory(1, 0, None), in_memory(2, 1, 1), in_memory(3, 2, 2))])
    assert held(stream) == [1, 1]
    stream.apply([batch(in_memory(5, 1, 1))])  # may have an image, too
    assert held(stream) == [1, 1]
    assert stream.ingest.counters.unresolved_blocks == 1


@pytest.mark.parametrize("compiled", [True, False])
def test_an_adapter_that_the_copy_does_not_name(compiled: bool) -> None:
    stream = Stream(compiled=compiled)
    stream.apply(KNOWN)
    keys = [["sql"]] * 3
    stream.apply([batch(stored([1, 2, 3], TOKENS, medium="GPU", lora_name="sql", extra_keys=keys))])
    stream.apply([batch(in_memory(1, 0, None), in_memory(2, 1, 1))])
    assert held(stream) == [0, 0]
    assert held(stream, namespace=Namespace("tiny", SIZE, "sql")) == [3, 3]
    stream.apply([batch(removed(1, medium="GPU"))])
    assert held(stream, namespace=Namespace("tiny", SIZE, "sql")) == [0, 3]


def test_copies_that_come_first_count_as_plain_until_extra_keys_appear(stream: Stream) -> None:
    stream.apply([batch(in_memory(1, 0, None), in_memory(2, 1, 1))])
    assert held(stream) == [0, 2]
    stream.apply([batch(on_device([3], None, TOKENS[:4]))])
    assert held(stream) == [1, 2]
    stream.apply([batch(on_device([1, 2], "tenant", TOKENS[:8]))])  # so 1 and 2 were never plain
    assert (held(stream), held(stream, "tenant")) == ([1, 1], [2, 2])
    stream.apply([batch(in_memory(1, 0, None), in_memory(7, 0, None))])
    assert (held(stream), held(stream, "tenant")) == ([1, 1], [2, 2])
    assert stream.ingest.counters.unresolved_blocks == 1
    stream.apply([batch(removed(1, medium="GPU"), removed(2, medium="GPU"))])
    assert held(stream, "tenant") == [0, 1]


def test_only_tiers_in_doubt_are_cleared_and_only_once(stream: Stream) -> None:
    stream.apply([batch(on_device([1, 2, 3], None)), batch(stored([8], [7] * 4, medium="disk"))])
    stream.apply([batch(in_memory(1, 0, None))])  # known: no doubt about it
    stream.apply([batch(on_device([5], "tenant", TOKENS[:4]))])
    by_tier = stream.index.stats().residencies_by_holder[HOLDER]
    assert by_tier.get(Tier.DISK, 0) == 0
    assert (by_tier[Tier.DEVICE], by_tier[Tier.HOST]) == (5, 1)
    stream.apply([batch(in_memory(5, 0, None), on_device([6], "other", TOKENS[:4]))])
    assert stream.index.stats().residencies_by_holder[HOLDER][Tier.HOST] == 2


def test_salts_that_sglang_names_with_every_store(stream: Stream) -> None:
    """A store without a salt has none there, whatever came before."""
    stream.apply([batch(stored([1], TOKENS[:4], medium="GPU", cache_salt="tenant"))])
    stream.apply([batch(stored([2], TOKENS[:4], medium="cpu"))])
    stream.apply([batch(stored([1], TOKENS[:4], medium="cpu", cache_salt="tenant"))])
    assert (held(stream), held(stream, "tenant")) == ([0, 1], [1, 1])


def test_what_was_learned_of_extra_keys_goes_on_after_a_restart(stream: Stream) -> None:
    stream.apply([batch(on_device([1], "tenant", TOKENS[:4]))])
    later = Stream(compiled=False)
    later.ingest.resume(stream.ingest.traits)
    assert later.ingest.traits == stream.ingest.traits
    later.apply([batch(in_memory(1, 0, None))])
    assert held(later) == [0, 0]
    assert later.ingest.counters.unresolved_blocks == 1


# --- properties --------------------------------------------------------------------------------------

SALTS = [None, "a", "b"]
PROMPTS = [[0, 1, 2], [0, 1, 5], [0, 7, 8], [4, 4, 4]]


class Engine:
    """A small engine with a store: blocks by content, hashed with their salt, told as vLLM tells of them."""

    def __init__(self) -> None:
        self.events: list[bytes] = []
        self.device: set[tuple[Any, ...]] = set()
        self.memory: set[tuple[Any, ...]] = set()
        self.late = False  # a copy was told of before its block, or when that was gone

    @staticmethod
    def name(block: tuple[Any, ...]) -> int:
        salt, *units = block
        number = SALTS.index(salt) + 1
        for unit in units:
            number = number * 10 + unit
        return number

    def compute(self, block: tuple[Any, ...]) -> None:
        salt, *units = block
        keys = [[salt]] if salt is not None and len(units) == 1 else None
        self.device.add(block)
        self._tell(block, medium="GPU", extra_keys=keys)

    def copy(self, block: tuple[Any, ...]) -> None:
        self.late |= block not in self.device
        self.memory.add(block)
        self._tell(block, medium="cpu")

    def evict(self, block: tuple[Any, ...], medium: str) -> None:
        (self.device if medium == "GPU" else self.memory).discard(block)
        self.events.append(batch(removed(self.name(block), medium=medium)))

    def _tell(self, block: tuple[Any, ...], **more: Any) -> None:
        tokens = [block[-1]] * SIZE
        parent = self.name(block[:-1]) if len(block) > 2 else None
        self.events.append(batch(stored([self.name(block)], tokens, parent=parent, **more)))

    def prefix(self, salt: str | None, units: list[int], *tiers: set[tuple[Any, ...]]) -> int:
        blocks = [(salt, *units[: end + 1]) for end in range(len(units))]
        present = [any(block in tier for tier in tiers) for block in blocks]
        return [*present, False].index(False)


steps = st.lists(
    st.tuples(
        st.sampled_from(["compute", "compute", "copy", "copy", "evict", "drop"]),
        st.sampled_from(SALTS),
        st.sampled_from(PROMPTS),
    ),
    max_size=25,
)


@settings(deadline=None)
@given(steps, st.integers(1, 6), st.booleans(), st.booleans())
def test_no_prompt_is_credited_with_what_another_one_has(
    steps: list[tuple[str, str | None, list[int]]], group: int, early: bool, published: bool
) -> None:
    """Both readers agree. Where every copy is told of after its block, what is found is what the engine has;
    where it is not, and extra keys are known to be published, it is at most that."""
    engine = Engine()
    for action, salt, units in steps:
        blocks = [(salt, *units[: end + 1]) for end in range(len(units))]
        for block in blocks if action in ("compute", "copy") else reversed(blocks):
            if action == "compute" and block not in engine.device:
                engine.compute(block)
            elif action == "copy" and block not in engine.memory and (early or block in engine.device):
                engine.copy(block)
            elif action == "evict" and block in engine.device:
                engine.evict(block, "GPU")
            elif action == "drop" and block in engine.memory:
                engine.evict(block, "cpu")
    stream = check_same([*KNOWN[: 1 + published], *engine.events], group)
    for salt in SALTS:
        for units in PROMPTS:
            prompt = np.repeat(np.array(units, np.uint32), SIZE)
            hashes = sequence_hashes(prompt, SIZE, cache_salt=salt)
            found = stream.index.match(NAMESPACE, hashes)[0].tolist()[:2]
            on_device = engine.prefix(salt, units, engine.device)
            anywhere = engine.prefix(salt, units, engine.device, engine.memory)
            if not engine.late:
                assert found == [on_device, anywhere]
            elif published:
                assert found[0] == on_device
                assert found[1] <= anywhere
