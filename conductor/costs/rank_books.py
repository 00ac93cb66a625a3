"""The kernels that keep the books of one rank, in a `rank_block`.

Each moment of a placement (it is placed, its prefill ends and its answer begins, it ends) is one call a rank, which
also writes what estimates read of it: the rank's row of the load table. Placements are known by whole numbers,
their tickets, and are looked for one by one, for few are under way on a rank. Tickets that are not known (any more)
are ignored.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

from numba import types
from numba.np.numpy_support import carray

from cache_index.kernel_cache import cache_directory, cached_njit
from cache_index.kernel_set import compiled, inlined
from conductor.costs import addresses, exposure, kernels, rank_block
from conductor.costs import tables as t
from conductor.costs.addresses import floats_at, integers_at
from conductor.costs.instance_class import Floats
from conductor.costs.rank_block import (
    ALL_LONG_S,
    ALL_PLACED_S,
    DECODE_COLUMNS,
    DECODE_CONTEXT_TOKENS,
    DECODE_TICKET,
    NO_ROW,
    OTHERS,
    OTHERS_KNOWN,
    PENDING_S,
    PREFILL_COLUMNS,
    PREFILL_OBSERVED,
    PREFILL_PREDICTED_S,
    PREFILL_TICKET,
    PREFILL_TOKENS,
    ROOM,
    ROW,
    decodes_at,
    head_at,
    load_at,
    prefills_at,
    speeds_at,
)

_SOURCES: Final = (addresses, exposure, kernels, rank_block, t)
_DIRECTORY = cache_directory(Path(__file__), *(Path(str(each.__file__)) for each in _SOURCES))

# ---- the queue of prefills ----


@inlined
def _tell_front(head: Floats, prefills: Floats) -> None:
    """The columns HEAD and REST, after every change of the queue."""
    head[t.HEAD_PREDICTED_S] = head[t.HEAD_OBSERVED] = head[t.REST_PREDICTED_S] = 0.0
    if head[t.PENDING_PREFILLS] > 0.0:
        head[t.HEAD_PREDICTED_S] = prefills[0, PREFILL_PREDICTED_S]
        head[t.HEAD_OBSERVED] = prefills[0, PREFILL_OBSERVED]
        head[t.REST_PREDICTED_S] = head[PENDING_S] - prefills[0, PREFILL_PREDICTED_S]


@inlined
def _take_off(head: Floats, prefills: Floats, first: int, count: int) -> None:
    for p in range(first, first + count):
        head[t.PENDING_PREFILLS] -= 1.0
        head[PENDING_S] -= prefills[p, PREFILL_PREDICTED_S]
        head[t.PENDING_TOKENS] -= prefills[p, PREFILL_TOKENS]
    if head[t.PENDING_PREFILLS] == 0.0:
        head[PENDING_S] = 0.0  # sums of floats drift: an empty queue is the moment to be exact again
    for p in range(first, int(head[t.PENDING_PREFILLS])):
        for column in range(PREFILL_COLUMNS):
            prefills[p, column] = prefills[p + count, column]


@inlined
def _forget_ended(head: Floats, prefills: Floats, now_s: float) -> None:
    """Drop leading prefills that nobody will see the end of and that ended by prediction."""
    pending, gone = int(head[t.PENDING_PREFILLS]), 0
    while gone < pending and prefills[gone, PREFILL_OBSERVED] == 0.0:
        end_s = head[t.HEAD_SINCE_S] + prefills[gone, PREFILL_PREDICTED_S]
        if end_s > now_s:
            break
        head[t.HEAD_SINCE_S] = end_s
        gone += 1
    if gone > 0:
        _take_off(head, prefills, 0, gone)


@inlined
def _add_prefill(
    head: Floats,
    prefills: Floats,
    now_s: float,
    ticket: int,
    predicted_s: float,
    tokens: float,
    observed: bool,
) -> None:
    _forget_ended(head, prefills, now_s)
    last = int(head[t.PENDING_PREFILLS])
    if last == 0:
        head[t.HEAD_SINCE_S] = now_s
    prefills[last, PREFILL_TICKET] = ticket
    prefills[last, PREFILL_PREDICTED_S] = predicted_s
    prefills[last, PREFILL_TOKENS] = tokens
    prefills[last, PREFILL_OBSERVED] = 1.0 if observed else 0.0
    head[t.PENDING_PREFILLS] += 1.0
    head[PENDING_S] += predicted_s
    head[t.PENDING_TOKENS] += tokens
    _tell_front(head, prefills)


@inlined
def _end_prefill(head: Floats, prefills: Floats, now_s: float, ticket: int) -> float:
    """Returns the service time in seconds where it is known, else NaN.

    It is known for the head of the queue: since the one before it ended.
    """
    _forget_ended(head, prefills, now_s)
    service_s = math.nan
    pending, p = int(head[t.PENDING_PREFILLS]), 0
    while p < pending and prefills[p, PREFILL_TICKET] != ticket:
        p += 1
    if p < pending:
        _take_off(head, prefills, p, 1)
        if p == 0:
            service_s, head[t.HEAD_SINCE_S] = now_s - head[t.HEAD_SINCE_S], now_s
    _tell_front(head, prefills)
    return service_s


# ---- decodes ----


@inlined
def _add_decode(
    head: Floats,
    decodes: Floats,
    ticket: int,
    context_tokens: float,
    output_tokens: float,
    tbt_objective_s: float,
) -> None:
    last = int(head[t.ACTIVE_DECODES])
    decodes[last, exposure.PLACED_S] = head[ALL_PLACED_S]
    decodes[last, exposure.BEGAN_S] = math.inf
    decodes[last, exposure.LONG_S] = head[ALL_LONG_S]
    decodes[last, exposure.MEAN_TOKENS] = output_tokens
    decodes[last, exposure.OBJECTIVE_S] = tbt_objective_s
    decodes[last, DECODE_TICKET] = ticket
    decodes[last, DECODE_CONTEXT_TOKENS] = context_tokens
    head[t.ACTIVE_DECODES] += 1.0
    head[t.CONTEXT_TOKENS] += context_tokens


@inlined
def _find_decode(head: Floats, decodes: Floats, ticket: int) -> int:
    """Its row; -1: it is not here."""
    for d in range(int(head[t.ACTIVE_DECODES])):
        if decodes[d, DECODE_TICKET] == ticket:
            return d
    return -1


@inlined
def _queue_s(address: int, now_s: float) -> float:
    return float(kernels.queue_s(carray(floats_at(address), (1, t.LOAD_COLUMNS)), 0, now_s))


@inlined
def _run_s(address: int, head: Floats, now_s: float) -> float:
    """Of all prefill ever placed here, what has run by now, as predicted."""
    return float(head[ALL_PLACED_S] - _queue_s(address, now_s))


# ---- the row of the load table ----


@inlined
def _write_books(head: Floats, load: Floats) -> None:
    """What others placed waits behind the first prefill of ours, or runs down by itself."""
    for column in range(t.HARM):
        load[0, column] = head[column]
    if head[OTHERS_KNOWN] != 0.0:
        if head[t.PENDING_PREFILLS] > 0.0:
            load[0, t.REST_PREDICTED_S] += head[OTHERS + t.HEAD_PREDICTED_S]
        else:
            load[0, t.HEAD_SINCE_S] = head[OTHERS + t.HEAD_SINCE_S]
            load[0, t.HEAD_PREDICTED_S] = head[OTHERS + t.HEAD_PREDICTED_S]
        for column in range(t.PENDING_PREFILLS, t.PLACEMENTS):
            load[0, column] += head[OTHERS + column]


@inlined
def _expose(address: int, head: Floats, load: Floats, tbt_share: float, now_s: float) -> None:
    exposure.write_harm(
        load,
        speeds_at(address),
        decodes_at(address),
        int(head[t.ACTIVE_DECODES]),
        head[ALL_PLACED_S],
        head[ALL_LONG_S],
        tbt_share,
        now_s,
    )


@inlined
def _store(load: Floats, tokens: float, now_s: float) -> None:
    """So many more tokens will be left in the device tier."""
    faded = load[0, t.STORED_TOKENS] * math.exp((load[0, t.STORED_AT_S] - now_s) / t.STORED_MEMORY_S)
    load[0, t.STORED_TOKENS] = faded + tokens
    load[0, t.STORED_AT_S] = now_s


# ---- what Python calls ----


def place(
    address: int,
    now_s: float,
    tbt_share: float,
    ticket: int,
    prefills: bool,
    decodes: bool,
    prompt_tokens: int,
    output_tokens: int,
    held_tokens: int,
    plan_tokens: int,
    prefill_s: float,
    observed: bool,
    tbt_objective_s: float,
    long_steps: bool,
) -> bool:
    """A request is to prefill here, to decode here, or both.

    Of its prompt ``held_tokens`` are in the device tier; all but ``plan_tokens`` are computed, in ``prefill_s``, if
    it prefills here. ``long_steps``: these may last longer than the TBT objective. Returns whether the room is used
    up now: the block has to grow before anything else is placed.
    """
    head = head_at(address)
    if prefills:
        computed_tokens = prompt_tokens - plan_tokens
        _add_prefill(head, prefills_at(address), now_s, ticket, prefill_s, computed_tokens, observed)
    if decodes:
        if prefills:
            head[ALL_PLACED_S] += prefill_s
            if long_steps:
                head[ALL_LONG_S] += prefill_s
        context_tokens = prompt_tokens + output_tokens // 2
        _add_decode(head, decodes_at(address), ticket, context_tokens, output_tokens, tbt_objective_s)
    head[t.PLACEMENTS] += 1.0
    words = integers_at(address)
    if words[ROW] != NO_ROW:
        load = load_at(address)
        _write_books(head, load)
        if decodes:
            _expose(address, head, load, tbt_share, now_s)
        _store(load, prompt_tokens - held_tokens + (output_tokens if decodes else 0), now_s)
    return bool(max(head[t.PENDING_PREFILLS], head[t.ACTIVE_DECODES]) >= words[ROOM])


def advance(address: int, now_s: float, tbt_share: float, ticket: int, prefilled: bool, began: bool) -> float:
    """A prefill that was placed here has ended, a decode has begun with its first token, or both.

    Returns the prefill's service time in seconds where it is known, else NaN.
    """
    head = head_at(address)
    service_s = math.nan
    if prefilled:
        service_s = _end_prefill(head, prefills_at(address), now_s, ticket)
    if began:
        decodes = decodes_at(address)
        d = _find_decode(head, decodes, ticket)
        if d >= 0:
            decodes[d, exposure.PLACED_S] = _run_s(address, head, now_s)
            decodes[d, exposure.BEGAN_S] = now_s
    if integers_at(address)[ROW] != NO_ROW:
        load = load_at(address)
        _write_books(head, load)
        if began:
            _expose(address, head, load, tbt_share, now_s)
    return service_s


def end(address: int, now_s: float, tbt_share: float, ticket: int, prefilled: bool) -> None:
    """A decode is over; with it, if it ``prefilled`` here until now, that prefill."""
    head, decodes = head_at(address), decodes_at(address)
    if prefilled:
        _end_prefill(head, prefills_at(address), now_s, ticket)
    d = _find_decode(head, decodes, ticket)
    if d >= 0:
        head[t.ACTIVE_DECODES] -= 1.0
        head[t.CONTEXT_TOKENS] -= decodes[d, DECODE_CONTEXT_TOKENS]
        last = int(head[t.ACTIVE_DECODES])
        for column in range(DECODE_COLUMNS):
            decodes[d, column] = decodes[last, column]
    if integers_at(address)[ROW] != NO_ROW:
        load = load_at(address)
        _write_books(head, load)
        _expose(address, head, load, tbt_share, now_s)


def borne_s(address: int, now_s: float, ticket: int) -> float:
    """How many seconds of prefill have run beside a decode since it began, as predicted."""
    head, decodes = head_at(address), decodes_at(address)
    d = _find_decode(head, decodes, ticket)
    return max(_run_s(address, head, now_s) - decodes[d, exposure.PLACED_S], 0.0) if d >= 0 else 0.0


def move(address: int, taken: int, given: int) -> None:
    """So many more transfers come in, and go out."""
    head = head_at(address)
    head[t.TRANSFERS_IN] += taken
    head[t.TRANSFERS_OUT] += given
    if integers_at(address)[ROW] != NO_ROW:
        _write_books(head, load_at(address))


def queue_s(address: int, now_s: float) -> float:
    """Seconds until a prefill placed now would begin, by what was placed here."""
    return float(_queue_s(address, now_s))


class RankKernels(NamedTuple):
    """The functions above, compiled; each gets the address of a block first."""

    place: Callable[..., bool]
    advance: Callable[..., float]
    end: Callable[..., None]
    borne_s: Callable[..., float]
    move: Callable[..., None]
    queue_s: Callable[..., float]


_INT, _S, _FLAG = types.int64, types.float64, types.boolean
_SIGNATURES: Final[tuple[tuple[Callable[..., Any], tuple[Any, ...]], ...]] = (
    (place, (_INT, _S, _S, _INT, _FLAG, _FLAG, *[_INT] * 4, _S, _FLAG, _S, _FLAG)),
    (advance, (_INT, _S, _S, _INT, _FLAG, _FLAG)),
    (end, (_INT, _S, _S, _INT, _FLAG)),
    (borne_s, (_INT, _S, _INT)),
    (move, (_INT, _INT, _INT)),
    (queue_s, (_INT, _S)),
)


@cache
def rank_kernels() -> RankKernels:
    """Compiled, or loaded from the cache, when they are asked for first."""
    return RankKernels(
        *(
            compiled(cached_njit(function, _DIRECTORY, nogil=False), *signature)
            for function, signature in _SIGNATURES
        )
    )
