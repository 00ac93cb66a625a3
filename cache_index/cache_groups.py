"""Which events of a hybrid model count: its layers form KV cache groups, each with blocks of its own.

vLLM publishes a block once per group, all under one hash. Stores name the group and mostly the kind of its
layers, removals the group alone (``group_idx``, ``kv_cache_spec_kind``; vLLM 0.32). A prefix can be used
again where the layers that attend to all of it still have it, so an index of prefixes follows one such
group, the *main group*: the first one of the stream that is not of a kind in PARTIAL_KINDS. Events without
a group always count.

Groups of those kinds keep the end of a prompt only, or a state; they have their own block sizes and, where
their blocks were freed before they were published, fewer hashes than tokens. Models may have no others
(Mamba, sliding windows in every layer): the first group of a stream is followed until one for whole prefixes
appears; then what the first one told is forgotten. Of a partial group a prefix counts as far as it is held
from its first block on, which is less than such an engine can use again, never more.
"""

from __future__ import annotations

from dataclasses import dataclass

PARTIAL_KINDS = (
    "sliding_window",
    "sliding_window_mla",
    "chunked_local_attention",
    "mamba",
    "cross_attention",
    "encoder_only_attention",
)


@dataclass(slots=True)
class MainGroup:
    """The main group of one stream, None until an event tells. The compiled reader does the same."""

    number: int | None = None
    provisional: bool = False  # it is not known to hold whole prefixes

    def follows(self, group: int | None, kind: str | None, *, stored: bool) -> bool:
        """Whether an event of this group counts; ``stored`` tells a store from a removal."""
        if group is None:
            return kind not in PARTIAL_KINDS
        if self.number is None:
            if kind is None and (group != 0 or not stored):
                return group == 0
            self.number, self.provisional = group, kind is None or kind in PARTIAL_KINDS
        elif group == self.number and kind is not None:
            self.provisional = kind in PARTIAL_KINDS
        return group == self.number

    def gives_way_to(self, group: int | None, kind: str | None) -> bool:
        """Whether this group holds whole prefixes, and the provisional one does not: it is followed from now
        on, and what was stored so far is to be forgotten."""
        if (
            group is None
            or kind is None
            or kind in PARTIAL_KINDS
            or not self.provisional
            or group == self.number
        ):
            return False
        self.number, self.provisional = group, False
        return True

    def unusable(self, group: int | None) -> None:
        """Note an event of a partial group that cannot be followed: an engine may come back with other groups."""
        if group is not None and group == self.number:
            self.provisional = True
