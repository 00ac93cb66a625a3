"""What a prefill would do to the requests aboard a rank: how many of them would miss their TBT objective.

A step that carries prompt chunks is a long gap for every request that decodes there. TBT is the mean of the longest
``tbt_share`` of a request's gaps, so an answer of ``n`` tokens bears ``tbt_share * n * (objective - step)`` seconds
of prefill beside it. How long it will be is not known. Lengths being about geometric, an answer that has ``age``
tokens by now, and is to reach ``needed`` before it has room for what it bears, does so with the probability
``exp(-(needed - age) / mean)``. The requests placed on a rank are prefilled in order, so what each has to bear is
what was placed there after it.
"""

from __future__ import annotations

import math
from typing import Final

from cache_index.kernel_set import inlined
from conductor.costs import kernels
from conductor.costs import tables as t
from conductor.costs.instance_class import Floats

# ---- what is known of a request aboard: the first columns of a decode (`rank_block`) ----
PLACED_S: Final = 0  # prefill placed on the rank when its own had been
BEGAN_S: Final = 1  # its first token; infinity before
LONG_S: Final = 2  # of what was placed, what made gaps longer than its objective
MEAN_TOKENS: Final = 3  # of the answer, as predicted
OBJECTIVE_S: Final = 4  # for its TBT
EXPOSURE_COLUMNS: Final = 5


@inlined
def write_harm(
    load: Floats,
    speeds: Floats,
    decodes: Floats,
    count: int,
    placed_s: float,
    long_s: float,
    tbt_share: float,
    now_s: float,
) -> None:
    """Write the columns HARM of a rank's row of the load table [1, column] from the others of it.

    ``speeds`` is the row of its class, ``placed_s`` all prefill ever placed on the rank, as predicted, ``long_s``
    what of that made long gaps.
    """
    queue_s = kernels.queue_s(load, 0, now_s)
    step_s = speeds[t.DECODE_SCALE] * (
        speeds[t.DECODE_BASE_S]
        + speeds[t.DECODE_S_PER_SEQUENCE] * load[0, t.ACTIVE_DECODES]
        + speeds[t.DECODE_S_PER_CONTEXT] * load[0, t.CONTEXT_TOKENS]
    )
    harm = load[0, t.HARM : t.REPORTED_RUNNING]
    harm[:] = 0.0
    for d in range(count):
        spare_s = tbt_share * (decodes[d, OBJECTIVE_S] - step_s)  # prefill that each token makes bearable
        if spare_s <= 0.0:
            continue
        borne_s = placed_s - decodes[d, PLACED_S]
        age = 0.0
        if decodes[d, BEGAN_S] < now_s:
            age = max(now_s - decodes[d, BEGAN_S] - max(borne_s - queue_s, 0.0), 0.0) / step_s
        mean = decodes[d, MEAN_TOKENS]
        lacking = (long_s - decodes[d, LONG_S]) / spare_s - age
        if lacking >= 0.0:  # the same for all, and exponentials are what takes the time here
            hope = math.exp(-lacking / mean)
            left = math.exp(-t.HARM_AT_S[0] / (spare_s * mean))
            for k in range(len(t.HARM_AT_S)):
                harm[k] += hope * (1.0 - left)
                left = (left * left) * (left * left)
            continue
        for k in range(len(t.HARM_AT_S)):
            then = lacking + t.HARM_AT_S[k] / spare_s
            if then > 0.0:
                harm[k] += 1.0 - math.exp(-then / mean)
