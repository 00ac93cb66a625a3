"""Applying the KV events of one TensorRT-LLM rank: order, windows, levels. No I/O, no clock.

A poll takes events away from the server, so an event that is missing cannot be had again: a gap in the
event ids voids what is known of the rank, which is *cold* from then on. An id that steps back, or a cache
that is created anew, is a restart.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cache_index.events import MalformedEventError
from cache_index.hashing import Namespace, chain_hashes, fold_extra_keys
from cache_index.ingest import IngestCounters
from cache_index.named_blocks import NamedBlocks
from cache_index.radix import CacheIndex
from cache_index.residency import Holder
from cache_index.trtllm_events import (
    TrtBlock,
    TrtCleared,
    TrtCreated,
    TrtEvent,
    TrtMoved,
    TrtRemoved,
    TrtStored,
    TrtUnchanged,
)


class TrtllmIngest:
    """The blocks of one rank. With several attention windows the widest counts: it limits reuse."""

    def __init__(
        self, index: CacheIndex, holder: Holder, model: str, block_size: int, *, tenant: str = "default"
    ) -> None:
        self._blocks = NamedBlocks(index, holder)
        self._model = model
        self._block_size = block_size
        self._tenant = tenant
        self._partial: set[int] = set()  # names of blocks that are not full, which are not indexed
        self._window = 0
        self._creating = False  # the latest event was a creation
        self.last_event_id = -1
        self._expected: int | None = 0  # None: whatever comes next
        self.complete = False  # everything since the engine's start
        self.gaps = 0
        self.restarts = 0
        self.larger_block: int | None = None  # tokens of a block that cannot be: the block size is wrong
        self.counters = IngestCounters()

    def apply(self, event: TrtEvent) -> None:
        """Apply one event. UnknownHolderError when the holder is not registered."""
        self._order(event)
        if event.data is None:
            self.counters.unknown_events += 1
            return
        if isinstance(event.data, MalformedEventError):
            self.counters.malformed_events += 1
            return
        self.counters.events += 1
        if event.window is not None and event.window != self._window:
            if event.window < self._window:
                return
            self._forget()
            self._window = event.window
        match event.data:
            case TrtStored():
                self._store(event.data)
            case TrtRemoved():
                unknown = self._blocks.remove(
                    name for name in event.data.names if not self._was_partial(name)
                )
                self.counters.unresolved_blocks += unknown
            case TrtMoved():
                moved = self._blocks.move(event.data.name, event.data.tier)
                if not moved and event.data.name not in self._partial:
                    self.counters.unresolved_blocks += 1
            case TrtCleared():
                self._forget()
            case TrtCreated() | TrtUnchanged():
                pass

    def clear(self) -> None:
        """Forget what the rank reported, and continue with what comes."""
        self._forget()
        self.complete = False
        self._expected = None
        self._window = 0

    def restore(self) -> None:
        """Store everything known into the index, which somebody may have cleared."""
        self._blocks.restore()

    def _order(self, event: TrtEvent) -> None:
        created = isinstance(event.data, TrtCreated)
        known = self.last_event_id >= 0
        if known and (event.event_id <= self.last_event_id or (created and not self._creating)):
            self.restarts += 1
            self.clear()
        elif self._expected is not None and event.event_id > self._expected:
            self.gaps += known
            self.clear()
        if event.event_id == 0:
            self.complete = True
        self._creating = created
        self.last_event_id = event.event_id
        self._expected = event.event_id + 1

    def _store(self, event: TrtStored) -> None:
        """Runs of full blocks that share tier and adapter; a block that is not full ends a chain."""
        parent = event.parent
        run: list[TrtBlock] = []
        for block in event.blocks:
            if len(block.token_ids) > self._block_size:
                self.larger_block = len(block.token_ids)
            if len(block.token_ids) != self._block_size:
                self._partial.add(block.name)
                break
            if run and (block.tier, block.lora) != (run[0].tier, run[0].lora):
                self._store_run(run, parent)
                parent, run = run[-1].name, []
            run.append(block)
        if run:
            self._store_run(run, parent)

    def _store_run(self, run: Sequence[TrtBlock], parent_name: int | None) -> None:
        namespace = Namespace(self._model, self._block_size, run[0].lora, self._tenant)
        parent = 0
        if parent_name is not None:
            known = self._blocks.get(parent_name)
            if known is None or known.namespace != namespace:
                self.counters.unresolved_blocks += len(run)
                return
            parent = known.hash
        try:
            folds = [fold_extra_keys(block.keys) for block in run]
            if parent_name is None and run[0].salt is not None:
                folds[0] = fold_extra_keys([run[0].salt, *run[0].keys])
        except TypeError:  # a key that has no canonical form
            self.counters.malformed_events += 1
            return
        tokens = np.concatenate([block.token_ids for block in run])
        hashes = chain_hashes(tokens, self._block_size, parent=parent, folds=np.array(folds, np.uint64))
        names = [block.name for block in run]
        self._partial.difference_update(names)
        self._blocks.store(names, run[0].tier, namespace, hashes, parent=parent)

    def _was_partial(self, name: int) -> bool:
        if name not in self._partial:
            return False
        self._partial.discard(name)
        return True

    def _forget(self) -> None:
        self._blocks.clear()
        self._partial.clear()
